"""Plans made ahead of the tokens of the plan in flight: what they hold, when there is none, and what becomes of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cupaged.errors import InvariantError
from cupaged.scheduler import PROMISED, Scheduler
from cupaged.sequence import Sequence
from cupaged.step_plan import UNREAD, ModelOutput, ScheduledSequence, StepPlan
from tests.support.integer_model import IntegerModel, expected_output
from tests.support.requests import make_beam_request, make_request, make_scheduler


def output(plan: StepPlan, *tokens: int) -> ModelOutput:
    assert len(tokens) == len(plan.samples)
    return ModelOutput(np.array(tokens, np.int32))


def started(scheduler: Scheduler, *lengths: int, max_tokens: int = 5, **params: object) -> tuple[list[Sequence], StepPlan]:
    """Requests with prompts of so many tokens, and the plan that computes them, in flight."""
    sequences = [scheduler.add(make_request(str(i), range(1 + 100 * i, 1 + 100 * i + n), max_tokens, **params)) for i, n in enumerate(lengths)]
    return sequences, scheduler.schedule()


def test_the_next_plan_names_the_sample_that_its_token_comes_from() -> None:
    scheduler = make_scheduler(40, prefix_cache=False)
    (a, b, c), first = started(scheduler, 5, 1, 7)
    assert [item.seq_id for item in first.sequences] == [b.seq_id, a.seq_id, c.seq_id]  # one token first
    second = scheduler.schedule_ahead()
    of = {item.seq_id: item for item in second.sequences}
    assert [of[s.seq_id].token_source for s in (b, a, c)] == [0, 1, 2]
    assert all(item.token_ids.tolist() == [UNREAD] for item in second.sequences)
    assert [of[s.seq_id].start for s in (a, b, c)] == [5, 1, 7]
    assert a.tokens.tolist() == [1, 2, 3, 4, 5]  # nothing is made up
    scheduler.check_invariants()
    scheduler.apply(first, output(first, 20, 10, 30))
    assert [s.output_ids.tolist() for s in (a, b, c)] == [[10], [20], [30]]
    assert [s.token_source for s in (a, b, c)] == [-1] * 3
    third = scheduler.schedule_ahead()
    scheduler.apply(second, output(second, *(s * 100 for s in range(3))))
    assert [int(s.output_ids[1]) for s in (b, a, c)] == [100 * [item.seq_id for item in second.sequences].index(s.seq_id) for s in (b, a, c)]
    scheduler.cancel(third)
    scheduler.check_invariants()


def test_samples_that_are_not_promised_are_counted() -> None:
    """The source is a place among all samples of the plan, those of sequences that end with them included."""
    scheduler = make_scheduler(40, prefix_cache=False)
    scheduler.add(make_request("last token", [1], 1))
    gone, kept = (scheduler.add(make_request(name, [2], 9)) for name in ("gone", "kept"))
    first = scheduler.schedule()
    scheduler.finish(gone, "abort")
    second = scheduler.schedule_ahead()
    assert [(item.seq_id, item.token_source) for item in second.sequences] == [(kept.seq_id, 2)]
    scheduler.apply(first, output(first, 5, 6, 7))
    assert kept.output_ids.tolist() == [7]


def test_nothing_is_planned_beyond_the_longest_answer() -> None:
    scheduler = make_scheduler(40)
    (short,), first = started(scheduler, 3, max_tokens=2)
    second = scheduler.schedule_ahead()
    assert len(second.samples) == 1
    scheduler.apply(first, output(first, 5))
    assert scheduler.schedule_ahead() is None
    scheduler.apply(second, output(second, 6))
    assert (short.finish_reason, short.output_ids.tolist()) == ("length", [5, 6])
    assert scheduler.cache.num_used == 0


def test_what_a_sequence_would_have_gone_on_with_is_dropped_when_it_ends() -> None:
    scheduler = make_scheduler(40, block_size=2)
    (ends, stays), first = started(scheduler, 3, 6, eos=(99,))
    second = scheduler.schedule_ahead()
    assert [s.seq_id for s in scheduler.apply(first, output(first, 99, 50))] == [ends.seq_id, stays.seq_id]
    assert ends.finish_reason == "stop"
    scheduler.check_invariants()
    assert scheduler.apply(second, output(second, 77, 51)) == [stays]
    assert (ends.output_ids.tolist(), stays.output_ids.tolist()) == ([99], [50, 51])
    assert scheduler.cache.cached_prefix(np.array([1, 2, 3, 99, 77], np.int32)) == 3  # what was computed, and no more
    assert scheduler.cache.cached_prefix(np.array([1, 2, 3, UNREAD], np.int32)) == 3


def test_chunks_of_a_prompt_go_on_as_ever() -> None:
    scheduler = make_scheduler(40, budget=8)
    (long,), first = started(scheduler, 20)
    second = scheduler.schedule_ahead()
    assert [(p.sequences[0].start, p.num_tokens, len(p.samples)) for p in (first, second)] == [(0, 8, 0), (8, 8, 0)]
    assert second.sequences[0].token_source == -1
    scheduler.apply(first, output(first))
    third = scheduler.schedule_ahead()
    scheduler.apply(second, output(second))
    fourth = scheduler.schedule_ahead()
    assert (third.num_tokens, fourth.sequences[0].token_source) == (4, 0)
    scheduler.apply(third, output(third, 7))
    assert long.output_ids.tolist() == [7]


@pytest.mark.parametrize("reason", ["beams", "about to fork", "bad words", "counts are lost"])
def test_who_needs_the_token_has_it_read_first(reason: str) -> None:
    scheduler = make_scheduler(40)
    if reason == "beams":
        scheduler.add(make_beam_request("b", [1, 2, 3], beam_width=2, max_tokens=5))
    else:
        request = make_request("a", [1, 2, 3], 5, n=2 if reason == "about to fork" else 1, presence_penalty=float(reason == "counts are lost"))
        request.bad_words = ((5,), (6, 7)) if reason == "bad words" else ((5,),)
        scheduler.add(request)
    other = scheduler.add(make_request("other", [9], 5))
    scheduler.schedule()
    if reason == "counts are lost":
        ahead = scheduler.schedule_ahead()
        scheduler.cancel(ahead)  # the counts may hold a token too many
    before = [(s.num_scheduled, s.num_tokens) for s in scheduler._live.values()]
    assert scheduler.schedule_ahead() is None
    assert before == [(s.num_scheduled, s.num_tokens) for s in scheduler._live.values()]
    assert other.token_source == -1
    scheduler.check_invariants()


def swapping() -> tuple[Scheduler, IntegerModel, list[Sequence], StepPlan]:
    """A plan in flight that takes two requests to host memory, a large one and a small one, for the four answers of a third."""
    scheduler, model = make_scheduler(16, preemption="swap", prefix_cache=False), IntegerModel(16, 4)
    requests = (make_request("stays", [0, 1, 2], 14, n=4), make_request("large", np.arange(36) + 100, 20), make_request("small", [900, 901], 12))
    sequences = [scheduler.add(request) for request in requests]
    plan = scheduler.schedule()
    while not len(plan.swap_out):
        scheduler.apply(plan, model.run(plan))
        plan = scheduler.schedule()
    assert len(plan.preempted) == 2
    return scheduler, model, sequences, plan


def finish(scheduler: Scheduler, model: IntegerModel, sequences: list[Sequence]) -> None:
    while scheduler.has_unfinished():
        plan = scheduler.schedule()
        scheduler.apply(plan, model.run(plan))
        model.poison(scheduler.cache)
        scheduler.check_invariants()
    for sequence in sequences:
        assert sequence.output_ids.tolist() == expected_output(sequence.request.prompt_token_ids, sequence.request.params.max_tokens)


def test_a_plan_that_swaps_out_is_not_waited_for() -> None:
    scheduler, model, sequences, plan = swapping()
    late = model.submit(plan)
    second = scheduler.schedule_ahead()
    assert {item.seq_id for item in second.sequences} == {s.seq_id for s in sequences[0].request.live}
    behind = model.submit(second)
    scheduler.apply(plan, late.collect())
    scheduler.check_invariants()
    scheduler.apply(second, behind.collect())
    finish(scheduler, model, sequences)
    assert model.swapped


def test_nobody_comes_back_from_host_memory_before_it_has_got_there() -> None:
    scheduler, model, (stays, large, small), plan = swapping()
    scheduler.abort(large.request)  # now there is room for the small one
    second = scheduler.schedule_ahead()
    assert not len(second.swap_in)
    scheduler.cancel(second)
    scheduler.cancel(plan)  # it never gets to the device, and what it should have taken out is lost
    scheduler.check_invariants()
    assert scheduler.cache.swapped_blocks([small.seq_id]) == 0
    finish(scheduler, model, [stays, small])


def test_who_has_got_to_host_memory_comes_back_ahead() -> None:
    scheduler, model, (stays, large, small), plan = swapping()
    scheduler.abort(large.request)
    late = model.submit(plan)
    second = scheduler.schedule_ahead()
    behind = model.submit(second)
    scheduler.apply(plan, late.collect())
    third = scheduler.schedule_ahead()
    assert len(third.swap_in)
    assert small.seq_id in {item.seq_id for item in third.sequences}
    last = model.submit(third)
    scheduler.apply(second, behind.collect())
    scheduler.apply(third, last.collect())
    finish(scheduler, model, [stays, small])


def test_single_bad_words_and_min_tokens_are_known_ahead() -> None:
    scheduler = make_scheduler(40)
    request = make_request("a", [1, 2, 3], 9, eos=(0,), min_tokens=2)
    request.bad_words = ((5,),)
    scheduler.add(request)
    plans = [scheduler.schedule()]
    for token in (7, 8):
        plans.append(scheduler.schedule_ahead())
        scheduler.apply(plans[-2], output(plans[-2], token))
    assert [plan.samples[0].banned for plan in plans] == [(0, 5), (0, 5), (5,)]


def crowded(**params: object) -> tuple[Scheduler, list[Sequence], StepPlan]:
    """A plan in flight, after which somebody finds no block. Blocks of 2; each sequence's next token is the first of a block."""
    scheduler = make_scheduler(5, block_size=2, prefix_cache=False)
    (a, b), first = started(scheduler, 3, 3, **params)
    scheduler.apply(first, output(first, 50, 60))  # both tables are full with the token that comes next
    return scheduler, [a, b], scheduler.schedule()


