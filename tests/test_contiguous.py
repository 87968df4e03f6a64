"""Contiguous allocation under the real scheduler: hand-computed states, right answers, and slots that add up after every step."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged.cache.contiguous import RESERVATIONS, ContiguousCache
from cupaged.cache.manager import CacheManager
from cupaged.cache.states import MemoryStates, paged_states
from cupaged.errors import ConfigError, InvariantError, RequestError
from cupaged.scheduler import Scheduler
from cupaged.static_batch import StaticBatchScheduler
from tests.support.integer_model import IntegerModel, expected_output
from tests.support.requests import make_request


def make(num_blocks: int, reservation: str, *, block_size: int = 4, max_len: int = 32, max_seqs: int = 8, budget: int = 64) -> Scheduler:
    cache = ContiguousCache(num_blocks, block_size, reservation=reservation, max_len=max_len)
    return Scheduler(cache, max_num_batched_tokens=budget, max_num_seqs=max_seqs)


def add(scheduler: Scheduler, prompt: list[int], output: int) -> None:
    cache = scheduler.cache
    assert isinstance(cache, ContiguousCache)
    sequence = scheduler.add(make_request(str(len(prompt)), prompt, output))
    cache.expect(sequence.seq_id, len(prompt), output)


def states(scheduler: Scheduler, writing: dict[int, int] | None = None) -> MemoryStates:
    assert isinstance(scheduler.cache, ContiguousCache)
    return scheduler.cache.states(writing or {})


# ---- hand-computed


@pytest.mark.parametrize(
    ("reservation", "expected"),
    [
        # 5 + 6 tokens, of which 10 take a slot; block 4, a pool of 16 blocks (64 slots); 5 slots are being written
        ("max", MemoryStates(64, 5, 5, 22, 32)),  # 32 slots are promised: 8 blocks
        ("pow2", MemoryStates(64, 5, 5, 2, 52)),  # 5 + 8 - 1 = 12 slots: 3 blocks, a run of 4
        ("oracle", MemoryStates(64, 5, 5, 0, 54)),  # 10 slots: 3 blocks, a run of 4
        ("demand", MemoryStates(64, 5, 3, 0, 56)),  # 5 slots: 2 blocks, and all of them will be of use
    ],
)
def test_states_after_the_first_plan(reservation: str, expected: MemoryStates) -> None:
    scheduler = make(16, reservation)
    add(scheduler, [1, 2, 3, 4, 5], 6)
    plan = scheduler.schedule()
    found = states(scheduler, {item.seq_id: item.num_tokens for item in plan.sequences})
    assert found == expected
    assert found.token_states + found.reservation + found.internal + found.external + found.cached == found.pool


def test_a_power_of_two_is_its_own_round_number() -> None:
    promise = RESERVATIONS["pow2"]
    assert [promise(10, output, 2048) for output in (1, 7, 8, 9)] == [10, 17, 17, 25]
    assert promise(2000, 40, 2048) == 2048, "never more than the model takes"


def test_seven_requests_of_2048_fill_the_pool_of_the_paper() -> None:
    """15.7K slots (arXiv 2309.06180): 7 x 2,048 of them are 91.1 %, and 8.9 % are external: the table's own figure."""
    scheduler = make(983, "max", block_size=16, max_len=2048, max_seqs=64, budget=4096)
    for _ in range(9):
        add(scheduler, list(range(100)), 50)
    plan = scheduler.schedule()
    assert len(plan.sequences) == 7
    found = states(scheduler, {item.seq_id: 100 for item in plan.sequences})
    assert found.external / found.pool == pytest.approx(0.089, abs=0.0005)


def test_paged_states_by_hand() -> None:
    scheduler = Scheduler(CacheManager(16, 4, prefix_cache=False), max_num_batched_tokens=64, max_num_seqs=4)
    scheduler.add(make_request("a", [1, 2, 3, 4, 5], 6))
    plan = scheduler.schedule()
    assert paged_states(scheduler.cache, plan.num_tokens) == MemoryStates(64, 5, 0, 3, 56)


# ---- the real scheduler on it


def run(scheduler: Scheduler, model: IntegerModel) -> dict[int, list[int]]:
    """Answers by arrival; every count is checked after every step."""
    answers: dict[int, list[int]] = {}
    requests = list(scheduler.waiting)
    for _ in range(3000):
        if not scheduler.has_unfinished():
            break
        plan = scheduler.schedule()
        assert plan.sequences, "nothing can be scheduled"
        found = states(scheduler, {item.seq_id: item.num_tokens for item in plan.sequences})
        parts = (found.token_states, found.reservation, found.internal, found.external, found.cached)
        assert min(parts) >= 0
        assert sum(parts) == found.pool
        assert found.token_states == sum(item.stop for item in plan.sequences) + _resting(scheduler, plan)
        scheduler.apply(plan, model.run(plan))
        scheduler.check_invariants()
    for request in requests:
        answers[request.arrival] = request.sequences[0].output_ids.tolist()
    return answers


