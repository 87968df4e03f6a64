"""Ten thousand steps of whatever shape comes: prompts and answers of all lengths come and go, are preempted and aborted."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from cupaged import LLM, SamplingParams
from cupaged.outputs import RequestOutput
from tests.family_models import ROOT

STEPS = 10_000
SAMPLED = 25
"""Every so many requests one is answered again, alone, and compared."""

ROOMY: dict[str, Any] = {"num_blocks": 400, "block_size": 4, "max_model_len": 100, "prefix_cache": False}
CROWDED = ROOMY | {"num_blocks": 160, "max_num_batched_tokens": 300, "max_num_seqs": 40, "threads": 3}


class Crowd:
    """Requests that come in bursts and ones, and sometimes leave before their end."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self._engine, self._random = llm.engine, np.random.default_rng(seed)
        self.finished: list[RequestOutput] = []
        self._live: list[str] = []

    def add(self) -> None:
        prompt = self._random.integers(1, 100, int(self._random.integers(1, 70))).tolist()
        greedy = SamplingParams(temperature=0, max_tokens=int(self._random.integers(1, 30)), ignore_eos=True, logprobs=0)
        self._live.append(self._engine.add_request(prompt, greedy))

    def step(self) -> None:
        if not self._live or self._random.random() < 0.12:
            for _ in range(int(self._random.choice([1, 2, 8, 40], p=[0.55, 0.25, 0.15, 0.05]))):
                self.add()
        if self._random.random() < 0.01:
            self._engine.abort(self._live.pop(int(self._random.integers(len(self._live)))))
        for output in self._engine.step():
            if output.finished:
                self.finished.append(output)
                if output.request_id in self._live:
                    self._live.remove(output.request_id)


def logprobs(output: RequestOutput) -> list[float]:
    answer = output.outputs[0]
    return [place[token].logprob for token, place in zip(answer.token_ids, answer.logprobs or [], strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "widths"),
    [("llama_tied", {}), ("qwen3_window", {"dtype": "int8", "kv_cache_dtype": "bfloat16"}), ("llama_gqa7", {"dtype": "bfloat16", "kv_cache_dtype": "int8"})],
)
def test_ten_thousand_steps_of_random_shapes(family: str, widths: dict[str, str]) -> None:
    path = str(ROOT / family)
    llm = LLM(path, device="cpu", **CROWDED, **widths)
    shapes: Counter[tuple[int, int]] = Counter()
    preempted = []
    llm.engine.observers.append(lambda record: shapes.update([(record.num_tokens, record.num_decode)]))
    llm.engine.observers.append(lambda record: preempted.append(record.num_preempted))
    crowd = Crowd(llm, seed=11)
    for _ in range(STEPS):
        crowd.step()
    rows = {tokens for tokens, _ in shapes}
    assert {1, 2, 17, 300} <= rows
    assert len(shapes) > 1000
    assert sum(preempted) > 5
    assert all(math.isfinite(value) for output in crowd.finished for value in logprobs(output))
    alone, reference = LLM(path, device="cpu", threads=1, **ROOMY, **widths), LLM(path, device="reference", **ROOMY)
    for output in crowd.finished[::SAMPLED]:
        prompt, tokens, found = output.prompt_token_ids, output.outputs[0].token_ids, logprobs(output)
        (again,) = alone.generate([prompt], SamplingParams(temperature=0, max_tokens=len(tokens), ignore_eos=True, logprobs=0))
        assert again.outputs[0].token_ids == tokens
        assert logprobs(again) == found
        if not widths:  # the same numbers, so the definition's logprobs
            (defined,) = reference.generate([[*prompt, *tokens]], SamplingParams(max_tokens=1, prompt_logprobs=0))
            places = (defined.prompt_logprobs or [])[len(prompt) :]
            expected = [place[token].logprob for token, place in zip(tokens, places, strict=True) if place is not None]
            assert found == pytest.approx(expected, abs=5e-5)
