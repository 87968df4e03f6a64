"""warm_up: every kernel of a step run once on tiny arrays, so that no request waits for a compiler."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cupaged.backends import cpu_jit
from cupaged.backends.base import AttentionBatch, BatchLimits, SamplingBatch
from cupaged.backends.cpu import CpuBackend

_HEAD_DIM = 2
_VOCAB = 4


def warm_up(backend: CpuBackend) -> None:
    """Compile every kernel, or load it from the disk cache, for the types that a step has; tens of seconds or under one."""
    _forward(backend)
    _sampling(backend)
    cpu_jit.mark_cached()


def _forward(backend: CpuBackend) -> None:
    """One row of a model with one head, in blocks of two slots. Products in other formats compile when a model is loaded."""
    ones = lambda *shape: np.ones(shape, np.float32)  # noqa: E731
    x, qkv, weight, table = ones(1, _HEAD_DIM), ones(1, 3 * _HEAD_DIM), ones(_HEAD_DIM), ones(1, _HEAD_DIM // 2)
    step = AttentionBatch(
        positions=np.zeros(1, np.int32),
        slots=np.zeros(1, np.int64),
        block_tables=np.zeros((1, 1), np.int32),
        query_start=np.array([0, 1], np.int32),
        context_lens=np.ones(1, np.int32),
        num_decode=1,
        max_context=1,
    )
    batch = backend.new_batch(BatchLimits(rows=1, sequences=1, table_width=1, vocab_size=1, positions=1, num_blocks=1, block_size=2))
    backend.set_batch(batch, np.zeros(1, np.int32), step)
    key, value = (cache[0] for cache in backend.new_kv_cache(1, 1, 1, 2, _HEAD_DIM))
    matrix = backend.load_matrix([_Ones((_HEAD_DIM, _HEAD_DIM))])
    backend.embedding(matrix, batch, x)
    backend.linear(x, matrix, np.empty_like(x))
    backend.rms_norm(x, weight, 1e-5, np.empty_like(x))
    backend.head_rms_norm(qkv, weight, weight, 1, 1, 1e-5)
    backend.rope_and_cache(qkv, table, table, batch, 1, key, value)
    backend.attention(qkv, key, value, batch, 1, 1.0, 0, np.empty_like(x))
    backend.gather_rows(x, np.zeros(1, np.int32), np.empty_like(x))


class _Ones:
    """A TensorSource of ones."""

    name, storage = "ones", "F32"

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def read(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.float32]:
        return np.ones((len(range(self.shape[0])[start:stop]), *self.shape[1:]), np.float32)

    def read_blocks(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint8]:
        return self.read(start, stop).view(np.uint8)


def _sampling(backend: CpuBackend) -> None:
    """A greedy batch, then one with every filter and penalty on."""
    one, two = np.ones(1, np.float32), np.full(1, 2, np.int32)
    zero = np.zeros(1, np.int32)

    def batch(temperature: float, penalised: bool) -> SamplingBatch:
        return SamplingBatch(
            temperature=one * np.float32(temperature),
            top_k=two,
            top_p=one * np.float32(0.9),
            min_p=one * np.float32(0.1),
            repetition=one,
            presence=one,
            frequency=one,
            seeds=np.zeros(1, np.uint64),
            positions=zero,
            indices=zero,
            row_ids=zero,
            bias_start=np.array([0, 1], np.int32),
            bias_ids=zero,
            bias_values=one,
            penalised=np.array([penalised]),
        )

    for temperature, penalised in ((0.0, False), (1.0, True)):
        backend.set_history(0, zero, zero)
        backend.sample(np.ones((1, _VOCAB), np.float32), batch(temperature, penalised))
    backend.token_logprobs(np.ones((1, _VOCAB), np.float32), zero, 2)
