"""A request gets the same tokens alone, batched, in chunks, preempted, served from the cache, and next to aborted
neighbours: greedy, sampled, with penalties and bans, several answers at once, and beams. On a small random Llama, where every logit is a float and ties do not happen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupaged import LLM, BeamSearchParams, SamplingParams
from cupaged.errors import ConfigError
from tests.family_models import ROOT
from tests.support.kernels import skip_without_compiler

MODEL = str(ROOT / "llama_tied")
ROOMY: dict[str, Any] = {"num_blocks": 400, "block_size": 4, "max_model_len": 100}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, repetition_penalty=1.7, frequency_penalty=0.5),
    SamplingParams(seed=1, max_tokens=20, ignore_eos=True),
    SamplingParams(seed=2, max_tokens=20, ignore_eos=True, temperature=1.5, top_k=20, top_p=0.9, min_p=0.01),
    SamplingParams(seed=3, max_tokens=20, ignore_eos=True, presence_penalty=1.5, logit_bias={5: 4.0, 6: -100.0}),
    SamplingParams(seed=4, max_tokens=20, stop_token_ids=list(range(40, 60)), min_tokens=12),
]


def prompts() -> list[list[int]]:
    random = np.random.default_rng(8)
    return [random.integers(1, 100, size).tolist() for size in (1, 5, 16, 17, 30, 44)]


@pytest.fixture(scope="module", params=["reference", "cpu", "emu"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "emu":
        skip_without_compiler()
    return request.param


@pytest.fixture(scope="module")
def alone(device: str) -> list[list[int]]:
    llm = LLM(MODEL, device=device, **ROOMY)
    return [tokens(llm, [prompt], [params])[0] for prompt, params in zip(prompts(), PARAMS, strict=True)]


def tokens(llm: LLM, many: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(many, params)]


def test_every_device_chooses_the_same_tokens(alone: list[list[int]]) -> None:
    assert tokens(LLM(MODEL, device="reference", **ROOMY), prompts(), PARAMS) == alone


def test_the_parameters_matter(alone: list[list[int]]) -> None:
    assert len({tuple(t) for t in alone}) == len(PARAMS)
    assert all(len(t) >= 12 for t in alone)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="batched"),
        pytest.param({"max_num_batched_tokens": 7, "max_num_seqs": 6}, id="chunked"),
        pytest.param({"block_size": 1, "num_blocks": 500}, id="block size 1"),
        pytest.param({"block_size": 37}, id="block size 37"),
        pytest.param({"num_blocks": 26}, id="preempted"),
        pytest.param({"num_blocks": 26, "preemption": "swap", "swap_space": 1 << 20}, id="swapped"),
        pytest.param({"num_blocks": 26, "preemption": "swap", "swap_space": 1 << 20, "prefix_cache": False}, id="swapped, no cache"),
        pytest.param({"num_blocks": 26, "prefix_cache": False, "queue": "lpm"}, id="preempted, no cache"),
        pytest.param({"num_blocks": 26, "max_num_batched_tokens": 9, "max_num_seqs": 6}, id="preempted and chunked"),
    ],
)
def test_company_changes_no_token(device: str, alone: list[list[int]], options: dict[str, Any]) -> None:
    llm = LLM(MODEL, device=device, **{**ROOMY, **options})
    preemptions = 0

    def count(record: Any) -> None:
        nonlocal preemptions
        preemptions += record.num_preempted

    llm.engine.observers.append(count)
    assert tokens(llm, prompts(), PARAMS) == alone
    assert preemptions > 0 or options.get("num_blocks") != 26
    llm.engine._scheduler.check_invariants()


GROUPS: list[SamplingParams | BeamSearchParams] = [
    SamplingParams(n=3, seed=5, max_tokens=15, ignore_eos=True),
    BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True),
    SamplingParams(n=3, seed=6, max_tokens=15, ignore_eos=True, repetition_penalty=1.5, presence_penalty=0.7),
    BeamSearchParams(beam_width=4, max_tokens=10, length_penalty=-1.0, early_stopping="never"),
    SamplingParams(n=2, best_of=4, seed=7, max_tokens=10, temperature=1.3, stop_token_ids=list(range(40, 60))),
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
]


def families() -> list[list[int]]:
    """Prompts with beginnings in common, some of which end inside a block."""
    random = np.random.default_rng(9)
    stem = random.integers(1, 100, 18).tolist()
    return [stem[:18], [*stem[:13], 7], stem[:8], [*stem, 9, 8, 7], stem[:11], [*stem[:16], *stem[:10]]]


def serve(llm: LLM, params: list[SamplingParams | BeamSearchParams]) -> list[list[list[int]]]:
    """All answers to the families' prompts; each is asked again as soon as all are answered."""
    rounds = []
    for _ in range(2):
        ids = [llm.engine.add_request(prompt, each) for prompt, each in zip(families(), params, strict=True)]
        done = {}
        while llm.engine.has_unfinished():
            done.update({o.request_id: [a.token_ids for a in o.outputs] for o in llm.engine.step() if o.finished})
            llm.engine._scheduler.check_invariants()
        rounds.append([done[name] for name in ids])
    assert rounds[0] == rounds[1]
    return rounds[0]


