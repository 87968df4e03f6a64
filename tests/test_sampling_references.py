"""Every sampling parameter against stored probabilities: transformers' logits processors, OpenAI's penalty formula.

The draw is an inverse CDF in token-id order, so the probabilities say which token each uniform number must give. Each
token that is left is asked for near both ends and in the middle of its interval: a token too many or too few, or a
wrong probability anywhere, moves the ends of others. scripts/make_sampling_references.py writes the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cupaged.backends import cpu_sampling, sampling
from cupaged.params import SamplingParams
from tests.support import cpu_choice
from tests.support.sampling import batch_of, random_logits

REFERENCES = json.loads((Path(__file__).parent / "data" / "sampling_references.json").read_text(encoding="utf-8"))
VOCAB = REFERENCES["vocab_size"]
SMALLEST = 1e-4
"""Intervals below this are narrower than float32 logits are exact."""


def case_name(case: dict[str, Any]) -> str:
    return " ".join([*(f"{k}={v}" for k, v in case["params"].items()), f"seed={case['seed']}", *(["bad_words"] if "bad_words" in case else [])])


def rows_of(case: dict[str, Any], count: int) -> list[dict[str, Any]]:
    params = SamplingParams(**case["params"])
    biases = [*(params.logit_bias or {}).items(), *((token, -np.inf) for token in case["banned"])]
    return [
        {
            "temperature": params.temperature,
            "top_k": max(params.top_k, 0),
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition": params.repetition_penalty,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
            "bias": biases,
        }
    ] * count


@pytest.mark.parametrize("implementation", [sampling, cpu_choice], ids=["reference", "cpu"])
@pytest.mark.parametrize("case", REFERENCES["cases"], ids=case_name)
def test_each_token_is_drawn_exactly_in_its_interval(case: dict[str, Any], implementation: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    probabilities = np.zeros(VOCAB)
    probabilities[[int(token) for token in case["probabilities"]]] = list(case["probabilities"].values())
    asked = np.flatnonzero(probabilities >= SMALLEST)
    assert len(asked)
    ends = np.cumsum(probabilities)[asked]
    margins = 0.02 * probabilities[asked]
    starts = ends - probabilities[asked]
    uniforms = np.concatenate([starts + margins, (starts + ends) / 2, ends - margins])

    rows = rows_of(case, len(uniforms))
    counts = sampling.TokenCounts()
    for row_id in range(len(rows)):
        counts.set_history(row_id, np.array(REFERENCES["prompt"], np.int32), np.array(REFERENCES["answer"], np.int32))
    logits = np.tile(random_logits(case["seed"], VOCAB, case["scale"]), (len(rows), 1))
    for module in (sampling, cpu_sampling):
        monkeypatch.setattr(module, "uniform", lambda *_: uniforms)

    tokens = implementation.sample(logits, batch_of(rows), counts)

    assert tokens.tolist() == np.tile(asked, 3).tolist()


@pytest.mark.parametrize("implementation", [sampling, cpu_choice], ids=["reference", "cpu"])
@pytest.mark.parametrize("case", REFERENCES["cases"], ids=case_name)
def test_greedy_takes_the_likeliest_after_bias_and_penalties(case: dict[str, Any], implementation: ModuleType) -> None:
    row = {**rows_of(case, 1)[0], "temperature": 0}
    counts = sampling.TokenCounts()
    counts.set_history(0, np.array(REFERENCES["prompt"], np.int32), np.array(REFERENCES["answer"], np.int32))
    tokens = implementation.sample(random_logits(case["seed"], VOCAB, case["scale"])[None], batch_of([row]), counts)
    assert tokens.tolist() == [int(max(case["probabilities"], key=case["probabilities"].__getitem__))]


def test_the_references_cover_every_parameter() -> None:
    covered = {name for case in REFERENCES["cases"] for name in case["params"]} | {"bad_words" for case in REFERENCES["cases"] if "bad_words" in case}
    assert covered == {
        "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "logit_bias", "bad_words", "min_tokens",
    }  # fmt: skip
