"""The simulator's loop: requests arrive, the real scheduler plans, a cost says how long the step takes, time goes on.

    arrivals up to now -> Scheduler.add -> Scheduler.schedule -> Cost.seconds -> now += seconds -> Scheduler.apply

The scheduler and the cache are those of the engine, unchanged; only the model is missing. Its tokens are numbers that
occur nowhere else, so that nothing is shared but what the workload shares. Nothing here reads a clock or draws a number:
the same workload and setup give the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from cupaged.beam import BeamSearch
from cupaged.cache.contiguous import ContiguousCache
from cupaged.cache.states import MemoryStates, paged_states
from cupaged.errors import ConfigError, InvariantError
from cupaged.params import BeamSearchParams, SamplingParams
from cupaged.scheduler import Scheduler
from cupaged.sequence import Request, Status
from cupaged.sim.cost import Cost, Work
from cupaged.step_plan import Decodes, ModelOutput, StepPlan
from cupaged.workloads.metrics import RequestTimes
from cupaged.workloads.request import TraceRequest

FIRST_TOKEN = 1 << 24
"""Simulated tokens count from here: above any vocabulary."""

_ONE = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Step:
    """A step, as observers see it: `work` took from `started` on `seconds`; `states` of the pool meanwhile, where wanted.

    num_running and num_waiting count requests; loaded: more of them are to come, or wait
    """

    started: float
    seconds: float
    work: Work
    num_running: int
    num_waiting: int
    num_preempted: int
    loaded: bool
    states: MemoryStates | None


@dataclass
class SimulatedModel:
    """A model's output without a model: tokens that occur nowhere else; beams are ranked by a fixed rule."""

    _next: int = field(default=FIRST_TOKEN)

    def run(self, plan: StepPlan) -> ModelOutput:
        count = len(plan.samples)
        tokens = np.arange(self._next, self._next + count, dtype=np.int64) % (1 << 30) + FIRST_TOKEN
        self._next += count
        if isinstance(plan.sequences, Decodes):
            return ModelOutput(tokens.astype(np.int32))
        offers = {item.seq_id: self._offer(item.seq_id, item.stop, item.num_candidates) for item in plan.sequences if item.num_candidates}
        return ModelOutput(tokens.astype(np.int32), candidates=offers)

    def _offer(self, seq_id: int, position: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Candidates of a beam whose logprobs are a hash of the beam and its length, so that beams overtake each other."""
        ranks = np.arange(1, count + 1, dtype=np.int64)
        noise = (seq_id * 7919 + position * 104729 + ranks * 1299709) % 997 / 997
        ids = FIRST_TOKEN + (seq_id * count + ranks) % (1 << 30)
        return ids.astype(np.int32), -np.cumsum(noise + 0.01).astype(np.float32)


class Simulator:
    """One engine under simulated time. `run` serves a workload; `add` and `step` are its parts.

    observe       called with every Step
    states_every  a Step has MemoryStates once in so many steps; 0: never (counting them takes as long as a step's planning)
    """

    def __init__(self, scheduler: Scheduler, cost: Cost, observe: Callable[[Step], None] | None = None, states_every: int = 0) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.times: list[RequestTimes] = []
        self.cached_tokens = self.computed_tokens = self.steps = 0
        self.more_to_come = True
        self._cost = cost
        self._observe = observe
        self._states_every = states_every
        self._model = SimulatedModel()
        self._first: dict[Request, float] = {}
        self._numbers = 0

    def add(self, traced: TraceRequest) -> Request:
        """A request that has arrived. Raises RequestError for one that could never run, ConfigError for samples or beams
        in a cache that cannot fork."""
        cache = self.scheduler.cache
        contiguous = isinstance(cache, ContiguousCache)
        if contiguous and traced.width > 1:
            raise ConfigError("contiguous allocations run one sequence a request: leave n and beams out of the workload")
        params = _ONE if traced.n == 1 else SamplingParams(n=traced.n, max_tokens=None, ignore_eos=True)
        search = None
        if traced.beams:
            search = BeamSearch(BeamSearchParams(beam_width=traced.beams, max_tokens=traced.num_output), traced.num_output, frozenset())
        request = Request(
            str(self._numbers), traced.prompt, params, max_len=traced.num_tokens, seed=0, beam=search, arrival_time=traced.arrival
        )
        self._numbers += 1
        sequence = self.scheduler.add(request)
        if isinstance(cache, ContiguousCache):
            cache.expect(sequence.seq_id, traced.num_prompt, traced.num_output)
        return request

    def step(self) -> None:
        """One step of whatever waits or runs."""
        plan = self.scheduler.schedule()
        if not plan.sequences and not plan.preempted:
            raise InvariantError("requests are waiting, but none of them can be scheduled")
        work = Work.of(plan)
        seconds = self._cost.seconds(work) if plan.sequences else 0.0
        if self._observe:
            self._observe(self._record(plan, work, seconds))
        self.now += seconds
        self.steps += 1
        self.computed_tokens += work.tokens
        for request in dict.fromkeys([sequence.request for sequence in self.scheduler.apply(plan, self._model.run(plan))]):
            first = self._first.setdefault(request, self.now)
            if request.status is Status.FINISHED:
                del self._first[request]
                self._finished(request, first)

    def _finished(self, request: Request, first_token: float) -> None:
        self.cached_tokens += request.num_cached or 0
        answers = 1 if request.beam else request.params.num_samples
        output = request.max_len - request.num_prompt
        self.times.append(RequestTimes(request.arrival_time, first_token, self.now, request.num_prompt, output, answers))

    def run(self, requests: Iterable[TraceRequest]) -> None:
        """Serve requests, which are in the order of their arrival, to the last."""
        for traced in requests:
            while self.now < traced.arrival and self.scheduler.has_unfinished():
                self.step()
            self.now = max(self.now, traced.arrival)
            self.add(traced)
        self.more_to_come = False
        while self.scheduler.has_unfinished():
            self.step()

    def _record(self, plan: StepPlan, work: Work, seconds: float) -> Step:
        scheduler = self.scheduler
        wanted = self._states_every and self.steps % self._states_every == 0
        loaded = self.more_to_come or bool(scheduler.waiting)
        return Step(
            self.now, seconds, work, len(scheduler.running), len(scheduler.waiting), len(plan.preempted), loaded,
            self._states(plan, work) if wanted else None,
        )  # fmt: skip

    def _states(self, plan: StepPlan, work: Work) -> MemoryStates:
        cache = self.scheduler.cache
        if isinstance(cache, ContiguousCache):
            return cache.states({item.seq_id: item.num_tokens for item in plan.sequences})
        return paged_states(cache, work.tokens)