@pytest.fixture(scope="module")
def groups_alone(device: str) -> list[list[list[int]]]:
    """Every request in an engine of its own, without a cache."""
    found = []
    for number in range(len(GROUPS)):
        engine = LLM(MODEL, device=device, prefix_cache=False, **ROOMY).engine
        engine.add_request(families()[number], GROUPS[number])
        outputs = []
        while engine.has_unfinished():
            outputs += engine.step()
        found.append([answer.token_ids for answer in outputs[-1].outputs])
    return found


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="batched"),
        pytest.param({"max_num_batched_tokens": 17, "max_num_seqs": 17}, id="chunked"),
        pytest.param({"num_blocks": 25}, id="preempted"),
        pytest.param({"num_blocks": 25, "max_num_batched_tokens": 12, "max_num_seqs": 12}, id="preempted and chunked"),
        pytest.param({"num_blocks": 25, "preemption": "swap", "swap_space": 1 << 20}, id="swapped"),
        pytest.param({"num_blocks": 25, "preemption": "swap", "swap_space": 1 << 20, "max_num_batched_tokens": 12, "max_num_seqs": 12}, id="swapped and chunked"),
        pytest.param({"num_blocks": 40, "block_size": 3, "eviction": "weighted"}, id="evicted"),
    ],
)
def test_company_changes_no_answer_of_a_group(
    device: str, groups_alone: list[list[list[int]]], options: dict[str, Any], prefix_cache: bool
) -> None:
    llm = LLM(MODEL, device=device, prefix_cache=prefix_cache, **{**ROOMY, **options})
    records: list[Any] = []
    llm.engine.observers.append(records.append)
    assert serve(llm, GROUPS) == groups_alone
    assert records[-1].blocks_copied > 0
    assert sum(record.num_preempted for record in records) > 0 or options.get("num_blocks") != 25
    assert records[-1].blocks_evicted > 0 or not prefix_cache or options.get("num_blocks", 400) == 400
    assert records[-1].bytes_swapped > 0 or options.get("preemption") != "swap"


def test_the_groups_differ(groups_alone: list[list[list[int]]]) -> None:
    assert [len(answers) for answers in groups_alone] == [3, 3, 3, 4, 2, 1]
    assert all(len({tuple(answer) for answer in answers}) == len(answers) for answers in groups_alone)


