"""The scheduler's decisions, told step by step: who is computed, with which blocks, and who gives way."""

from __future__ import annotations

import numpy as np
import pytest

from cupaged.errors import RequestError
from cupaged.scheduler import Scheduler
from cupaged.sequence import Status
from cupaged.step_plan import ModelOutput, StepPlan, TokenLogprobs
from tests.support.integer_model import IntegerModel, expected_output
from tests.support.requests import make_request, make_scheduler


def tokens_out(plan: StepPlan, *tokens: int) -> ModelOutput:
    return ModelOutput(np.array(tokens or [7] * len(plan.samples), np.int32))


def step(scheduler: Scheduler, *tokens: int) -> StepPlan:
    plan = scheduler.schedule()
    scheduler.apply(plan, tokens_out(plan, *tokens))
    scheduler.check_invariants()
    return plan


def shape(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(sequence, first position, number of tokens) of every row group."""
    return [(s.seq_id, s.start, s.num_tokens) for s in plan.sequences]


def run_to_end(scheduler: Scheduler, model: IntegerModel, limit: int = 10_000) -> int:
    preemptions = 0
    for _ in range(limit):
        if not scheduler.has_unfinished():
            return preemptions
        plan = scheduler.schedule()
        assert plan.sequences, "nothing runs although something waits"
        preemptions += len(plan.preempted)
        scheduler.apply(plan, model.run(plan))
        scheduler.check_invariants()
    raise AssertionError("the scheduler makes no progress")


def test_a_prompt_then_one_token_a_step() -> None:
    scheduler = make_scheduler(8)
    sequence = scheduler.add(make_request("a", [1, 2, 3, 4, 5], max_tokens=3))
    first = step(scheduler)
    assert shape(first) == [(0, 0, 5)]
    assert first.sequences[0].blocks.tolist() == [0, 1]
    assert first.sequences[0].samples
    assert first.sequences[0].stop == 5
    assert shape(step(scheduler)) == [(0, 5, 1)]
    assert shape(step(scheduler)) == [(0, 6, 1)]
    assert sequence.request.status is Status.FINISHED
    assert sequence.finish_reason == "length"
    assert sequence.output_ids.tolist() == [7, 7, 7]
    assert scheduler.cache.num_free == 8


def test_decode_goes_first_and_a_long_prompt_is_cut_in_chunks() -> None:
    scheduler = make_scheduler(32, budget=8)
    scheduler.add(make_request("short", [1, 2], max_tokens=9))
    step(scheduler)
    scheduler.add(make_request("long", list(range(20)), max_tokens=2))
    assert shape(step(scheduler)) == [(0, 2, 1), (1, 0, 7)]
    assert shape(step(scheduler)) == [(0, 3, 1), (1, 7, 7)]
    last = step(scheduler)
    assert shape(last) == [(0, 4, 1), (1, 14, 6)]
    assert [bool(s.samples) for s in last.sequences] == [True, True]
    assert shape(step(scheduler)) == [(0, 5, 1), (1, 20, 1)]


def test_rows_with_one_token_come_first_in_the_plan() -> None:
    scheduler = make_scheduler(32, budget=9)
    scheduler.add(make_request("long", list(range(20))))
    step(scheduler)
    scheduler.add(make_request("one", [5]))
    step(scheduler)
    plan = scheduler.schedule()
    assert shape(plan) == [(1, 0, 1), (0, 18, 2)]
    assert plan.num_decode == 1


def test_waiting_requests_are_served_in_order_and_nobody_overtakes() -> None:
    scheduler = make_scheduler(4)
    scheduler.add(make_request("a", [1] * 8))
    scheduler.add(make_request("big", [1] * 12))
    scheduler.add(make_request("small", [1]))
    assert shape(step(scheduler)) == [(0, 0, 8)]
    assert [r.arrival for r in scheduler.waiting] == [1, 2]


def test_no_more_than_max_num_seqs_run() -> None:
    scheduler = make_scheduler(32, max_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, [1, 2]))
    assert [s[0] for s in shape(step(scheduler))] == [0, 1]


def test_admission_leaves_every_running_sequence_a_block_to_grow() -> None:
    scheduler = make_scheduler(4)
    scheduler.add(make_request("a", [1] * 4))
    scheduler.add(make_request("b", [1] * 12))
    assert shape(step(scheduler)) == [(0, 0, 4)]


def test_the_latest_gives_way_and_resumes_with_its_whole_context() -> None:
    scheduler = make_scheduler(4, block_size=2)
    old = scheduler.add(make_request("old", [1, 2], max_tokens=7))
    step(scheduler, 10)
    new = scheduler.add(make_request("new", [3, 4], max_tokens=3))
    step(scheduler, 11, 20)  # old holds 2 blocks, new holds 1
    step(scheduler, 12, 21)  # old is at the end of its second block, new takes the fourth
    plan = step(scheduler, 13)
    assert plan.preempted == (1,)
    assert shape(plan) == [(0, 4, 1)]
    assert new.request.status is Status.WAITING
    assert (new.num_computed, new.request.num_preemptions) == (0, 1)
    for token in (14, 15, 16):
        step(scheduler, token)
    assert old.request.status is Status.FINISHED
    resumed = step(scheduler, 22)
    assert shape(resumed) == [(1, 0, 4)]
    assert new.output_ids.tolist() == [20, 21, 22]


def test_a_prompt_that_just_fits_is_not_kept_out_by_a_block_that_is_cached_in_part() -> None:
    """Copying that block would take one more than the pool has."""
    scheduler, model = make_scheduler(5, block_size=2, max_seqs=1), IntegerModel(5, 2)
    prompts = [0], [0, 1] * 4 + [0]
    sequences = [scheduler.add(make_request(str(len(prompt)), prompt, max_tokens=2)) for prompt in prompts]
    run_to_end(scheduler, model)
    assert [s.output_ids.tolist() for s in sequences] == [expected_output(np.array(prompt), 2) for prompt in prompts]


def test_preempted_requests_are_served_before_those_that_came_later() -> None:
    scheduler = make_scheduler(6, block_size=2, prefix_cache=False)
    scheduler.add(make_request("old", [1, 2], max_tokens=10))
    step(scheduler)
    for name in ("middle", "late"):
        scheduler.add(make_request(name, [3, 4], max_tokens=8))
    step(scheduler)
    scheduler.add(make_request("waiting", [5] * 4))
    for _ in range(6):
        step(scheduler)
    assert [r.request_id for r in scheduler.running] == ["old"]
    assert [r.request_id for r in scheduler.waiting] == ["middle", "late", "waiting"]


def test_preemption_does_not_change_a_token() -> None:
    prompts = [[i, i + 1, i + 2] for i in range(0, 60, 10)]
    scheduler, model = make_scheduler(12, block_size=2), IntegerModel(12, 2)
    sequences = [scheduler.add(make_request(str(p), p, max_tokens=16)) for p in prompts]
    preemptions = run_to_end(scheduler, model)
    assert preemptions > 0
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence.output_ids.tolist() == expected_output(np.array(prompt), 16)
    assert scheduler.cache.num_free == 12


def test_preemption_is_not_thrashing() -> None:
    """What is computed twice stays within the size of the pool a preemption, and preemptions stay rare."""
    scheduler, model = make_scheduler(16, block_size=4, max_seqs=16), IntegerModel(16, 4)
    for i in range(40):
        scheduler.add(make_request(str(i), [i] * 9, max_tokens=20))
    preemptions = run_to_end(scheduler, model)
    useful = 40 * (9 + 19)
    assert preemptions > 0
    assert model.computed < 1.5 * useful
    assert preemptions < 40


def test_a_request_larger_than_the_pool_is_refused_and_the_next_one_runs() -> None:
    scheduler = make_scheduler(2)
    with pytest.raises(RequestError, match=r"3 KV blocks of 4, but the pool has 2"):
        scheduler.add(make_request("large", [1] * 9, max_tokens=1))
    with pytest.raises(RequestError, match="max_tokens"):
        scheduler.add(make_request("grows", [1] * 2, max_tokens=9))
    scheduler.add(make_request("fits", [1] * 2, max_tokens=7))  # 9 tokens, the last of them never computed
    run_to_end(scheduler, IntegerModel(2, 4))


@pytest.mark.parametrize("when", ["waiting", "running", "in flight"])
def test_abort_frees_everything_at_any_moment(when: str) -> None:
    scheduler = make_scheduler(4)
    first = scheduler.add(make_request("first", [1] * 8))
    other = scheduler.add(make_request("other", [2] * 6))
    plan = scheduler.schedule()
    assert shape(plan) == [(0, 0, 8)]
    if when == "running":
        scheduler.apply(plan, tokens_out(plan))
    victim = other if when == "waiting" else first
    scheduler.finish(victim, "abort")
    scheduler.finish(victim, "abort")
    scheduler.check_invariants()
    if when == "in flight":
        assert scheduler.cache.num_free == 2, "a running step still reads these blocks"
    if when != "running":
        assert [s.request.request_id for s in scheduler.apply(plan, tokens_out(plan))] == (["first"] if when == "waiting" else [])
    scheduler.check_invariants()
    assert victim.finish_reason == "abort"
    survivor = first if victim is other else other
    while scheduler.has_unfinished():
        step(scheduler)
    assert survivor.finish_reason == "length"
    assert scheduler.cache.num_free == 4


def test_blocks_of_an_aborted_plan_are_not_handed_out_before_it_has_run() -> None:
    scheduler = make_scheduler(4)
    victim = scheduler.add(make_request("victim", [1] * 12))
    plan = scheduler.schedule()
    scheduler.finish(victim, "abort")
    scheduler.add(make_request("next", [2] * 8))
    assert shape(scheduler.schedule()) == []
    scheduler.apply(plan, tokens_out(plan))
    assert shape(scheduler.schedule()) == [(1, 0, 8)]


def test_a_sequence_dropped_in_flight_does_not_shift_the_tokens_of_the_others() -> None:
    scheduler = make_scheduler(8)
    sequences = [scheduler.add(make_request(name, [1])) for name in "abc"]
    plan = scheduler.schedule()
    scheduler.finish(sequences[0], "abort")
    scheduler.apply(plan, tokens_out(plan, 10, 11, 12))
    assert [s.output_ids.tolist() for s in sequences] == [[], [11], [12]]


def test_two_plans_in_flight_continue_a_prompt() -> None:
    scheduler, model = make_scheduler(8, budget=8), IntegerModel(8, 4)
    prompt = list(range(14))
    sequence = scheduler.add(make_request("a", prompt, max_tokens=1))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (shape(first), shape(second)) == ([(0, 0, 8)], [(0, 8, 6)])
    assert shape(scheduler.schedule()) == []
    scheduler.apply(first, model.run(first))
    scheduler.apply(second, model.run(second))
    assert sequence.output_ids.tolist() == expected_output(np.array(prompt), 1)


def test_a_cancelled_plan_never_happened() -> None:
    scheduler, model = make_scheduler(8), IntegerModel(8, 4)
    sequence = scheduler.add(make_request("a", [1, 2, 3], max_tokens=2))
    scheduler.cancel(scheduler.schedule())
    scheduler.check_invariants()
    assert (sequence.num_computed, sequence.num_scheduled) == (0, 0)
    run_to_end(scheduler, model)
    assert sequence.output_ids.tolist() == expected_output(np.array([1, 2, 3]), 2)


def test_a_cancelled_plan_rebuilds_the_penalty_counts() -> None:
    scheduler = make_scheduler(8)
    scheduler.add(make_request("a", [1, 2, 3], presence_penalty=1.0))
    plan = scheduler.schedule()
    assert plan.sequences[0].samples[0].history is not None
    scheduler.cancel(plan)
    assert scheduler.schedule().sequences[0].samples[0].history is not None


def test_history_is_sent_once_and_again_after_a_preemption() -> None:
    scheduler = make_scheduler(4, block_size=2)
    scheduler.add(make_request("old", [1, 2], max_tokens=7))
    step(scheduler, 10)
    scheduler.add(make_request("new", [3, 4], max_tokens=4, repetition_penalty=1.2))
    sent = []
    for _ in range(20):
        if not scheduler.has_unfinished():
            break
        for item in step(scheduler).sequences:
            if item.seq_id == 1 and item.samples:
                history = item.samples[0].history
                sent.append(None if history is None else (history[0].tolist(), history[1].tolist()))
    assert sent == [([3, 4], []), None, ([3, 4], [7, 7]), None]


def test_eos_and_stop_tokens_end_an_answer() -> None:
    scheduler = make_scheduler(8)
    eos = scheduler.add(make_request("eos", [1], 9, eos=(2, 3)))
    stop = scheduler.add(make_request("stop", [1], 9, stop_token_ids=[5]))
    ignored = scheduler.add(make_request("ignored", [1], 2, eos=(2, 3), ignore_eos=True))
    step(scheduler, 3, 5, 3)
    assert (eos.finish_reason, eos.stop_reason) == ("stop", None)
    assert (stop.finish_reason, stop.stop_reason) == ("stop", 5)
    assert ignored.finish_reason is None
    assert eos.output_ids.tolist() == [3]


def test_min_tokens_bans_every_token_that_ends() -> None:
    scheduler = make_scheduler(8)
    scheduler.add(make_request("a", [1], 9, eos=(2, 3), stop_token_ids=[8], min_tokens=2))
    assert [step(scheduler).sequences[0].samples[0].banned for _ in range(3)] == [(2, 3, 8), (2, 3, 8), ()]


def test_a_bad_word_is_banned_where_it_would_be_completed() -> None:
    request = make_request("a", [30], 9)
    request.bad_words = ((9,), (30, 40, 50))
    scheduler = make_scheduler(8)
    scheduler.add(request)
    banned = []
    for token in (40, 30, 40, 1):
        banned.append(step(scheduler, token).sequences[0].samples[0].banned)
    assert banned == [(9,), (9,), (9,), (9, 50)]  # the prompt's own 30, before the first 40, does not count


@pytest.mark.parametrize(("preempt_after", "reports"), [(None, [3, 3, 0]), (0, [3, 3, 3, 0]), (3, [3, 3, 0])])
def test_prompt_logprobs_are_reported_once_whatever_happens(preempt_after: int | None, reports: list[int]) -> None:
    """In chunks; from the start again for a sequence that was preempted half-way, and not at all when all were there."""
    scheduler = make_scheduler(8, block_size=2, budget=3, max_seqs=2)
    request = make_request("a", [10, 11, 12, 13, 14, 15, 16], 1, prompt_logprobs=0)
    scheduler.add(request)
    seen = []
    while scheduler.has_unfinished():
        plan = scheduler.schedule()
        item = plan.sequences[0]
        targets = np.empty(0, np.int32) if item.prompt_targets is None else item.prompt_targets
        seen.append(len(targets))
        n = len(targets)
        report = TokenLogprobs(
            targets, np.zeros(n, np.float32), np.ones(n, np.int32), np.empty((n, 0), np.int32), np.empty((n, 0), np.float32)
        )
        scheduler.apply(plan, ModelOutput(np.array([7] * len(plan.samples), np.int32), None, {0: report} if n else {}))
        if item.start == preempt_after:
            preempt_after = None
            scheduler._preempt(request)
    assert seen == reports
    assert [c.token_id for c in request.prompt_candidates] == [11, 12, 13, 14, 15, 16]


@pytest.mark.parametrize("window", [1, 3, 4, 8])
def test_a_window_keeps_every_block_it_reads_and_no_other(window: int) -> None:
    scheduler = make_scheduler(16, window=window)
    model = IntegerModel(16, 4, window)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    sequence = scheduler.add(make_request("a", prompt, max_tokens=12))
    while scheduler.has_unfinished():
        plan = scheduler.schedule()
        item = plan.sequences[0]
        oldest = max(0, item.start - window + 1)
        assert np.flatnonzero(item.blocks >= 0)[0] == oldest // 4
        scheduler.apply(plan, model.run(plan))
    assert sequence.output_ids.tolist() == expected_output(np.array(prompt, np.int32), 12, window=window)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_copies_of_a_cancelled_plan_are_sound_even_if_it_was_computed(prefix_cache: bool) -> None:
    """Answers that differ fork again after a preemption. The last one writes to the block that another was copied from, and
    where that plan is cancelled after the model's work, the copy is made again."""
    scheduler, model = make_scheduler(40, prefix_cache=prefix_cache), IntegerModel(40, 4)
    request = make_request("a", range(22), 12, n=3)
    scheduler.add(request)
    for _ in range(2):
        plan = scheduler.schedule()
        scheduler.apply(plan, model.run(plan))
    scheduler._preempt(request)
    cancelled = 0
    while scheduler.has_unfinished():
        plan = scheduler.schedule()
        output = model.run(plan)
        if len(plan.copies) and cancelled < 2:
            scheduler.cancel(plan)
            cancelled += 1
        else:
            scheduler.apply(plan, output)
        scheduler.check_invariants()
    assert cancelled == 2
    assert [s.output_ids.tolist() for s in request.sequences] == [expected_output(request.prompt_token_ids, 12, index=i) for i in range(3)]
