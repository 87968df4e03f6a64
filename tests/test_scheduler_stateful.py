"""Random lives of the scheduler on the exact integer model: adds, forks, follow-ups, aborts, cancelled and overlapping
plans, tiny pools, with and without the prefix cache. Plans are made one after the other, or ahead of the tokens of the one
in flight, and computed as late as possible, or in between.

After every operation every count must be explained; at the end every answer must be the one that an unlimited pool
gives, bit for bit. Free blocks are poisoned as soon as they are free, so a stale read shows at once.
"""

from __future__ import annotations

from typing import Any

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

from cupaged.cache.eviction import POLICIES
from cupaged.errors import RequestError
from cupaged.sequence import Request
from cupaged.step_plan import StepPlan
from tests.support.integer_model import IntegerModel, LateOutput, expected_beams, expected_output
from tests.support.requests import make_beam_request, make_request, make_scheduler

BLOCK_SIZES = st.one_of(st.integers(1, 8), st.sampled_from([16, 37, 256]))


class EndsOften(frozenset):
    """A set of EOS tokens that holds every third one, and counts as one."""

    def __contains__(self, token: object) -> bool:
        return isinstance(token, int) and token % 3 == 0

    def __len__(self) -> int:
        return 1


class NothingToDo(LateOutput):
    """Of a plan without sequences, which nobody runs."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan, self.output = plan, None

    def collect(self) -> None:
        return None


class SchedulerLife(RuleBasedStateMachine):
    # over all lives: a run without any would prove little
    preemptions = copies = found = evictions = merges = searches = swaps = ahead = dropped = 0

    @initialize(
        block_size=BLOCK_SIZES,
        capacity=st.integers(8, 60),
        max_seqs=st.integers(1, 6),
        extra_budget=st.integers(0, 30),
        prefix_cache=st.booleans(),
        eviction=st.sampled_from(sorted(POLICIES)),
        queue=st.sampled_from(["fcfs", "fcfs", "lpm", "dfs"]),
        preemption=st.sampled_from(["recompute", "swap", "swap", "auto"]),
        window=st.sampled_from([0, 0, 1, 3, 8]),
        overlap=st.booleans(),
    )
    def start(
        self, block_size: int, capacity: int, max_seqs: int, extra_budget: int, prefix_cache: bool, eviction: str, queue: str,
        preemption: str, window: int, overlap: bool,
    ) -> None:
        self.overlap = overlap
        num_blocks = -(-capacity // block_size)
        self.block_size, self.num_blocks = block_size, num_blocks
        self.max_seqs, self.budget = max_seqs, max_seqs + extra_budget
        self.scheduler = make_scheduler(
            num_blocks, block_size, budget=self.budget, max_seqs=max_seqs, prefix_cache=prefix_cache, eviction=eviction,
            queue=queue, preemption=preemption, window=window,
        )
        self.model = IntegerModel(num_blocks, block_size, window)
        self.requests: list[Request] = []
        self.in_flight: list[LateOutput] = []

    @rule(
        lengths=st.lists(st.integers(1, 12), min_size=2, max_size=6),
        max_tokens=st.integers(1, 24),
        token=st.integers(0, 3),
        n=st.sampled_from([1, 1, 1, 2, 3, 5]),
        salt=st.sampled_from(["", "", "other"]),
        ends=st.booleans(),
    )
    def add(self, lengths: list[int], max_tokens: int, token: int, n: int, salt: str, ends: bool) -> None:
        for length in lengths:
            self.add_one([token + i % 2 for i in range(length)], max_tokens, n, salt, ends)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), extra=st.lists(st.integers(0, 3), max_size=3), max_tokens=st.integers(1, 8))
    def follow_up(self, data: st.DataObject, extra: list[int], max_tokens: int) -> None:
        """The next turn: a prompt that begins with what an earlier request said, or with a part of it."""
        request = data.draw(st.sampled_from(self.requests))
        tokens = request.sequences[0].tokens.tolist()
        self.add_one(tokens[: data.draw(st.integers(1, len(tokens)))] + extra, max_tokens, 1, request.salt)

    def add_one(self, prompt: list[int], max_tokens: int, n: int, salt: str, ends: bool = False) -> None:
        request = make_request(str(len(self.requests)), prompt, max_tokens, n=n, salt=salt)
        request.eos_ids = EndsOften() if ends else frozenset()
        self.queue(request)

    @rule(
        length=st.integers(1, 12),
        token=st.integers(0, 3),
        width=st.integers(1, 5),
        max_tokens=st.integers(1, 12),
        length_penalty=st.sampled_from([-1.0, 0.0, 1.0]),
        early_stopping=st.sampled_from([True, False, "never"]),
        ends=st.booleans(),
    )
    def search(self, length: int, token: int, width: int, ends: bool, **params: Any) -> None:
        prompt = [token + i % 2 for i in range(length)]
        eos = EndsOften() if ends else frozenset()
        self.queue(make_beam_request(str(len(self.requests)), prompt, eos=eos, beam_width=width, **params))

    def queue(self, request: Request) -> None:
        n, prompt, max_tokens = request.width, request.prompt_token_ids, request.max_len - request.num_prompt
        longest = -(-max(1, len(prompt) + max_tokens - 1) // self.block_size)
        needed = longest + (n - 1) * max(0, longest - len(prompt) // self.block_size)
        if needed > self.num_blocks or n > self.max_seqs:
            with pytest.raises(RequestError):
                self.scheduler.add(request)
        else:
            self.scheduler.add(request)
            self.requests.append(request)

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule()
    def plan(self) -> None:
        self.submit(self.scheduler.schedule())

    @precondition(lambda self: len(self.in_flight) == 1)
    @rule()
    def plan_ahead(self) -> None:
        plan = self.scheduler.schedule_ahead()
        if plan is not None:
            assert plan.sequences
            assert not plan.preempted
            self.submit(plan)
            SchedulerLife.ahead += sum(item.token_source >= 0 for item in plan.sequences)

    def submit(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.budget
        assert self.scheduler.num_running_sequences <= self.max_seqs
        self.in_flight.append(self.model.submit(plan) if plan.sequences else NothingToDo(plan))
        SchedulerLife.preemptions += len(plan.preempted)

    @precondition(lambda self: self.model.submitted)
    @rule()
    def compute(self) -> None:
        self.model.compute_next()

    @precondition(lambda self: self.in_flight)
    @rule()
    def finish_step(self) -> None:
        late = self.in_flight.pop(0)
        SchedulerLife.dropped += sum(item.token_source >= 0 and item.seq_id not in self.scheduler._live for item in late.plan.sequences)
        self.scheduler.apply(late.plan, late.collect())
        self.model.poison(self.scheduler.cache)

    @precondition(lambda self: self.in_flight)
    @rule()
    def cancel(self) -> None:
        """The latest plan never gets to the device."""
        late = self.in_flight[-1]
        if late.output is None and late in self.model.submitted[-1:]:
            self.model.submitted.pop()
            self.in_flight.pop()
            self.scheduler.cancel(late.plan)

    @precondition(lambda self: self.in_flight)
    @rule()
    def cancel_all(self) -> None:
        """Something goes wrong with plans that the device has already got: it may compute them all the same, sooner or later."""
        while self.in_flight:
            late = self.in_flight.pop()
            late.abandoned = True
            self.scheduler.cancel(late.plan)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), whole=st.booleans())
    def abort(self, data: st.DataObject, whole: bool) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if whole or request.beam is not None:  # beams live and die together
            self.scheduler.abort(request)
        else:
            self.scheduler.finish(data.draw(st.sampled_from(request.sequences)), "abort")

    @rule()
    def reset(self) -> None:
        self.scheduler.cache.reset_prefix_cache()
        self.model.poison(self.scheduler.cache)

    @rule(steps=st.integers(1, 20), ahead=st.booleans())
    def run_on(self, steps: int, ahead: bool) -> None:
        while len(self.in_flight) > 1:
            self.finish_step()
        for _ in range(steps):
            if not self.in_flight:
                self.plan()
            if ahead:
                self.plan_ahead()
            self.scheduler.check_invariants()
            self.finish_step()
            self.scheduler.check_invariants()

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
            if not self.in_flight:
                self.plan()
                assert self.in_flight[0].plan.sequences, "nothing runs although something waits"
            if self.overlap:
                self.plan_ahead()
            self.finish_step()
        while self.in_flight:
            self.finish_step()
        assert not self.scheduler.has_unfinished(), "somebody starves"
        assert self.scheduler.cache.num_free == self.num_blocks
        for sequence in (sequence for request in self.requests for sequence in request.sequences):
            request = sequence.request
            if request.beam is not None:
                continue
            expected = expected_output(request.prompt_token_ids, request.params.max_tokens, sequence.index, self.model.window)
            expected = expected[: next((i + 1 for i, token in enumerate(expected) if token in request.eos_ids), len(expected))]
            got = sequence.output_ids.tolist()
            assert got == expected[: len(got)]
            assert sequence.finish_reason == "abort" or len(got) == len(expected)
        for request in self.requests:
            if request.beam is not None and all(s.finish_reason != "abort" for s in request.sequences):
                expected = expected_beams(request.prompt_token_ids, request.beam.params, request.beam._eos_ids, self.model.window)
                assert [answer.token_ids for answer in request.beam.hypotheses] == expected
                SchedulerLife.searches += 1
        counters = self.scheduler.cache.counters
        SchedulerLife.swaps += self.model.swapped
        SchedulerLife.copies += counters.blocks_copied
        SchedulerLife.evictions += counters.blocks_evicted
        SchedulerLife.merges += counters.blocks_merged
        SchedulerLife.found += sum(request.num_cached or 0 for request in self.requests)


@pytest.mark.parametrize("examples", [pytest.param(150, id="ci"), pytest.param(3000, id="long", marks=pytest.mark.slow)])
def test_every_life_ends_with_the_right_answers(examples: int) -> None:
    counted = ("preemptions", "copies", "found", "evictions", "merges", "searches", "swaps", "ahead", "dropped")
    for name in counted:
        setattr(SchedulerLife, name, 0)
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
    for name in counted:
        assert getattr(SchedulerLife, name), f"no {name}: this proves nothing about them"


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
        model.poison(scheduler.cache)
        scheduler.check_invariants()
    assert not scheduler.has_unfinished()
    assert preempted or block_size == 256
    for sequence in sequences:
        request = sequence.request
        assert sequence.output_ids.tolist() == expected_output(request.prompt_token_ids, request.params.max_tokens)