def test_a_full_pool_lets_the_plan_in_flight_be_applied_first() -> None:
    scheduler, (a, b), plan = crowded()
    assert scheduler.schedule_ahead() is None
    assert [s.num_scheduled for s in (a, b)] == [1, 1]
    scheduler.check_invariants()
    scheduler.apply(plan, output(plan, 51, 61))
    again = scheduler.schedule()
    assert again.preempted == (b.request.arrival,)
    assert [item.token_ids.tolist() for item in again.sequences] == [[51]]


def test_a_draft_that_came_to_nothing_costs_no_history() -> None:
    scheduler, (a, b), plan = crowded(presence_penalty=1.0)
    assert all(spec.history is None for spec in plan.samples)  # sent with the prompts
    assert scheduler.schedule_ahead() is None
    assert a.history_sent
    assert b.history_sent


def test_plans_land_in_their_order() -> None:
    scheduler = make_scheduler(40)
    _, first = started(scheduler, 3)
    second = scheduler.schedule_ahead()
    for wrong in (lambda: scheduler.apply(second, output(second, 1)), lambda: scheduler.cancel(first)):
        with pytest.raises(InvariantError, match="in their order"):
            wrong()
    scheduler.cancel(second)
    scheduler.cancel(first)
    scheduler.check_invariants()


def test_a_cancelled_plan_takes_its_promises_along() -> None:
    scheduler, model = make_scheduler(40), IntegerModel(40, 4)
    (sequence,), first = started(scheduler, 5, max_tokens=6)
    second = scheduler.schedule_ahead()
    scheduler.cancel(second)
    scheduler.cancel(first)
    assert (sequence.token_source, sequence.remaining) == (-1, 5)
    while scheduler.has_unfinished():
        plan = scheduler.schedule()
        scheduler.apply(plan, model.run(plan))
    assert sequence.output_ids.tolist() == expected_output(sequence.request.prompt_token_ids, 6)


def test_a_token_has_a_value_or_a_source() -> None:
    model = IntegerModel(4, 4)
    blocks = np.array([0], np.int32)
    first, wrong = (ScheduledSequence(i, 0, np.array([7], np.int32), blocks + i, token_source=i - 1) for i in range(2))
    unread = replace(wrong, token_ids=PROMISED, token_source=-1)
    for second in (wrong, replace(unread, seq_id=1)):
        with pytest.raises((InvariantError, AssertionError), match="no value"):
            model.run(StepPlan(0, 4, (first, second)))
