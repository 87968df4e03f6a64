"""Attention over the paged cache as an operation of the CPU: its words, and the scratch memory of its kernel (cpu_kernels/attention.py)."""

from __future__ import annotations

from typing import Any

from cupaged.backends.cpu_batch import TASK_ROWS, CpuBatch
from cupaged.backends.cpu_cache import U8, block_bytes, scales_at
from cupaged.backends.cpu_formats import TILE_COLUMNS
from cupaged.backends.cpu_kv_numbers import KvKind
from cupaged.backends.cpu_program import FIRST, Words, float_word

TILE_KEYS = 64
"""Slots of a tile, from a multiple of itself on."""

QKV, QKV_STRIDE, KEYS, VALUES, BATCH, HEADS, KV_HEADS, BLOCK_SIZE, HEAD_DIM = range(FIRST, FIRST + 9)
SCALE, WINDOW, OUT, OUT_STRIDE, KIND, ELEMENT_BYTES, BLOCK_BYTES, SCALES_AT = range(FIRST + 9, FIRST + 17)


def padded(head_dim: int) -> int:
    """Columns of a row of the output while it is summed up: whole tiles."""
    return -(-head_dim // TILE_COLUMNS) * TILE_COLUMNS


def scratch_bytes(group: int, head_dim: int) -> int:
    """Scratch memory that a member of the crew needs."""
    width, rows = padded(head_dim), TASK_ROWS * group
    return 4 * (rows * (head_dim + TILE_KEYS + width + 2) + TILE_KEYS * (head_dim + width)) + 1024


def words(
    kind: KvKind, qkv: Any, key_cache: U8, value_cache: U8, batch: CpuBatch, num_heads: int, scale: float, window: int, out: Any
) -> tuple[Any, ...]:
    """The words of the operation; the caches are one layer each, of a kind."""
    block_size, head_dim = batch.limits.block_size, out.shape[1] // num_heads
    return (
        *(qkv, qkv.strides[0], key_cache, value_cache, batch.words, num_heads, key_cache.shape[1], block_size, head_dim),
        *(float_word(scale), window, out, out.strides[0]),
        *(kind.index, kind.element_bytes, block_bytes(kind, block_size, head_dim), scales_at(kind, block_size, head_dim)),
    )


def ahead(operation: Words) -> tuple[int, ...]:
    """What an operation reads, as words of cpu_prefetch."""
    return int(operation[KEYS]), int(operation[VALUES]), int(operation[BATCH]), int(operation[BLOCK_BYTES] * operation[KV_HEADS])
