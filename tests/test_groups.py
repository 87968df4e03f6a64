"""Several answers to one prompt: samples and beams share it, give way together, and come back sharing.

On the integer model, where a wrong block or a missing copy changes the answer; and on a small Llama.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged import LLM, BeamSearchParams, SamplingParams
from cupaged.beam import BeamSearch
from cupaged.errors import RequestError
from tests.family_models import ROOT, config_change, plant
from tests.support.integer_model import expected_beams
from tests.support.life import Life, text
from tests.support.scripted import ScriptedModel, make_engine

MODEL = str(ROOT / "llama_tied")
ROOMY: dict[str, Any] = {"num_blocks": 400, "block_size": 4, "max_model_len": 100}


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_samples_compute_their_prompt_once(prefix_cache: bool) -> None:
    life = Life(64, prefix_cache=prefix_cache)
    name = life.add(text(10), 5, n=4)
    life.step()
    usage = life.cache.usage()
    assert (usage.blocks_used, usage.blocks_shared) == (3, 9)
    life.finish()
    life.check(name)
    assert life.model.computed == 10 + 4 * 4
    assert life.cache.counters.blocks_copied == 3, "the last to write keeps the block"
    assert [answer.index for answer in life.done[name].outputs] == [0, 1, 2, 3]


def test_samples_that_end_at_a_block_boundary_copy_nothing() -> None:
    life = Life(64)
    name = life.add(text(8), 5, n=4)
    life.finish()
    life.check(name)
    assert life.cache.counters.blocks_copied == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_group_that_fits_only_shared_resumes_shared(prefix_cache: bool) -> None:
    """Four samples of a 16-token prompt take 12 blocks shared and 24 apart; the pool has 12. An older request makes them
    give way; if they came back each with a prompt of its own they would never fit."""
    life = Life(12, prefix_cache=prefix_cache)
    old = life.add(text(7, 500), 20)
    group = life.add(text(16), 9, n=4)
    life.finish(limit=300)
    life.check(old)
    life.check(group)
    assert life.done[group].metrics.num_preemptions == 1, "it comes back when there is room for all four, not for one"
    assert life.model.computed <= 26 + 2 * (16 + 4 * 8), "the prompt is computed once a resume"


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_beams_that_fit_only_shared_resume_shared(prefix_cache: bool) -> None:
    life = Life(12, prefix_cache=prefix_cache)
    params = {"beam_width": 4, "max_tokens": 9}
    old = life.add(text(7, 500), 20)
    beams = life.search(text(16), **params)
    life.finish(limit=300)
    assert life.done[beams].metrics.num_preemptions > 0
    life.check(old)
    found = [tuple(answer.token_ids) for answer in life.done[beams].outputs]
    assert found == expected_beams(np.array(text(16)), BeamSearchParams(**params))


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_samples_and_beams_in_a_tiny_pool(seed: int, prefix_cache: bool) -> None:
    random = np.random.default_rng(seed)
    life = Life(18, 3, prefix_cache=prefix_cache, max_num_seqs=16, max_num_batched_tokens=24)
    names, searches = [], {}
    for _ in range(24):
        prompt = random.integers(0, 3, random.integers(1, 10)).tolist()
        width, length = int(random.integers(1, 5)), int(random.integers(4, 11))
        if random.random() < 0.5:
            params = BeamSearchParams(beam_width=width, max_tokens=length)
            searches[life.engine.add_request(prompt, params)] = params
        else:
            names.append(life.add(prompt, length, n=width))
    life.finish()
    assert life.preemptions > 0
    assert life.cache.counters.blocks_copied > 0
    for name in names:
        life.check(name)
    for name, params in searches.items():
        prompt_ids = np.array(life.done[name].prompt_token_ids)
        assert [tuple(a.token_ids) for a in life.done[name].outputs] == expected_beams(prompt_ids, params)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_beams_take_their_steps_together_however_much_each_has_to_compute(prefix_cache: bool) -> None:
    """A search that resumes with a budget too small for what its beams have each for themselves."""
    params = {"beam_width": 4, "max_tokens": 12}
    uneven = 0
    for first in range(8):
        prompt = text(5, 10 * first)
        life = Life(64, prefix_cache=prefix_cache, max_num_batched_tokens=4, max_num_seqs=4)
        name = life.search(prompt, **params)
        request = life.engine._live[name].request
        for _ in range(40):
            life.step()
            if len(request.live) == 4 and request.live[0].num_output == 9:
                break
        life.engine._scheduler._preempt(request)
        while life.engine.has_unfinished():
            life.step()
            uneven += life.records[-1].num_tokens < 4 and len({s.remaining for s in request.live}) > 1
        assert [tuple(a.token_ids) for a in life.done[name].outputs] == expected_beams(np.array(prompt), BeamSearchParams(**params))
    assert uneven, "no beam had to wait for another"


def test_who_is_about_to_end_waits_for_those_that_fork_from_it() -> None:
    """A group preempted one token before its end: the first sequence must not finish, and take the prompt's blocks
    along, before the second has forked from it."""
    life = Life(32, prefix_cache=False)
    group = life.add(text(10), 3, n=2)
    life.step()
    life.step()
    assert life.model.computed == 10 + 2
    life.engine._scheduler._preempt(life.engine._live[group].request)
    life.finish()
    life.check(group)
    assert life.model.computed == 12 + 12 + 2, "the prompt once, and two tokens of each"


def test_nobody_forks_from_what_is_still_on_its_way() -> None:
    """A resumed group, planned twice before anything has run: the first sequence computes, the second must wait."""
    life = Life(32, prefix_cache=False)
    group = life.add(text(10), 6, n=2)
    life.step()
    life.step()
    scheduler = life.engine._scheduler
    scheduler._preempt(life.engine._live[group].request)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert len(first.sequences) == 1
    assert second.sequences == ()
    scheduler.cancel(second)
    scheduler.apply(first, life.model.run(first))
    life.finish()
    life.check(group)


def test_a_group_may_lose_members_while_it_waits() -> None:
    life = Life(14, prefix_cache=False)
    old = life.add(text(7, 500), 20)
    group = life.add(text(16), 9, n=4)
    request = life.engine._live[group].request
    for _ in range(60):
        life.step()
        if request.num_preemptions and request in life.engine._scheduler.waiting:
            break
    assert request in life.engine._scheduler.waiting
    life.engine._scheduler.finish(request.live[0], "abort")
    life.finish()
    life.check(old)
    life.check(group)
    assert sorted(len(a.token_ids) for a in life.done[group].outputs)[1:] == [9, 9, 9]


# a request's answers


def test_a_search_that_never_stops_early_looks_as_far_as_the_penalty_allows() -> None:
    """A penalty below 0 makes longer answers worse: how good one could get is then judged by the present length."""
    search = BeamSearch(BeamSearchParams(beam_width=2, length_penalty=-1.0, early_stopping="never"), 10, frozenset([0]))

    def step(beams: list[tuple[int, ...]], scores: list[float], *offers: dict[int, float]) -> list[int]:
        lists = [(np.array(list(o), np.int32), np.array(list(o.values()), np.float32)) for o in offers]
        return [c.token_id for c in search.advance(beams, scores, lists)]

    rest = {90: -50.0, 91: -51.0}
    assert step([()], [0.0], {0: -1.0, 5: -1.25, 6: -4.0, **rest}) == [5, 6]
    assert step([(5,), (6,)], [-1.25, -4.0], {7: -0.5, 0: -3.75, **rest}, rest) == [7, 90], "-1.75 * 2 is above -5 * 2"
    step([(5, 7), (5, 90)], [-1.75, -51.25], {0: -0.25, **rest}, rest)
    assert [answer.token_ids for answer in search.hypotheses] == [(0,), (5, 7, 0)]


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_samples_of_one_seed_differ_and_come_again(device: str) -> None:
    llm = LLM(MODEL, device=device, **ROOMY)
    params = SamplingParams(n=5, seed=7, max_tokens=12, ignore_eos=True)
    first = answers(llm, [3, 4, 5], params)
    assert len({tuple(tokens) for tokens in first}) == 5
    assert answers(llm, [3, 4, 5], params) == first
    assert answers(LLM(MODEL, device=device, prefix_cache=False, **ROOMY), [3, 4, 5], params) == first


def test_a_sample_depends_on_its_index_alone() -> None:
    """Not on how many there are, and not on how many sequences the engine had before."""
    llm = LLM(MODEL, device="reference", **ROOMY)
    five, three, one = (
        answers(llm, [3, 4, 5], SamplingParams(n=n, seed=7, max_tokens=12, ignore_eos=True)) for n in (5, 3, 1)
    )
    assert (three, one) == (five[:3], five[:1])


def test_each_sample_ends_for_its_own_reason() -> None:
    llm = LLM(MODEL, device="reference", **ROOMY)
    params = SamplingParams(n=6, seed=1, max_tokens=20, stop_token_ids=list(range(40, 52)), ignore_eos=True)
    found = llm.generate([3, 4, 5], params)[0].outputs
    assert {answer.finish_reason for answer in found} == {"stop", "length"}
    for answer in found:
        assert (answer.stop_reason in params.stop_token_ids) == (answer.finish_reason == "stop")
        assert len(answer.token_ids) == 20 or answer.stop_reason == answer.token_ids[-1]


def test_cumulative_logprobs_are_the_sum_of_the_tokens_logprobs() -> None:
    llm = LLM(MODEL, device="reference", **ROOMY)
    for answer in llm.generate([3, 4, 5], SamplingParams(n=3, seed=1, max_tokens=9, logprobs=0))[0].outputs:
        total = sum(position[token].logprob for token, position in zip(answer.token_ids, answer.logprobs, strict=True))
        assert answer.cumulative_logprob == pytest.approx(total, abs=1e-5)


def test_best_of_gives_the_n_likeliest_by_mean_logprob() -> None:
    llm = LLM(MODEL, device="reference", **ROOMY)
    params = {"seed": 2, "max_tokens": 12, "stop_token_ids": list(range(40, 52))}
    every = llm.generate([3, 4, 5], SamplingParams(n=6, **params))[0].outputs
    best = llm.generate([3, 4, 5], SamplingParams(n=2, best_of=6, **params))[0].outputs
    ranked = sorted(every, key=lambda a: -a.cumulative_logprob / len(a.token_ids))
    by_sum = sorted(every, key=lambda a: -a.cumulative_logprob)
    assert by_sum[:2] != ranked[:2], "else the mean is not told from the sum"
    assert [a.token_ids for a in best] == [a.token_ids for a in ranked[:2]]
    assert [a.index for a in best] == [0, 1]


def test_best_of_cannot_be_streamed_and_n_can() -> None:
    engine = make_engine(ScriptedModel(default=[1, 2, 3]))
    with pytest.raises(RequestError, match="best_of cannot be streamed"):
        engine.stream("a", SamplingParams(n=2, best_of=3))
    assert not engine.has_unfinished()
    seen = [[(a.index, a.text) for a in output.outputs] for output in engine.stream("a", SamplingParams(n=2, best_of=2, max_tokens=3))]
    assert seen == [[(0, "a"), (1, "a")], [(0, "ab"), (1, "ab")], [(0, "abc"), (1, "abc")]]


@pytest.mark.parametrize("length_penalty", [-1.0, 0.5, 1.0])
@pytest.mark.parametrize("prompt", [text(1, 5), text(40, 5)])
def test_beams_are_ranked_by_their_generated_length(prompt: list[int], length_penalty: float, tmp_path: Path) -> None:
    ends_often = plant("llama_tied", config_change(eos_token_id=list(range(1, 60))), tmp_path / "model")
    llm = LLM(str(ends_often), device="reference", **ROOMY)
    params = BeamSearchParams(beam_width=4, max_tokens=8, length_penalty=length_penalty, early_stopping="never")
    found = llm.beam_search([prompt], params)[0].sequences
    assert len({len(beam.token_ids) for beam in found}) > 1
    for beam in found:
        assert beam.score == pytest.approx(beam.cumulative_logprob / len(beam.token_ids) ** length_penalty)
    assert [beam.score for beam in found] == sorted((beam.score for beam in found), reverse=True)


def answers(llm: LLM, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    return [answer.token_ids for answer in llm.generate(prompt, params)[0].outputs]
