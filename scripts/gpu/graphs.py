"""Replayed graphs against steps that run their kernels one by one: the same plans, with tokens that are given, on both."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from cupaged.backends.device import Device
from cupaged.backends.kernels import KernelBackend
from cupaged.model.kv_store import KVStore
from cupaged.model.llama import Llama
from cupaged.model.rope import rope_tables
from cupaged.model.runner import Runner
from cupaged.model.weights import load_weights
from cupaged.params import SamplingParams
from cupaged.step_plan import ModelOutput, SampleSpec, ScheduledSequence, StepPlan
from gpu.cases import Case, Failure, Figures
from gpu.random_model import TINY, checkpoint

TOLERANCES = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.25}
"""How far a log-probability may be off: padded lanes change the plan of a step and the library's choice of a product, and
with them the order of sums."""

BLOCK, CONTEXT, MOST = 16, 64, 11
ROUNDS = [[3, 9, 20], [1, 1, 1], [1, 1], [1] * 3, [30, 2, 1, 1, 1], [1] * 5, [1] * 5, [1] * 4, [7] * 4 + [1] * 5, [1] * 9, [1] * 9, [1] * 3]
"""Tokens of the first sequences in every step: prompts, decode steps of several sizes, and both together."""


class Lives:
    """Sequences that grow by random tokens, as plans for a Runner."""

    def __init__(self) -> None:
        self._lengths = [0] * MOST
        self._blocks = np.random.default_rng(3).permutation(MOST * CONTEXT // BLOCK).astype(np.int32).reshape(MOST, -1)
        self._draw = np.random.default_rng(4)
        self._step = 0

    def plan(self, counts: list[int]) -> StepPlan:
        items = [self._grow(s, count) for s, count in enumerate(counts)]
        self._step += 1
        return StepPlan(self._step, BLOCK, tuple(sorted(items, key=lambda item: item.num_tokens > 1)))

    def _grow(self, s: int, count: int) -> ScheduledSequence:
        start, self._lengths[s] = self._lengths[s], self._lengths[s] + count
        sample = SampleSpec(SamplingParams(temperature=0, logprobs=5), row_id=s, seed=0, index=0)
        tokens = self._draw.integers(0, TINY.vocab_size, count).astype(np.int32)
        return ScheduledSequence(s, start, tokens, self._blocks[s, : -(-(start + count) // BLOCK)], (sample,))


def open_runner(device: Device, dtype: str, graphs: bool) -> Runner:
    backend = KernelBackend(device, dtype, graphs=graphs)
    cos, sin = rope_tables(TINY, CONTEXT)
    model = Llama(TINY, load_weights(checkpoint(TINY, dtype), backend), backend.upload(cos), backend.upload(sin))
    return Runner(backend, model, KVStore(backend, TINY, MOST * CONTEXT // BLOCK, BLOCK), max_rows=64, max_seqs=MOST)


def cases(device: Device) -> Iterator[Case]:
    for dtype in TOLERANCES:
        yield Case(dtype, partial(_replays, device, dtype))


def _replays(device: Any, dtype: str) -> Figures:
    captures, honest = 0, device.capture

    def counted(work: Any) -> Any:
        nonlocal captures
        captures += 1
        return honest(work)

    eager, replayed, lives, worst = open_runner(device, dtype, False), open_runner(device, dtype, True), Lives(), 0.0
    device.capture = counted
    try:
        for number, counts in enumerate(ROUNDS):
            plan = lives.plan(counts)
            worst = max(worst, _apart(eager.run(plan), replayed.run(plan), dtype, number))
    finally:
        del device.capture
    if captures < 3:
        raise Failure(f"{captures} graphs were captured: steps of 2, 3 to 4, 5 to 8 and 9 sequences want one each")
    return {"steps": len(ROUNDS), "graphs": captures, "largest difference of a logprob": worst}


def _apart(eager: ModelOutput, replayed: ModelOutput, dtype: str, number: int) -> float:
    assert eager.logprobs is not None
    assert replayed.logprobs is not None
    apart = float(np.abs(eager.logprobs.top_logprobs - replayed.logprobs.top_logprobs).max())
    if not apart <= TOLERANCES[dtype]:
        raise Failure(f"step {number}: logprobs are {apart:.2g} apart, {TOLERANCES[dtype]} is allowed")
    if dtype == "float32" and not np.array_equal(eager.token_ids, replayed.token_ids):
        raise Failure(f"step {number}: a graph chose {replayed.token_ids.tolist()}, its kernels one by one {eager.token_ids.tolist()}")
    return apart
