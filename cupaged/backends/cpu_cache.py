"""How the CPU keeps keys and values: the layout of a block, and the operations that write and move blocks.

A cache is a uint8 array [layers, blocks, KV heads, block_bytes]. With D = head_dim and P = block_size, a head's block is

    keys     [D][P] numbers        so that the lanes of a vector are keys
    values   [P][D] numbers        so that they are columns of the output

and, where numbers are int8, P float32 scales behind them: a slot's number is its code times its scale, which is a 127th
of the slot's largest magnitude. A slot that nobody wrote may hold anything.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.backends.cpu_kv_numbers import KvKind
from cupaged.backends.cpu_program import FIRST, aligned

U8 = npt.NDArray[np.uint8]

# words of rope_and_cache
QKV, QKV_STRIDE, COS, SIN, KEY, VALUE, BLOCK_BYTES, BATCH, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = range(FIRST, FIRST + 12)


# ---- layout


def scales_at(kind: KvKind, block_size: int, head_dim: int) -> int:
    """Where the scales of a block begin: behind its numbers, at a multiple of 4."""
    return -(-block_size * head_dim * kind.element_bytes // 4) * 4


def block_bytes(kind: KvKind, block_size: int, head_dim: int) -> int:
    """Bytes of one head's keys (or values) in one block."""
    return scales_at(kind, block_size, head_dim) + (4 * block_size if kind.has_scales else 0)


def new(kind: KvKind, num_layers: int, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> tuple[U8, U8]:
    """Keys and values [layers, blocks, KV heads, block_bytes], uninitialised."""
    shape = (num_layers, num_blocks, num_kv_heads, block_bytes(kind, block_size, head_dim))
    return aligned(shape, np.uint8), aligned(shape, np.uint8)


def read_slots(cache: U8, kind: KvKind, block_size: int, head_dim: int, which: str) -> npt.NDArray[np.float32]:
    """What one layer of a cache holds: float32 [blocks, KV heads, block_size, head_dim]; `which` is key or value."""
    end = block_size * head_dim * kind.element_bytes
    codes = np.ascontiguousarray(cache[..., :end])
    numbers = {
        "float32": lambda: codes.view(np.float32),
        "bfloat16": lambda: (codes.view(np.uint16).astype(np.uint32) << 16).view(np.float32),
        "float16": lambda: codes.view(np.float16).astype(np.float32),
        "int8": lambda: codes.view(np.int8).astype(np.float32),
    }[kind.name]()
    shape = (head_dim, block_size) if which == "key" else (block_size, head_dim)
    numbers = numbers.reshape(*cache.shape[:2], *shape)
    numbers = numbers.swapaxes(2, 3) if which == "key" else numbers
    if kind.has_scales:
        start = scales_at(kind, block_size, head_dim)
        numbers = numbers * np.ascontiguousarray(cache[..., start:]).view(np.float32)[..., None]
    return np.ascontiguousarray(numbers)


def rope_and_cache_words(qkv: Any, cos: Any, sin: Any, batch: Any, num_heads: int, key_cache: U8, value_cache: U8) -> tuple[Any, ...]:
    """The words of the operation; cos, sin are C-contiguous [positions, head_dim / 2], the caches one layer each."""
    kv_heads, head_dim = key_cache.shape[1], 2 * cos.shape[1]
    return (
        *(qkv, qkv.strides[0], cos, sin, key_cache, value_cache, key_cache.shape[2]),
        *(batch.words, num_heads, kv_heads, head_dim, batch.limits.block_size),
    )


def copy_blocks(source: U8, target: U8, pairs: npt.NDArray[np.int32]) -> None:
    """target's blocks pairs[:, 1] = source's blocks pairs[:, 0], in all layers: blocks do not overlap."""
    for layer in range(len(source)):
        for a, b in pairs.tolist():
            target[layer, b] = source[layer, a]
