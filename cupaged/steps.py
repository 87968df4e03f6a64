"""Steps: plans on their way through the model, one after the other, or with the next one already asked for.

    one by one      | plan 0 | run 0 ........ | apply 0 | plan 1 | run 1 ........ | apply 1 |
    overlapped      | plan 0 | plan 1 | wait 0 | apply 0 | plan 2 | wait 1 | apply 1 |
    the device               | 0 ............ | 1 ............ | 2 ............

A device that computes while the host goes on never waits for the host then. What a plan needs of the one before it and is
not known yet is told in lookahead.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from cupaged.errors import InvariantError
from cupaged.exclusive import Exclusive
from cupaged.scheduler import Scheduler
from cupaged.step_plan import ModelOutput, StepPlan

T = TypeVar("T")


class Pending(Protocol):
    """What a submitted plan will have computed."""

    def collect(self) -> ModelOutput:
        """Wait for it. A pending output may also be dropped uncollected; its plan is computed all the same."""
        ...


class PlanRunner(Protocol):
    """What the engine needs of a model: model.runner.Runner, or a stand-in."""

    def run(self, plan: StepPlan) -> ModelOutput: ...


@runtime_checkable
class PatientRunner(PlanRunner, Protocol):
    """What overlapped steps need."""

    def submit(self, plan: StepPlan) -> Pending:
        """Ask for a plan to be computed after those that were submitted before."""
        ...


class Step(NamedTuple):
    """A plan that is to be applied now. `planning`: seconds that this and any other plan took the scheduler since the last step."""

    plan: StepPlan
    output: ModelOutput
    planning: float


class Steps:
    """Every plan is run at once. `interrupt`: Ctrl-C may end the model's work in the middle, nothing else."""

    def __init__(self, scheduler: Scheduler, runner: PlanRunner, interrupt: Exclusive) -> None:
        self._scheduler, self._runner, self._interrupt = scheduler, runner, interrupt

    def next(self) -> Step:
        """Plan and run a step. Whatever goes wrong, Ctrl-C included, is raised, and the plan did not happen."""
        started = time.perf_counter()
        plan = self._scheduler.schedule()
        planning = time.perf_counter() - started
        return Step(plan, self._ask(self._runner.run, plan), planning)

    def forget(self) -> None:
        """Nobody is left who waits for a token."""

    def _ask(self, model: Callable[[StepPlan], T], plan: StepPlan) -> T:
        """What the model says to a plan; one that it does not take is cancelled."""
        try:
            if not plan.sequences:
                raise InvariantError("requests are waiting, but none of them can be scheduled")
            return self._interruptibly(lambda: model(plan))
        except BaseException:
            self._scheduler.cancel(plan)
            raise

    def _interruptibly(self, work: Callable[[], T]) -> T:
        try:
            self._interrupt.interruptible = True
            return work()
        finally:
            self._interrupt.interruptible = False


class OverlappedSteps(Steps):
    """The next plan is submitted before the one in flight is collected, where it can be made so early."""

    _runner: PatientRunner

    def __init__(self, scheduler: Scheduler, runner: PatientRunner, interrupt: Exclusive) -> None:
        super().__init__(scheduler, runner, interrupt)
        self._flying: list[tuple[StepPlan, Pending]] = []  # in their order, at most two

    def next(self) -> Step:
        """A step that has been computed, the next one having been asked for. Whatever goes wrong is raised, and no plan in flight
        happened: a plan that came after it might find other tokens on the device than it was promised."""
        planning = 0.0
        try:
            # the first one, unless it is in flight already, and the one behind it
            for schedule in (self._scheduler.schedule, self._scheduler.schedule_ahead)[len(self._flying) :]:
                started = time.perf_counter()
                made = schedule()
                planning += time.perf_counter() - started
                if made is not None:
                    self._flying.append((made, self._ask(self._runner.submit, made)))
            plan, pending = self._flying[0]
            output = self._interruptibly(pending.collect)
        except BaseException:
            while self._flying:
                self._scheduler.cancel(self._flying.pop()[0])
            raise
        del self._flying[0]
        return Step(plan, output, planning)

    def forget(self) -> None:
        while self._flying:
            self._scheduler.apply(self._flying.pop(0)[0], NOTHING)


def make_steps(scheduler: Scheduler, runner: PlanRunner, interrupt: Exclusive, *, overlap: bool) -> Steps:
    """The way of an engine's plans. Raises InvariantError for a runner that must finish one before it takes the next."""
    if not overlap:
        return Steps(scheduler, runner, interrupt)
    if not isinstance(runner, PatientRunner):
        raise InvariantError("steps cannot overlap with a model that computes each plan at once")
    return OverlappedSteps(scheduler, runner, interrupt)


NOTHING = ModelOutput(np.empty(0, np.int32))
"""What is booked of a plan whose sequences have all ended: the model computes it, and nobody looks."""
