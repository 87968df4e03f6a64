"""The whole engine on the device: the same tokens however the work is cut up, the tokens of the stored references, and in
16 bits their log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from cupaged import LLM, SamplingParams
from gpu.cases import Case, Failure, Figures, Skip
from gpu.end_to_end import model_path
from gpu.machine import ROOT

FAMILIES = ROOT / "tests" / "families"
GOLDEN = ROOT / "tests" / "golden" / "smollm2_greedy.json"
MARGIN = 1e-3
"""From the first step on whose two likeliest tokens are nearer than this, a reference answer says nothing."""

CLEAR_MARGIN = 0.5
CLOSE = {"float16": (0.1, 0.012), "bfloat16": (0.8, 0.1)}
"""How far a log-probability may be off, at most and in the mean of an answer. The same weights in these types through torch on a
CPU are off by at most 0.023 and 0.22, in the mean by 0.004 and 0.04."""

WAYS: dict[str, dict[str, Any]] = {
    "together": {}, "without graphs": {"enforce_eager": True}, "in chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "preempted": {"num_blocks": 16}, "swapped": {"num_blocks": 16, "preemption": "swap"},
}  # fmt: skip
ROOMY: dict[str, Any] = {"num_blocks": 60, "block_size": 4, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, max_tokens=9, ignore_eos=True, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, frequency_penalty=0.5),
]


def engines(device: str) -> Iterator[Case]:
    """Small models of every family in float32: the reference's tokens, in all WAYS."""
    if not FAMILIES.is_dir():
        raise Skip("tests/families is not here")
    for family in ("llama_tied", "llama3", "mistral", "qwen2_window", "qwen3"):
        for way in WAYS if family == "llama_tied" else ("together",):
            yield Case(f"{family}, {way}", partial(_same_tokens, device, family, way))


def _same_tokens(device: str, family: str, way: str) -> Figures:
    prompts = [np.random.default_rng(s).integers(3, 90, n).tolist() for s, n in enumerate((3, 9, 20))]

    def tokens(**options: Any) -> list[list[int]]:
        llm = LLM(str(FAMILIES / family), **{**ROOMY, **options})
        return [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS)]

    ours, expected = tokens(device=device, dtype="float32", **WAYS[way]), tokens(device="reference")
    if ours != expected:
        raise Failure(f"other tokens: {ours} instead of {expected}")
    return {"tokens": sum(map(len, ours))}


@dataclass
class Models:
    """SmolLM2 on the device in one type at a time: the last one that was asked for."""

    device: str
    name: str
    _open: dict[str, LLM] = field(default_factory=dict)

    def get(self, dtype: str) -> LLM:
        if dtype not in self._open:
            self._open.clear()
            self._open[dtype] = LLM(model_path(self.name), device=self.device, dtype=dtype, num_blocks=400, max_model_len=2048)
        return self._open[dtype]


def references(device: str, model: str, longest: int | None = None) -> Iterator[Case]:
    """All stored answers of SmolLM2; with `longest`, only those of so many tokens, prompt and answer together."""
    models = Models(device, model)
    stored = [case for case in json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"] if longest is None or len(case["prompt_ids"] + case["greedy_ids"]) <= longest]
    yield Case("all answers in one batch, float32", partial(_greedy_together, models, stored))
    for dtype in ("float32", *CLOSE):
        for case in stored:
            yield Case(f"{case['name']}, {dtype}", partial(_greedy if dtype == "float32" else _given, models, dtype, case))


def _greedy_together(models: Models, stored: list[dict[str, Any]]) -> Figures:
    params = [SamplingParams(temperature=0, max_tokens=len(case["greedy_ids"]), logprobs=0) for case in stored]
    outputs = models.get("float32").generate([case["prompt_ids"] for case in stored], params)
    worst = max(_compare(case, output.outputs[0]) for case, output in zip(stored, outputs, strict=True))
    return {"largest difference of a logprob": worst}


def _greedy(models: Models, dtype: str, case: dict[str, Any]) -> Figures:
    params = SamplingParams(temperature=0, max_tokens=len(case["greedy_ids"]), logprobs=0)
    (output,) = models.get(dtype).generate([case["prompt_ids"]], params)
    return {"largest difference of a logprob": _compare(case, output.outputs[0])}


def _compare(case: dict[str, Any], answer: Any) -> float:
    count = next((i for i, margin in enumerate(case["margin"]) if margin < MARGIN), len(case["greedy_ids"]))
    if answer.token_ids[:count] != case["greedy_ids"][:count]:
        raise Failure(f"{case['name']}: {answer.token_ids[:count]} instead of {case['greedy_ids'][:count]}")
    ours = np.array([position[token].logprob for position, token in zip(answer.logprobs, answer.token_ids, strict=True)])[:count]
    apart = float(np.abs(ours - case["logprobs"][:count]).max(initial=0))
    if not apart <= 2e-3:
        raise Failure(f"{case['name']}: logprobs are {apart:.2g} apart")
    return apart


def _given(models: Models, dtype: str, case: dict[str, Any]) -> Figures:
    """The stored answer as part of the prompt: no earlier choice moves what is compared."""
    ids, start = case["prompt_ids"] + case["greedy_ids"], len(case["prompt_ids"])
    (output,) = models.get(dtype).generate([ids], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0))
    reports = [output.prompt_logprobs[i][ids[i]] for i in range(max(start, 1), len(ids))]
    expected = np.array(case["logprobs"])[len(case["greedy_ids"]) - len(reports) :]
    apart = np.abs(np.array([report.logprob for report in reports]) - expected)
    clear = np.array(case["margin"])[-len(reports) :] > CLEAR_MARGIN
    wrong = sum(report.rank != 1 for report, sure in zip(reports, clear, strict=True) if sure)
    most, mean = CLOSE[dtype]
    if not (apart.max() <= most and apart.mean() <= mean and wrong == 0):
        raise Failure(f"logprobs are {apart.max():.2g} apart, in the mean {apart.mean():.2g} ({most}, {mean} allowed); {wrong} clear choices are others")
    same = float(np.mean([report.rank == 1 for report in reports]))
    return {"largest difference of a logprob": float(apart.max()), "mean": float(apart.mean()), "same choice %": 100 * same}