def _resting(scheduler: Scheduler, plan: object) -> int:
    """Computed tokens of running sequences that have no part in a plan."""
    planned = {item.seq_id for item in plan.sequences}  # type: ignore[attr-defined]  # any plan
    return sum(s.num_computed for r in scheduler.running for s in r.live if s.seq_id not in planned)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(RESERVATIONS)),
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=10),
    st.integers(8, 40),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([8, 64]),
    st.booleans(),
)
def test_answers_are_right_and_slots_add_up(
    reservation: str, sizes: list[tuple[int, int]], num_blocks: int, block_size: int, budget: int, static: bool
) -> None:
    num_blocks = max(num_blocks, 32 // block_size)
    cache = ContiguousCache(num_blocks, block_size, reservation=reservation, max_len=32)
    kind = StaticBatchScheduler if static else Scheduler
    scheduler = kind(cache, max_num_batched_tokens=budget, max_num_seqs=8)
    prompts = [[100 * i + j for j in range(p)] for i, (p, _) in enumerate(sizes)]
    for prompt, (_, output) in zip(prompts, sizes, strict=True):
        add(scheduler, prompt, output)
    answers = run(scheduler, IntegerModel(num_blocks, block_size))
    for arrival, (prompt, (_, output)) in enumerate(zip(prompts, sizes, strict=True)):
        assert answers[arrival] == expected_output(np.array(prompt, np.int32), output)
    assert cache.num_used == 0
    assert states(scheduler) == MemoryStates(num_blocks * block_size, 0, 0, 0, num_blocks * block_size)


def test_only_growth_on_demand_preempts_and_it_copies() -> None:
    preempted, copied = {}, {}
    for reservation in RESERVATIONS:
        scheduler = make(16, reservation, max_len=32)
        for i in range(6):
            add(scheduler, [10 * i + j for j in range(6)], 14)
        model, preempted[reservation] = IntegerModel(16, 4), 0
        while scheduler.has_unfinished():
            plan = scheduler.schedule()
            preempted[reservation] += len(plan.preempted)
            scheduler.apply(plan, model.run(plan))
        copied[reservation] = scheduler.cache.counters.blocks_copied
    assert preempted.pop("demand") > 0
    assert copied.pop("demand") > 0
    assert set(preempted.values()) == set(copied.values()) == {0}


def test_reservations_hold_fewer_requests_than_pages() -> None:
    most = {}
    for reservation in ("max", "pow2", "oracle"):
        scheduler = make(32, reservation, max_len=64, max_seqs=32, budget=256)
        for i in range(32):
            add(scheduler, [i] * 6, 7)
        most[reservation] = len(scheduler.schedule().sequences)
    paged = Scheduler(CacheManager(32, 4, prefix_cache=False), max_num_batched_tokens=256, max_num_seqs=32)
    for i in range(32):
        paged.add(make_request(str(i), [i] * 6, 7))
    assert (most["max"], most["pow2"], most["oracle"]) == (2, 8, 8)
    assert len(paged.schedule().sequences) == 11


def test_a_static_batch_takes_nobody_before_all_have_ended() -> None:
    cache = CacheManager(64, 4, prefix_cache=False)
    scheduler = StaticBatchScheduler(cache, max_num_batched_tokens=64, max_num_seqs=2)
    for i, output in enumerate((2, 6, 1)):
        scheduler.add(make_request(str(i), [i, i], output))
    model, present = IntegerModel(64, 4), []
    while scheduler.has_unfinished():
        plan = scheduler.schedule()
        present.append([item.seq_id for item in plan.sequences])
        scheduler.apply(plan, model.run(plan))
    assert [ids for ids, _ in itertools.groupby(present)] == [[0, 1], [1], [2]]


# ---- what it cannot do


def test_a_request_too_large_for_any_run_is_refused_in_one_line() -> None:
    cache = ContiguousCache(12, 4, reservation="oracle", max_len=48)
    cache.expect(0, 20, 13)  # 32 slots, 8 blocks: the largest run
    with pytest.raises(RequestError, match="run of 16 blocks, and the pool of 12 has none above 8") as refusal:
        cache.expect(1, 20, 14)
    assert len(str(refusal.value).splitlines()) == 1


def test_a_pool_smaller_than_one_reservation_is_refused() -> None:
    with pytest.raises(ConfigError, match="pool of 12 blocks"):
        ContiguousCache(12, 4, reservation="max", max_len=64)
    with pytest.raises(ConfigError, match="max, pow2, oracle, demand"):
        ContiguousCache(12, 4, reservation="least", max_len=4)


def test_contiguous_sequences_do_not_fork() -> None:
    scheduler = make(16, "oracle")
    add(scheduler, [1, 2, 3], 4)
    scheduler.schedule()
    with pytest.raises(InvariantError, match="one sequence"):
        scheduler.cache.fork(0, 1, 0)
