"""Prefix sharing through the whole engine: hits to the token, and copies before writes.

On the integer model, where a wrong block, a missing copy or a stale slot changes the answer and every count must be
explained after each step; and on a small Llama, where logprobs must not tell a cached prefix from a computed one.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged import LLM, SamplingParams
from cupaged.outputs import RequestOutput
from cupaged.step_plan import StepRecord
from tests.family_models import ROOT
from tests.support.life import Life, text

MODEL = str(ROOT / "llama_tied")
ROOMY: dict[str, Any] = {"num_blocks": 400, "block_size": 4, "max_model_len": 100}


# hits


@pytest.mark.parametrize("length", [4, 8, 12, 7, 9])
def test_a_fully_cached_prompt_computes_its_last_token(length: int) -> None:
    life = Life(32)
    assert life.ask(text(length), 1) == (0, length)
    assert life.ask(text(length), 1) == (length - 1, 1)
    assert life.ask(text(length), 3) == (length - 1, 3)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_a_fully_cached_prompt_gives_the_same_logprobs(device: str) -> None:
    llm = LLM(MODEL, device=device, **ROOMY)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=20, ignore_eos=True)
    prompt = text(8, 3)
    cold, warm = (llm.generate(prompt, params)[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 7)
    same_answer(cold, warm)


def test_a_block_that_was_evicted_is_not_mistaken_for_its_old_content() -> None:
    life = Life(3)
    assert life.ask(text(9), 4) == (0, 12)
    assert life.ask(text(9, 50), 4) == (0, 12)
    assert life.ask(text(9), 4)[0] == 0
    assert life.cache.counters.blocks_evicted > 0


def test_blocks_left_over_from_an_evicted_text_still_serve_its_beginning() -> None:
    life = Life(6)
    life.ask(text(17), 4)  # 20 slots
    life.ask(text(5, 50), 4)  # 8 slots: takes the end of the first
    assert life.ask(text(17), 4) == (16, 4)


def test_a_second_turn_computes_only_what_is_new() -> None:
    """To the token: the last token of the answer was never computed, so it is the first that is new."""
    life = Life(64)
    turn = text(9)
    for _ in range(6):
        before, known = life.model.computed, len(turn)
        name = life.add(turn, 5)
        life.finish()
        answer = life.done[name].outputs[0].token_ids
        if known > 9:
            assert life.done[name].num_cached_tokens == known - 4
            assert life.model.computed - before == 4 + 4
        turn = turn + answer + [7, 8, 9]
        life.check(name)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.integers(6, 40), st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=2, max_size=12))
def test_whatever_was_asked_before_no_answer_changes(block_size: int, capacity: int, prompts: list[list[int]]) -> None:
    life = Life(-(-(14 + 6) // block_size) + capacity // block_size, block_size)
    for prompt in prompts:
        found, computed = life.ask(prompt, 3)
        assert computed == len(prompt) + 2 - found
        assert found < len(prompt)


def test_prompts_that_differ_in_one_token_share_exactly_what_is_before_it() -> None:
    """Tokens are compared, not hashes: nothing of another prompt is ever served, wherever the difference is."""
    for place in range(12):
        life = Life(64)
        life.ask(text(12), 1)
        other = text(12)
        other[place] += 256  # the lowest byte is the same
        assert life.ask(other, 3) == (place, 12 - place + 2)


def test_salts_are_never_served_to_each_other() -> None:
    life = Life(64)
    life.ask(text(10), 1, "a")
    assert life.ask(text(10), 1, "b")[0] == 0
    assert life.ask(text(10), 1)[0] == 0
    assert [life.ask(text(10), 1, salt)[0] for salt in ("a", "b", "")] == [9, 9, 9]


def test_cold_and_warm_are_told_apart() -> None:
    life = Life(64)
    assert [life.ask(text(20), 2)[0] for _ in range(3)] == [0, 19, 19]
    life.engine.reset_prefix_cache()
    assert life.ask(text(20), 2)[0] == 0
    off = Life(64, prefix_cache=False)
    assert [off.ask(text(20), 2) for _ in range(2)] == [(0, 21)] * 2
    assert off.cache.num_cached == 0


def test_tokens_computed_again_after_a_preemption_are_no_hits() -> None:
    life = Life(10, max_num_seqs=8)
    names = [life.add(text(6, 100 * i), 20) for i in range(6)]
    life.finish()
    assert life.preemptions > 0
    for name in names:
        life.check(name)
        assert life.done[name].num_cached_tokens == 0


def test_prompt_logprobs_take_no_hits_but_leave_some() -> None:
    life = Life(64)
    life.ask(text(12), 1)
    before = life.model.computed
    name = life.add(text(12), 1, prompt_logprobs=0)
    life.finish()
    assert (life.done[name].num_cached_tokens, life.model.computed - before) == (0, 12)
    life.engine.reset_prefix_cache()
    life.add(text(12), 1, prompt_logprobs=0)
    life.finish()
    assert life.ask(text(12), 1) == (11, 1)


# in flight together


def test_identical_prompts_in_flight_end_in_one_copy_and_a_third_takes_nothing_from_them() -> None:
    """Requests that report prompt logprobs take no hits, so the same blocks are computed twice at once."""
    life = Life(24)
    names = [life.add(text(8), 10, prompt_logprobs=0) for _ in range(2)]
    life.step()
    assert life.cache.counters.blocks_merged == 2
    assert life.cache.usage().blocks_shared == 2
    names.append(life.add(text(30, 500), 10))
    while life.engine.has_unfinished():
        life.step()
        for table in life.cache._tables.values():
            assert (life.cache._pool.counts[table.blocks] >= 1).all()
    for name in names:
        life.check(name)


def test_the_second_of_two_identical_prompts_waits_and_shares() -> None:
    life = Life(24)
    names = [life.add(text(20), 4) for _ in range(3)]
    life.step()
    assert life.records[-1].num_tokens == 20, "though there is room for all"
    life.finish()
    assert life.model.computed == 20 + 3 + 2 * (1 + 3)
    assert [life.done[name].num_cached_tokens for name in names] == [0, 19, 19]
    for name in names:
        life.check(name)


def test_who_waits_for_a_prefix_that_is_aborted_computes_it() -> None:
    life = Life(24, max_num_batched_tokens=8, max_num_seqs=4)
    first, second = life.add(text(20), 4), life.add(text(20), 4)
    life.step()
    life.engine.abort(first)
    life.finish()
    life.check(second)


def test_a_copys_source_is_not_handed_out_in_the_same_step() -> None:
    """Cached and held by nobody once the copy is planned, it must outlive the step: its pin is all that keeps it."""
    life = Life(5)
    life.ask(text(8), 1)
    copier = life.add(text(7), 1)  # 6 of 8 cached tokens: the second block by copy
    others = [life.add([90 + i], 1) for i in range(3)]
    plan = life.engine._scheduler.schedule()
    assert plan.copies.tolist() == [[1, 2]]
    assert [item.blocks.tolist() for item in plan.sequences] == [[0, 2], [3]]
    life.engine._scheduler.cancel(plan)
    life.engine._scheduler.check_invariants()
    life.finish()
    for name in [copier, *others]:
        life.check(name)


def test_a_copy_of_a_block_that_is_itself_yet_to_be_copied_comes_from_the_original() -> None:
    """The copies of a step are one launch: a block cannot be filled and read in it. Here a resumed request's first
    sequence goes on in a copy of a cached block, and the second forks from it in the same step."""
    life = Life(16)
    life.ask(text(8), 1)
    group = life.add(text(7), 4, n=2)
    life.step()
    life.engine._scheduler._preempt(life.engine._live[group].request)
    life.step()
    life.finish()
    life.check(group)
    assert life.cache.counters.blocks_copied == 3


def test_a_group_that_gives_way_after_planning_copies_plans_none() -> None:
    """Three samples write to one shared block: the first gets a copy, the second finds no room, and all give way."""
    life = Life(7)
    first = life.add(text(13, 500), 8)  # 4 blocks, then 5
    group = life.add(text(6), 6, n=3)  # 2 blocks, then 4
    life.step()
    plan = life.engine._scheduler.schedule()
    assert len(plan.preempted) == 1
    assert plan.copies.tolist() == []
    life.engine._scheduler.cancel(plan)
    life.finish()
    life.check(first)
    life.check(group)


# a small Llama: with and without the cache


QUESTIONS = [[*text(18, 5), *tail] for tail in ([60, 61, 62], [60, 61, 70, 71, 72], [80], [60, 61, 62, 90])]
GREEDY = SamplingParams(temperature=0, max_tokens=10, logprobs=5, ignore_eos=True)


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="roomy"),
        pytest.param({"max_num_batched_tokens": 5, "max_num_seqs": 4}, id="chunked"),
        pytest.param({"num_blocks": 13, "max_model_len": 48}, id="preempted"),
        pytest.param({"block_size": 7}, id="block size 7"),
        pytest.param({"eviction": "weighted", "num_blocks": 20, "max_model_len": 48}, id="evicted"),
    ],
)
def test_a_cached_prefix_changes_no_token_and_no_logprob(device: str, options: dict[str, Any]) -> None:
    cold = [LLM(MODEL, device=device, prefix_cache=False, **ROOMY).generate(question, GREEDY)[0] for question in QUESTIONS]
    llm = LLM(MODEL, device=device, **{**ROOMY, **options})
    records: list[StepRecord] = []
    llm.engine.observers.append(records.append)
    one_by_one = [llm.generate(question, GREEDY)[0] for question in QUESTIONS]
    together = llm.generate(QUESTIONS, GREEDY)
    for expected, single, shared in zip(cold, one_by_one, together, strict=True):
        same_answer(expected, single)
        same_answer(expected, shared)
    assert one_by_one[1].num_cached_tokens == 20
    assert records[-1].blocks_copied > 0
    assert sum(record.num_preempted for record in records) > 0 or options.get("num_blocks") != 13


def test_aborted_neighbours_take_nothing_with_them() -> None:
    alone = [LLM(MODEL, device="reference", prefix_cache=False, **ROOMY).generate(question, GREEDY)[0] for question in QUESTIONS]
    engine = LLM(MODEL, device="reference", **{**ROOMY, "max_num_batched_tokens": 12, "max_num_seqs": 12}).engine
    wanted, doomed = [], []
    for question in QUESTIONS:
        doomed.append(engine.add_request(question, SamplingParams(n=2, seed=1, max_tokens=50)))
        wanted.append(engine.add_request(question, GREEDY))
    done = {}
    for step in range(1000):
        if not engine.has_unfinished():
            break
        done.update({output.request_id: output for output in engine.step() if output.finished})
        engine._scheduler.check_invariants()
        if step % 3 == 2 and doomed:
            engine.abort(doomed.pop())
    for name, expected in zip(wanted, alone, strict=True):
        same_answer(expected, done[name])


def same_answer(expected: RequestOutput, found: RequestOutput) -> None:
    """The same tokens, and the same logprobs up to the order of float sums."""
    a, b = expected.outputs[0], found.outputs[0]
    assert a.token_ids == b.token_ids
    for before, after in zip(a.logprobs, b.logprobs, strict=True):
        assert list(before) == list(after)
        assert [c.logprob for c in before.values()] == pytest.approx([c.logprob for c in after.values()], abs=1e-5)
