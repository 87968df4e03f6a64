"""Streaks: what they plan is what would be planned without them, and they are there where they should be."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from cupaged.cache.eviction import POLICIES
from cupaged.cache.manager import CacheManager
from cupaged.errors import InvariantError
from cupaged.scheduler import Scheduler
from cupaged.sequence import Request
from cupaged.step_plan import UNREAD, Decodes, ModelOutput, ScheduledSequence, StepPlan, TokenLogprobs
from tests.support.requests import make_beam_request, make_request, make_scheduler


class WithoutStreaks(Scheduler):
    """Every plan is made from the sequences."""

    def _take_off(self, draft: Any) -> StepPlan:
        plan = super()._take_off(draft)
        self._streak = None
        self._in_flight[plan] = self._in_flight[plan][0], None
        return plan


def item_of(item: ScheduledSequence, blocks: bool) -> tuple[Any, ...]:
    samples = [(s.params, s.row_id, s.seed, s.index, s.banned, s.history is None) for s in item.samples]
    where = item.blocks.tolist() if blocks else len(item.blocks)
    return item.seq_id, item.start, item.token_ids.tolist(), where, samples, item.num_candidates, item.token_source


def content(plan: StepPlan, *, blocks: bool = True) -> list[Any]:
    """Everything that a plan says."""
    items = [item_of(item, blocks) for item in plan.sequences]
    return [plan.step, plan.num_tokens, plan.num_decode, plan.preempted, items, plan.copies.tolist() if blocks else len(plan.copies)]


def token_of(seq_id: int, position: int) -> int:
    return (seq_id * 7919 + position * 104729) % 50


def run(plan: StepPlan) -> ModelOutput:
    tokens = [token_of(item.seq_id + 31 * spec.index, item.stop) for item in plan.sequences for spec in item.samples]
    ids = np.array(tokens, np.int32)
    column = np.zeros((len(ids), 1), np.int32)
    logprobs = TokenLogprobs(ids, -ids.astype(np.float32) - 1, ids, column, column.astype(np.float32))
    k = [item.num_candidates for item in plan.sequences]
    offers = {
        item.seq_id: (np.arange(n, dtype=np.int32) + item.stop, -np.arange(1, n + 1, dtype=np.float32)) for item, n in zip(plan.sequences, k, strict=True) if n
    }
    return ModelOutput(ids, logprobs, {}, offers)


def some_request(rng: random.Random, name: str) -> Request:
    prompt = [rng.randrange(3) for _ in range(rng.choice([1, 1, 2, 5, 9, 17]))]
    if rng.random() < 0.1:
        return make_beam_request(name, prompt, beam_width=2, max_tokens=rng.randint(2, 8))
    params: dict[str, Any] = {}
    if rng.random() < 0.2:
        params["n"] = rng.randint(2, 3)
    if rng.random() < 0.2:
        params["min_tokens"] = rng.randint(1, 6)
    if rng.random() < 0.2:
        params["presence_penalty"] = 1.0
    if rng.random() < 0.1:
        params["logprobs"] = 1
    request = make_request(name, prompt, rng.randint(6, 40), eos=(token_of(rng.randrange(8), rng.randrange(40)),), **params)
    if rng.random() < 0.1:
        request.bad_words = ((3,), (1, 2)) if rng.random() < 0.5 else ((3,),)
    return request


def state(scheduler: Scheduler) -> list[Any]:
    of = [*scheduler.running, *scheduler.waiting]
    sequences = [s for request in of for s in request.sequences]
    return [
        [r.request_id for r in of],
        [(s.seq_id, s.tokens.tolist(), s.num_computed, s.num_scheduled, s.token_source, s.finish_reason, s.history_sent) for s in sequences],
        [(s.cumulative_logprob, s.candidates) for s in sequences],
        scheduler.cache.num_used,
    ]


@pytest.mark.parametrize("seed", range(24))
def test_plans_are_those_that_are_made_without_streaks(seed: int) -> None:
    """Requests come, end, are aborted and give way at random, with and without plans ahead."""
    rng = random.Random(seed)
    blocks, size, sharing = rng.choice([9, 24, 200]), rng.choice([1, 3, 4, 16]), seed % 3 == 0
    window = rng.choice([0, 0, 1, 6])
    comparable = not sharing and not window  # else blocks are given back in another order within a step
    pair = []
    for kind in (Scheduler, WithoutStreaks):
        cache = CacheManager(blocks * 8 // size + 8, size, prefix_cache=sharing, eviction=POLICIES["lru"], num_swap_blocks=0)
        pair.append(kind(cache, max_num_batched_tokens=24, max_num_seqs=6, window=window))
    requests: list[tuple[Request, ...]] = []
    streaks, flying, made = 0, [], {}

    def add() -> None:
        at = rng.getstate()
        both = []
        for scheduler in pair:
            rng.setstate(at)
            request = some_request(rng, str(len(requests)))
            if scheduler._most_blocks(request) <= scheduler.cache.num_blocks:
                scheduler.add(request)
                both.append(request)
        if both:
            requests.append(tuple(both))

    for _ in range(400):
        chance = rng.random()
        if not pair[0].has_unfinished() or chance < 0.06:
            add()
        elif chance < 0.09:
            for scheduler, request in zip(pair, rng.choice(requests), strict=True):
                scheduler.abort(request)
        elif chance < 0.11:
            for scheduler in pair:
                scheduler.cache.reset_prefix_cache()
        elif chance < 0.13 and flying:
            for scheduler, plan in zip(pair, flying.pop(), strict=True):
                scheduler.cancel(plan)
        ahead = len(flying) == 1 and rng.random() < 0.6
        if ahead or not flying:
            plans = [scheduler.schedule_ahead() if ahead else scheduler.schedule() for scheduler in pair]
            assert (plans[0] is None) == (plans[1] is None)
            if plans[0] is not None and plans[1] is not None:
                assert content(plans[0], blocks=comparable) == content(plans[1], blocks=comparable)
                streaks += isinstance(plans[0].sequences, Decodes)
                flying.append(plans)
                made[plans[0]] = content(plans[0])
        pair[0].check_invariants()
        if flying and (len(flying) == 2 or rng.random() < 0.6):
            plans = flying.pop(0)
            assert content(plans[0]) == made[plans[0]]  # a plan is a value, whatever is planned after it
            changed = [[s.seq_id for s in scheduler.apply(plan, run(plan))] for scheduler, plan in zip(pair, plans, strict=True)]
            assert changed[0] == changed[1]
            pair[0].check_invariants()
        assert state(pair[0]) == state(pair[1])
    assert streaks > 20


def started(scheduler: Scheduler, *requests: Request) -> StepPlan:
    """A plan of decode steps, made and not yet run."""
    for request in requests:
        scheduler.add(request)
    scheduler.apply(plan := scheduler.schedule(), run(plan))
    return scheduler.schedule()


def steps(scheduler: Scheduler, count: int, *, ahead: bool = False) -> str:
    """That many plans: "+" for those of a streak, "-" for the others."""
    kinds = ""
    for _ in range(count):
        plan = next(iter(scheduler._in_flight), None) or scheduler.schedule()
        if ahead:
            scheduler.schedule_ahead()
        kinds += "+" if isinstance(plan.sequences, Decodes) else "-"
        scheduler.apply(plan, run(plan))
        scheduler.check_invariants()
    return kinds


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_a_streak_lasts_till_the_first_end(size: int, ahead: bool) -> None:
    scheduler = make_scheduler(200, size)
    for first, (name, count) in enumerate((("a", 12), ("b", 20))):
        scheduler.add(make_request(name, [first, 2, 3], count))
    # the prompts, a plan to begin with, and ten more; with the one that is left it begins anew, once the other is known to have ended
    assert steps(scheduler, 20, ahead=ahead) == "--" + 10 * "+" + ("--" + 6 * "+" if ahead else "-" + 7 * "+")
    assert not scheduler.has_unfinished()


def test_a_streak_waits_with_those_who_wait() -> None:
    """Who finds no row, or no block, does not end it."""
    scheduler = make_scheduler(12, 4, max_seqs=1)
    for name in ("a", "b"):
        scheduler.add(make_request(name, [1, 2], 12))
    assert steps(scheduler, 12) == "--" + 10 * "+"
    assert [request.request_id for request in scheduler.waiting] == ["b"]
    assert steps(scheduler, 12) == "-" + 11 * "+"  # its prompt is cached but for the last token


def test_who_is_admitted_takes_part_at_once() -> None:
    scheduler = make_scheduler(100)
    started(scheduler, make_request("a", [1, 2], 40))
    steps(scheduler, 5)
    scheduler.add(make_request("b", [3, 4, 5], 40))
    plan = scheduler.schedule()
    assert [(item.seq_id, item.num_tokens) for item in plan.sequences] == [(0, 1), (1, 3)]
    scheduler.apply(plan, run(plan))
    assert steps(scheduler, 4) == "-+++"


@pytest.mark.parametrize(
    ("request_", "kinds"),
    [
        (make_request("rules that stay", [1, 2], 9, presence_penalty=1.0, logprobs=2), "--+++++++"),
        (make_request("a ban of so many tokens", [1, 2], 9, eos=(5,), min_tokens=4), "--++-++++"),
        (make_beam_request("beams", [1, 2], beam_width=2, max_tokens=9), "---------"),
    ],
)
def test_a_streak_is_made_where_the_rules_stay_the_same(request_: Request, kinds: str) -> None:
    scheduler = make_scheduler(100)
    scheduler.add(request_)
    assert steps(scheduler, 9) == kinds


def test_a_streak_is_everybodys() -> None:
    """What is planned while others are on their way is not to go on without them."""
    scheduler = make_scheduler(100)
    first = started(scheduler, make_request("a", [1, 2], 40))
    scheduler.add(make_request("b", [3], 40))
    second = scheduler.schedule()
    assert [item.seq_id for item in second.sequences] == [1]
    for plan in (first, second):
        scheduler.apply(plan, run(plan))
    assert [item.seq_id for item in scheduler.schedule().sequences] == [0, 1]


def test_words_of_several_tokens_are_watched_token_by_token() -> None:
    scheduler = make_scheduler(100)
    request = make_request("a", [1, 2], 9)
    request.bad_words = ((1, 2),)
    scheduler.add(request)
    assert steps(scheduler, 9) == 9 * "-"


def test_no_room_ends_a_streak_and_nothing_is_lost() -> None:
    scheduler = make_scheduler(4, 4, prefix_cache=False)
    for name in ("a", "b"):
        scheduler.add(make_request(name, [1, 2, 3], 8))
    preempted = 0
    while scheduler.has_unfinished():
        plan = scheduler.schedule()
        preempted += len(plan.preempted)
        scheduler.apply(plan, run(plan))
        scheduler.check_invariants()
    assert preempted > 0


def test_a_streak_that_lost_its_place_is_noticed() -> None:
    scheduler = make_scheduler(100)
    plan = started(scheduler, make_request("a", [1, 2], 40), make_request("b", [1], 40))
    scheduler.apply(plan, run(plan))
    steps(scheduler, 2)
    scheduler._live[1].num_computed -= 1
    with pytest.raises(InvariantError, match="streak goes on with sequence 1"):
        scheduler.check_invariants()
    scheduler._live[1].num_computed += 1
    scheduler._streak._blocks[0] = np.array([77], np.int32)
    with pytest.raises(InvariantError, match="blocks that sequence 0 has no more"):
        scheduler.check_invariants()


def test_decodes_are_a_sequence_of_scheduled_sequences() -> None:
    scheduler = make_scheduler(100, 4)
    started(scheduler, make_request("a", range(1, 6), 40), make_request("b", [1], 40))
    later = scheduler.schedule_ahead()
    decodes = later.sequences
    assert isinstance(decodes, Decodes)
    assert len(decodes) == 2
    first, second = decodes
    assert (first.seq_id, first.start, first.token_ids.tolist(), first.token_source) == (0, 6, [UNREAD], 0)
    assert (second.seq_id, second.start, second.blocks.tolist(), second.token_source) == (1, 2, [2], 1)
    assert first.blocks.tolist() == [0, 1]
    assert first.samples == decodes.samples[:1]
    assert [item.seq_id for item in decodes[::-1]] == [1, 0]
    assert decodes[-1].seq_id == 1
    with pytest.raises(IndexError):
        decodes[2]
    assert later.samples is decodes.samples
    assert later.written_blocks.tolist() == [1, 2]


def test_blocks_behind_the_window_are_given_back_at_once() -> None:
    """A prompt that is cached but for its last token begins a streak, and holds more than its window."""
    scheduler = make_scheduler(100, 4, budget=256, window=8)
    prompt = list(range(200))
    scheduler.add(make_request("a", prompt, 1))
    while scheduler.has_unfinished():
        scheduler.apply(plan := scheduler.schedule(), run(plan))
    b = scheduler.add(make_request("b", prompt, 20))
    for _ in range(3):
        scheduler.apply(plan := scheduler.schedule(), run(plan))
        assert scheduler.cache.num_used <= 4
    assert b.request.num_cached == 199


def test_what_comes_back_from_host_memory_is_shared_at_once() -> None:
    scheduler = make_scheduler(13, 4, preemption="swap")
    first, second = (scheduler.add(make_request(str(i), range(100 * i, 100 * i + n), m)) for i, (n, m) in enumerate(((22, 8), (20, 14))))
    while not len((plan := scheduler.schedule()).swap_in):
        scheduler.apply(plan, run(plan))
    assert first.finish_reason is not None
    scheduler.apply(plan, run(plan))
    assert scheduler.cache.cached_prefix(second.tokens) == second.num_computed // 4 * 4
