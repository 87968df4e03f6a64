"""SampleSpecs -> SamplingBatch: packs the parameters of the rows that get a token. The choosing itself is a backend operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cupaged.backends.base import Backend, SamplingBatch
from cupaged.step_plan import SampleSpec


def pack(specs: Sequence[SampleSpec]) -> SamplingBatch:
    """Parameters of all tokens to choose as flat arrays, one row each."""
    params = [spec.params for spec in specs]
    biases = [_biases(spec) for spec in specs]
    bias_start = np.zeros(len(specs) + 1, np.int32)
    np.cumsum([len(bias) for bias in biases], out=bias_start[1:])
    return SamplingBatch(
        temperature=np.array([0.0 if p.greedy else p.temperature for p in params], np.float32),
        top_k=np.array([max(p.top_k, 0) for p in params], np.int32),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        repetition=np.array([p.repetition_penalty for p in params], np.float32),
        presence=np.array([p.presence_penalty for p in params], np.float32),
        frequency=np.array([p.frequency_penalty for p in params], np.float32),
        seeds=np.array([spec.seed for spec in specs], np.uint64),
        positions=np.array([spec.position for spec in specs], np.int32),
        indices=np.array([spec.index for spec in specs], np.int32),
        row_ids=np.array([spec.row_id for spec in specs], np.int32),
        bias_start=bias_start,
        bias_ids=np.array([token for bias in biases for token, _ in bias], np.int32),
        bias_values=np.array([value for bias in biases for _, value in bias], np.float32),
        penalised=np.array([p.has_penalties for p in params], bool),
    )


class Packer:
    """Packs one step after another: where the rows are those of the step before, as they mostly are, only their positions."""

    def __init__(self) -> None:
        self._rows: list[tuple[Any, ...]] = []
        self._batch = pack([])

    def pack(self, specs: Sequence[SampleSpec]) -> SamplingBatch:
        rows = [(spec.params, spec.row_id, spec.seed, spec.index, spec.banned) for spec in specs]
        if rows == self._rows:
            return replace(self._batch, positions=np.array([spec.position for spec in specs], np.int32))
        self._rows, self._batch = rows, pack(specs)
        return self._batch


def send_histories(specs: Sequence[SampleSpec], backend: Backend) -> None:
    """Rebuild the backend's penalty counts of rows that have a new owner."""
    for spec in specs:
        if spec.history is not None:
            backend.set_history(spec.row_id, *spec.history)


def _biases(spec: SampleSpec) -> list[tuple[int, float]]:
    bias = list(spec.params.logit_bias.items()) if spec.params.logit_bias else []
    return bias + [(token, -np.inf) for token in spec.banned]
