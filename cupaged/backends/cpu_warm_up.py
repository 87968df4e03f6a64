"""warm_up: every kernel of a step run once on tiny arrays, so that no request waits for a compiler."""

from __future__ import annotations

import numpy as np

from cupaged.backends import cpu_jit
from cupaged.backends.base import AttentionBatch, SamplingBatch
from cupaged.backends.cpu import CpuBackend, PackedMatrix

_HEAD_DIM = 2
_VOCAB = 4


def warm_up(backend: CpuBackend) -> None:
    """Compile every kernel, or load it from the disk cache, for the types that a step has; tens of seconds or under one."""
    _forward(backend)
    _sampling(backend)
    cpu_jit.mark_cached()


def _forward(backend: CpuBackend) -> None:
    """A sequence with one row and one with two, in blocks of two slots; one query head and one KV head."""
    rows, width = 3, _HEAD_DIM
    ids = np.zeros(rows, np.int32)
    weight, table = np.ones(width, np.float32), np.ones((4, width // 2), np.float32)
    x, qkv = np.ones((rows, width), np.float32), np.ones((rows, 3 * width), np.float32)
    matrix = PackedMatrix(np.ones((3 * width, width), np.float32), np.zeros(3 * width, np.float32))
    caches = backend.new_kv_cache(1, 2, 1, 2, width)
    for cache in caches:
        cache.fill(0)
    batch = AttentionBatch(
        positions=np.array([0, 0, 1], np.int32),
        slots=np.array([0, 2, 3], np.int64),
        block_tables=np.array([[0], [1]], np.int32),
        query_start=np.array([0, 1, 3], np.int32),
        context_lens=np.array([1, 2], np.int32),
        num_decode=1,
        max_context=2,
    )
    backend.embedding(matrix, ids, np.empty_like(x))
    backend.linear(x, matrix, qkv)
    backend.rms_norm(x, weight, 1e-5, np.empty_like(x))
    backend.add_rms_norm(x, x.copy(), weight, 1e-5, np.empty_like(x))
    backend.head_rms_norm(qkv, weight, weight, 1, 1, 1e-5)
    backend.rope_and_cache(qkv, table, table, batch, 1, caches[0][0], caches[1][0])
    backend.attention(qkv, caches[0][0], caches[1][0], batch, 1, 1.0, 0, np.empty_like(x))
    backend.silu_mul(np.ones((rows, 2 * width), np.float32), np.empty_like(x))
    backend.gather_rows(x, ids, np.empty_like(x))
    backend.copy_blocks(*caches, np.array([[0, 1]], np.int32))


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
