"""SampleSpecs -> SamplingBatch: packs the parameters of the rows that get a token. The choosing itself is a backend operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cupaged.backends.base import Backend, SamplingBatch
from cupaged.step_plan import IntArray, SampleSpec


def pack(specs: Sequence[SampleSpec], positions: IntArray) -> SamplingBatch:
    """Parameters of all tokens to choose as flat arrays, one row each. `positions`: int32 [n], where these tokens will stand."""
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
        positions=positions,
        indices=np.array([spec.index for spec in specs], np.int32),
        row_ids=np.array([spec.row_id for spec in specs], np.int32),
        bias_start=bias_start,
        bias_ids=np.array([token for bias in biases for token, _ in bias], np.int32),
        bias_values=np.array([value for bias in biases for _, value in bias], np.float32),
        penalised=np.array([p.has_penalties for p in params], bool),
    )


class Packer:
    """Packs one step after another: where the samples are those of the step before, as they mostly are, only their positions.

    logprobs    how many likely tokens to report beside the chosen ones that were packed last, at most; -1: no logprobs
    plain       whether each of those is the likeliest one, and nothing is said of it
    """

    def __init__(self) -> None:
        self._specs: tuple[SampleSpec, ...] = ()
        self._batch = pack(self._specs, np.empty(0, np.int32))
        self.logprobs, self.plain = -1, False

    def pack(self, specs: tuple[SampleSpec, ...], positions: IntArray) -> SamplingBatch:
        if specs is self._specs:
            return replace(self._batch, positions=positions)
        self._specs, self._batch = specs, pack(specs, positions)
        wanted = [spec.params.needed_logprobs for spec in specs]
        self.logprobs = max([-1, *(k for k in wanted if k is not None)])
        batch = self._batch
        self.plain = self.logprobs < 0 and not (batch.temperature.any() or batch.penalised.any() or len(batch.bias_ids))
        return self._batch


def send_histories(specs: Sequence[SampleSpec], backend: Backend) -> None:
    """Rebuild the backend's penalty counts of rows that have a new owner."""
    for spec in specs:
        if spec.history is not None:
            backend.set_history(spec.row_id, *spec.history)


def _biases(spec: SampleSpec) -> list[tuple[int, float]]:
    bias = list(spec.params.logit_bias.items()) if spec.params.logit_bias else []
    return bias + [(token, -np.inf) for token in spec.banned]
