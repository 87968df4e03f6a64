"""The real model through the whole engine: text in, text out, against the stored reference outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged import LLM, SamplingParams
from tests.conftest import golden

CASES = golden("smollm2_greedy.json")["cases"]
IDS = [case["name"] for case in CASES]
MARGIN = 1e-3
GREEDY = SamplingParams(temperature=0, max_tokens=64, logprobs=0)


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return LLM(str(smollm2_path), num_blocks=400, max_model_len=2048)


@pytest.fixture(scope="module")
def together(llm: LLM) -> dict[str, Any]:
    """All cases in one batch."""
    outputs = llm.generate([case["prompt_ids"] for case in CASES], GREEDY)
    return {case["name"]: output.outputs[0] for case, output in zip(CASES, outputs, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_prompt_ids(llm: LLM, case: dict[str, Any]) -> None:
    if case["kind"] == "chat":
        assert llm.tokenizer.render_chat(case["messages"]) == case["prompt"]
        assert llm.tokenizer.encode_chat(case["messages"]) == case["prompt_ids"]
    assert llm.tokenizer.encode(case["prompt"]) == case["prompt_ids"]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_batch_of_everything_gives_the_reference_answers(together: dict[str, Any], case: dict[str, Any]) -> None:
    answer = together[case["name"]]
    count = next((i for i, margin in enumerate(case["margin"]) if margin < MARGIN), len(case["greedy_ids"]))
    assert answer.token_ids[:count] == case["greedy_ids"][:count]
    logprobs = [position[token].logprob for position, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    np.testing.assert_allclose(logprobs[:count], case["logprobs"][:count], atol=2e-3)
    if count == len(case["greedy_ids"]):
        assert answer.text == case["text"]
        assert answer.finish_reason == {"eos": "stop"}.get(case["finish_reason"], case["finish_reason"])


def test_special_tokens_are_shown_when_asked_for(llm: LLM) -> None:
    case = CASES[IDS.index("plain_capital")]
    params = SamplingParams(temperature=0, max_tokens=64, skip_special_tokens=False, include_stop_str_in_output=True)
    assert llm.generate(case["prompt"], params)[0].outputs[0].text == case["text_with_special"]


def test_a_preempted_answer_is_the_same(smollm2_path: Path, together: dict[str, Any]) -> None:
    llm = LLM(str(smollm2_path), num_blocks=12, max_num_seqs=8, max_num_batched_tokens=40)
    chosen = [case for case in CASES if case["n_prompt"] < 50]
    preempted: list[int] = []
    llm.engine.observers.append(lambda record: preempted.append(record.num_preempted))
    outputs = llm.generate([case["prompt"] for case in chosen], GREEDY)
    assert sum(preempted) > 0
    for case, output in zip(chosen, outputs, strict=True):
        assert output.outputs[0].token_ids == together[case["name"]].token_ids


def test_chat(llm: LLM) -> None:
    case = CASES[IDS.index("chat_capital")]
    output = llm.chat(case["messages"], GREEDY)[0]
    assert output.prompt_token_ids == case["prompt_ids"]
    assert output.outputs[0].text == case["text"]
    several = llm.chat([case["messages"], case["messages"]], GREEDY)
    assert [o.outputs[0].text for o in several] == [case["text"]] * 2


def test_a_streamed_answer_joins_to_the_whole(llm: LLM) -> None:
    case = CASES[IDS.index("emoji")]
    shown = ""
    for output in llm.engine.stream(case["prompt"], GREEDY):
        assert output.outputs[0].text.startswith(shown)
        shown = output.outputs[0].text
        assert case["text"].startswith(shown), "half a character was shown"
    assert shown == case["text"]