def test_aborted_neighbours_change_no_token(device: str, alone: list[list[int]]) -> None:
    engine = LLM(MODEL, device=device, **{**ROOMY, "num_blocks": 40, "max_num_batched_tokens": 30, "max_num_seqs": 9}).engine
    wanted = {}
    for i, (prompt, params) in enumerate(zip(prompts(), PARAMS, strict=True)):
        engine.add_request(prompt[::-1], params, f"doomed {i}")
        wanted[engine.add_request(prompt, params)] = alone[i]
    done = {}
    step = 0
    while engine.has_unfinished():
        done.update({o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished})
        if step % 2 == 0:
            engine.abort(f"doomed {step // 2}")
        step += 1
    assert {request_id: done[request_id] for request_id in wanted} == wanted


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(device: str) -> None:
    llm = LLM(MODEL, device=device, **ROOMY)
    same = [SamplingParams(seed=s, max_tokens=12, ignore_eos=True) for s in (1, 1, 2, 2**64 - 1)]
    a, b, c, d = tokens(llm, [[3, 4, 5]] * 4, same)
    assert a == b
    assert len({tuple(a), tuple(c), tuple(d)}) == 3


def test_logprobs_are_the_models_own(device: str) -> None:
    """Before bias, penalties and temperature: the same token has the same logprob whatever the parameters."""
    llm = LLM(MODEL, device=device, **ROOMY)
    plain = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    biased = SamplingParams(seed=1, temperature=0.3, max_tokens=1, logprobs=5, logit_bias={7: 100.0}, repetition_penalty=2.0)
    first, second = (o.outputs[0] for o in llm.generate([[3, 4, 5]] * 2, [plain, biased]))
    assert second.token_ids == [7]
    assert first.token_ids != [7]
    for token in first.logprobs[0]:
        assert second.logprobs[0][token].logprob == pytest.approx(first.logprobs[0][token].logprob, abs=1e-5)


def bits(llm: LLM, many: list[list[int]]) -> list[list[float]]:
    """Every logprob of prompts and answers, to compare for equality."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=4, prompt_logprobs=4)
    return [
        [entry.logprob for place in (*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])) for entry in place.values()]
        for output in llm.generate(many, params)
    ]


@pytest.mark.parametrize("widths", [{}, {"dtype": "int8"}, {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}], ids=str)
def test_batch_invariant_logits_are_the_same_bits_in_any_company_chunks_and_threads(widths: dict[str, str]) -> None:
    roomy = ROOMY | {"device": "cpu", "batch_invariant": True, "prefix_cache": False} | widths
    many = prompts()
    alone = [bits(LLM(MODEL, threads=1, **roomy), [prompt])[0] for prompt in many]
    assert len(alone[-1]) > 4 * 12
    for options in ({"threads": 1}, {"threads": 3}, {"threads": 2, "max_num_batched_tokens": 7, "max_num_seqs": 6}, {"num_blocks": 26}):
        assert bits(LLM(MODEL, **{**roomy, **options}), many) == alone, options
    llm = LLM(MODEL, **{**roomy, "prefix_cache": True})
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    cold, warm = (llm.generate([many[-1]], greedy)[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, len(many[-1]) - 1)
    assert warm.outputs[0].logprobs == cold.outputs[0].logprobs


@pytest.mark.parametrize("device", ["reference", "emu"])
def test_a_device_that_is_not_batch_invariant_says_so(device: str) -> None:
    with pytest.raises(ConfigError, match=rf"^batch_invariant: on the {device} backend logits depend on what else is in the batch; use device cpu"):
        LLM(MODEL, device=device, batch_invariant=True, **ROOMY)


def test_prompt_logprobs_are_those_of_greedy_decoding(device: str) -> None:
    """No off-by-one: feeding an answer back as a prompt reports the logprobs that it was generated with."""
    llm = LLM(MODEL, device=device, **{**ROOMY, "max_num_batched_tokens": 8, "max_num_seqs": 2})
    answer = llm.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=20, logprobs=0, ignore_eos=True))[0]
    ids = answer.outputs[0].token_ids
    again = llm.generate([[3, 4, 5, *ids]], SamplingParams(max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs
    assert again[0] is None
    assert len(again) == 23
    for i, token in enumerate(ids):
        assert again[3 + i][token].logprob == pytest.approx(answer.outputs[0].logprobs[i][token].logprob, abs=1e-5)
