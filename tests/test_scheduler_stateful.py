"""Random lives of the scheduler on the exact integer model: adds, aborts, cancelled and overlapping plans, tiny pools.

After every operation every count must be explained; at the end every answer must be the one that an unlimited pool
gives, bit for bit. Free blocks are poisoned as soon as they are free, so a stale read shows at once.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cupaged.errors import RequestError
from cupaged.sequence import Sequence
from cupaged.step_plan import StepPlan
from tests.support.integer_model import POISON, IntegerModel, expected_output
from tests.support.requests import make_request, make_scheduler

BLOCK_SIZES = st.one_of(st.integers(1, 8), st.sampled_from([16, 37, 256]))


class SchedulerLife(RuleBasedStateMachine):
    preemptions = 0  # over all lives: a run without any would prove little

    @initialize(
        block_size=BLOCK_SIZES,
        capacity=st.integers(8, 90),
        max_seqs=st.integers(1, 6),
        extra_budget=st.integers(0, 30),
    )
    def start(self, block_size: int, capacity: int, max_seqs: int, extra_budget: int) -> None:
        num_blocks = -(-capacity // block_size)
        self.block_size, self.num_blocks = block_size, num_blocks
        self.max_seqs, self.budget = max_seqs, max_seqs + extra_budget
        self.scheduler = make_scheduler(num_blocks, block_size, budget=self.budget, max_seqs=max_seqs)
        self.model = IntegerModel(num_blocks, block_size)
        self.sequences: list[Sequence] = []
        self.in_flight: list[StepPlan] = []

    @rule(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5), max_tokens=st.integers(1, 24), token=st.integers(0, 3))
    def add(self, lengths: list[int], max_tokens: int, token: int) -> None:
        for length in lengths:
            self.add_one(length, max_tokens, token)

    def add_one(self, length: int, max_tokens: int, token: int) -> None:
        request = make_request(str(len(self.sequences)), [token + i % 2 for i in range(length)], max_tokens)
        if -(-max(1, length + max_tokens - 1) // self.block_size) > self.num_blocks:
            with pytest.raises(RequestError):
                self.scheduler.add(request)
        else:
            self.sequences.append(self.scheduler.add(request))

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule()
    def plan(self) -> None:
        plan = self.scheduler.schedule()
        assert plan.num_tokens <= self.budget
        assert len(self.scheduler.running) <= self.max_seqs
        self.in_flight.append(plan)
        SchedulerLife.preemptions += len(self.in_flight[-1].preempted)

    @precondition(lambda self: self.in_flight)
    @rule()
    def finish_step(self) -> None:
        plan = self.in_flight.pop(0)
        self.scheduler.apply(plan, self.model.run(plan) if plan.sequences else None)
        self.poison_free_blocks()

    @precondition(lambda self: self.in_flight)
    @rule()
    def cancel(self) -> None:
        self.scheduler.cancel(self.in_flight.pop())

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.scheduler.finish(data.draw(st.sampled_from(self.sequences)), "abort")

    @rule(steps=st.integers(1, 20))
    def run_on(self, steps: int) -> None:
        while self.in_flight:
            self.finish_step()
        for _ in range(steps):
            self.plan()
            self.scheduler.check_invariants()
            self.finish_step()
            self.scheduler.check_invariants()

    def poison_free_blocks(self) -> None:
        pool = self.scheduler.cache._pool
        self.model.store[pool._counts == 0] = POISON

    @invariant()
    def everything_is_explained(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        while self.in_flight:
            self.finish_step()
        for _ in range(5000):
            if not self.scheduler.has_unfinished():
                break
            self.plan()
            assert self.in_flight[0].sequences, "nothing runs although something waits"
            self.finish_step()
        assert not self.scheduler.has_unfinished(), "somebody starves"
        assert self.scheduler.cache.num_free == self.num_blocks
        for sequence in self.sequences:
            request = sequence.request
            expected = expected_output(request.prompt_token_ids, request.params.max_tokens)
            got = sequence.output_ids.tolist()
            assert got == expected[: len(got)]
            assert sequence.finish_reason == "abort" or len(got) == len(expected)


@pytest.mark.parametrize("examples", [pytest.param(100, id="ci"), pytest.param(3000, id="long", marks=pytest.mark.slow)])
def test_every_life_ends_with_the_right_answers(examples: int) -> None:
    SchedulerLife.preemptions = 0
    run_state_machine_as_test(
        SchedulerLife,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
    assert SchedulerLife.preemptions > examples // 2


@pytest.mark.parametrize("block_size", [1, 2, 5, 16, 256])
@pytest.mark.parametrize("seed", range(4))
def test_a_crowd_in_a_tiny_pool(block_size: int, seed: int) -> None:
    """Many requests, little memory: preemption happens, and changes nothing."""
    random = np.random.default_rng(seed)
    num_blocks = -(-52 // block_size) + 2
    scheduler = make_scheduler(num_blocks, block_size, budget=20, max_seqs=7)
    model = IntegerModel(num_blocks, block_size)
    sequences = []
    for i in range(30):
        prompt = random.integers(0, 5, random.integers(1, 13)).tolist()
        sequences.append(scheduler.add(make_request(str(i), prompt, int(random.integers(1, 41)))))
    preempted = 0
    for _ in range(3000):
        if not scheduler.has_unfinished():
            break
        plan = scheduler.schedule()
        preempted += len(plan.preempted)
        scheduler.apply(plan, model.run(plan))
        model.store[scheduler.cache._pool._counts == 0] = POISON
        scheduler.check_invariants()
    assert not scheduler.has_unfinished()
    assert preempted or block_size == 256
    for sequence in sequences:
        request = sequence.request
        assert sequence.output_ids.tolist() == expected_output(request.prompt_token_ids, request.params.max_tokens)
