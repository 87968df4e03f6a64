"""Attention over the paged cache, and what writes it, on the device against the definition: every kernel, in every type.

Slots that no sequence owns hold NaN, and table entries that are not in use -1.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from cupaged.backends.base import AttentionBatch, Backend, BatchLimits
from cupaged.backends.device import Array, Device
from cupaged.backends.launch import Launch
from gpu.both import TOLERANCES, Both, rounded
from gpu.cases import Case, Failure, Figures

FP8 = "float8_e4m3fn"
ATTENTION_KERNELS = {"paged_attention_v1", "attention_partition", "merge_partitions", "paged_decode", "merge_items", "plain_prefill", "paged_prefill"}
CONTEXTS = [1, 15, 16, 17, 32, 130, 700, 33, 64, 300, 80]
CHUNKS = [1, 1, 1, 1, 1, 1, 1, 33, 64, 5, 65]
"""Tokens of each sequence, and how many of them are the step's; those of one are decode rows."""

HEADS = [(2, 2, 80, 16, 0), (1, 17, 64, 16, 0), (2, 3, 64, 16, 0), (1, 8, 128, 16, 20), (2, 4, 128, 32, 0), (1, 3, 64, 8, 40), (1, 16, 32, 16, 0)]
"""(key/value heads, query heads of each, head_dim, block_size, window)"""


def cases(device: Device) -> Iterator[Case]:
    launched: set[str] = set()
    for dtype, kv_dtype in [(name, name) for name in TOLERANCES] + [("float32", FP8), ("bfloat16", FP8)]:
        both = Both(device, dtype, kv_dtype)
        for heads in HEADS:
            title = "{1} of {0} heads of {2}, blocks of {3}, window {4}".format(*heads)
            yield Case(f"attention, {title}, {dtype}" + (", fp8 cache" if kv_dtype == FP8 else ""), partial(_attention, both, heads, launched))
    yield Case("every attention kernel ran", partial(_all_ran, launched))


def _all_ran(launched: set[str]) -> Figures:
    missing = ATTENTION_KERNELS - launched
    if missing:
        raise Failure(f"never launched: {', '.join(sorted(missing))}")
    return {}


class Paged:
    """Sequences in shuffled blocks of a pool, some lanes padded, each with its last tokens in the step."""

    def __init__(self, dtype: str, kv_dtype: str, heads: tuple[int, int, int, int, int]) -> None:
        self.kv_heads, self.group, self.head_dim, self.block_size, self.window = heads
        draw = np.random.default_rng(7)
        contexts, chunks = np.array(CONTEXTS), np.array(CHUNKS)
        self.lanes = int((chunks == 1).sum()) + 1  # and one padded
        contexts, chunks = np.insert(contexts, self.lanes - 1, 0), np.insert(chunks, self.lanes - 1, 1)
        need = -(-contexts // self.block_size)
        self.num_blocks = int(need.sum()) + 3
        free, tables = draw.permutation(self.num_blocks), np.full((len(need), need.max() + 1), -1, np.int32)
        for table, end, count in zip(tables, np.cumsum(need), need, strict=True):
            table[:count] = free[end - count : end]
        positions = [p for context, chunk in zip(contexts, chunks, strict=True) for p in (range(context - chunk, context) if context else [0])]
        owner = np.repeat(np.arange(len(chunks)), chunks)
        self.positions = np.array(positions, np.int32)
        slots = tables[owner, self.positions // self.block_size].astype(np.int64) * self.block_size + self.positions % self.block_size
        slots[contexts[owner] == 0] = -1
        self.step = AttentionBatch(
            self.positions, slots, tables, np.concatenate([[0], np.cumsum(chunks)]).astype(np.int32), contexts.astype(np.int32), self.lanes, int(contexts.max())
        )
        self.rows, self.heads = len(positions), self.kv_heads * self.group
        self.qkv = rounded(1, dtype, self.rows, (self.heads + 2 * self.kv_heads) * self.head_dim)
        shape = (self.num_blocks, self.kv_heads, self.block_size, self.head_dim)
        self.pools = [np.full(shape, np.nan, np.float32) for _ in range(2)]
        for i, pool in enumerate(self.pools):
            numbers = rounded(2 + i, kv_dtype, *shape)
            for table, context in zip(tables, contexts, strict=True):
                for p in range(context):
                    pool[table[p // self.block_size], :, p % self.block_size] = numbers[table[p // self.block_size], :, p % self.block_size]

    def load(self, backend: Backend) -> Any:
        limits = BatchLimits(
            self.rows, len(self.step.context_lens), self.step.block_tables.shape[1], 1, max(CONTEXTS), self.num_blocks, self.block_size, self.kv_heads,
            self.head_dim, self.window,
        )  # fmt: skip
        batch = backend.new_batch(limits)
        backend.set_batch(batch, np.zeros(self.rows, np.int32), self.step)
        return batch


def _attention(both: Both, heads: tuple[int, int, int, int, int], launched: set[str]) -> Figures:
    paged, scale = Paged(both.dtype, both.kv_dtype, heads), heads[2] ** -0.5
    honest = both.device.launch
    seen: set[str] = set()

    def watched(launch: Launch) -> None:
        seen.add(launch.variant.kernel)
        honest(launch)

    def run(backend: Backend, upload: Any, out: Array) -> None:
        pools = paged.pools if backend is both.reference else [backend.upload(pool.astype(both.kv_dtype)) for pool in paged.pools]
        backend.attention(upload(paged.qkv), *pools, paged.load(backend), paged.heads, scale, paged.window, out)

    both.device.launch = watched  # type: ignore[method-assign]  # to learn which kernels it takes
    try:
        error = both.compare((paged.rows, paged.heads * paged.head_dim), run)
    finally:
        del both.device.launch
    launched |= seen
    return {"largest error": error, "kernels": ", ".join(sorted(seen & ATTENTION_KERNELS))}


def rope(both: Both) -> Figures:
    paged = Paged(both.dtype, both.dtype, (2, 3, 64, 16, 0))
    angles = np.arange(max(CONTEXTS))[:, None] / 1e4 ** (np.arange(32) / 32)
    tables = [f(angles).astype(np.float32) for f in (np.cos, np.sin)]
    empty = np.full(paged.pools[0].shape, np.nan, np.float32)
    ours = [both.upload(empty) for _ in range(2)]
    expected = [empty.copy() for _ in range(2)]

    def run(backend: Backend, upload: Any, out: Array) -> None:
        caches = expected if backend is both.reference else ours
        backend.rope_and_cache(out, *(backend.upload(t) for t in tables), paged.load(backend), paged.heads, *caches)

    error = both.compare(paged.qkv.shape, run, paged.qkv)
    for cache, want in zip(ours, expected, strict=True):
        got, written = both.backend.download(cache).astype(np.float32), ~np.isnan(want)
        if not np.isnan(got[~written]).all():
            raise Failure("slots of nobody were written")
        error = max(error, both.close(got[written], want[written]))
    return {"largest error": error}
