"""How the CPU keeps keys and values: the layout of a block, and the operations that write and move blocks.

A cache is a uint8 array [layers, blocks, KV heads, block_bytes]. With D = head_dim and P = block_size, a head's block is

    keys     [D][P] numbers        so that the lanes of a vector are keys
    values   [P][D] numbers        so that they are columns of the output

and, where numbers are int8, P float32 scales behind them: a slot's number is its code times its scale, which is a 127th
of the slot's largest magnitude. A slot that nobody wrote may hold anything.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray

from cupaged.backends.cpu_batch import POSITIONS, SLOTS
from cupaged.backends.cpu_ir import (
    pointer_to_float32,
    pointer_to_int32,
    pointer_to_int64,
    word,
)  # fmt: skip
from cupaged.backends.cpu_jit import OperationKernel, exact_kernel, operation_kernel
from cupaged.backends.cpu_kv_numbers import KINDS, KvKind, narrow
from cupaged.backends.cpu_program import FIRST, PARTS, ROWS, aligned, take_task

U8 = npt.NDArray[np.uint8]

# words of rope_and_cache
QKV, QKV_STRIDE, COS, SIN, KEY, VALUE, BLOCK_BYTES, BATCH, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = range(FIRST, FIRST + 12)

_TASK_ROWS = 16


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


# ---- operations


@exact_kernel
def _rotate(head: Any, cos: Any, sin: Any) -> None:
    half = cos.shape[0]
    for i in range(half):
        a, b = head[i], head[half + i]
        head[i] = a * cos[i] - b * sin[i]
        head[half + i] = b * cos[i] + a * sin[i]


@exact_kernel
def _largest(numbers: Any) -> Any:
    largest = np.float32(0)
    for number in numbers:
        largest = max(largest, abs(number))
    return largest


@exact_kernel
def _write(index: int, head: Any, target: int, stride: int, scale_at: int) -> None:
    """One head's numbers to a slot of KINDS[index]: the first at `target`, the next ones `stride` bytes further each."""
    if index == 0:
        for i in range(head.shape[0]):
            narrow(0, head[i], target + i * stride)
    elif index == 1:
        for i in range(head.shape[0]):
            narrow(1, head[i], target + i * stride)
    elif index == 2:
        for i in range(head.shape[0]):
            narrow(2, head[i], target + i * stride)
    else:
        scale = _largest(head) / np.float32(127)
        carray(pointer_to_float32(scale_at), 1)[0] = scale
        factor = np.float32(1) / scale if scale > np.float32(0) else np.float32(0)
        for i in range(head.shape[0]):
            narrow(3, head[i] * factor, target + i * stride)


@exact_kernel
def _row_to_cache(index: int, element: int, row: int, slot: int, operation: int) -> None:
    heads, kv_heads, head_dim, block_size = word(operation, HEADS), word(operation, KV_HEADS), word(operation, HEAD_DIM), word(operation, BLOCK_SIZE)
    scales = (block_size * head_dim * element + 3) // 4 * 4
    block, place = slot // block_size, slot % block_size
    for h in range(kv_heads):
        start = (block * kv_heads + h) * word(operation, BLOCK_BYTES)
        key, value = word(operation, KEY) + start, word(operation, VALUE) + start
        numbers = carray(pointer_to_float32(row + 4 * (heads + h) * head_dim), head_dim)
        _write(index, numbers, key + place * element, block_size * element, key + scales + 4 * place)
        numbers = carray(pointer_to_float32(row + 4 * (heads + kv_heads + h) * head_dim), head_dim)
        _write(index, numbers, value + place * head_dim * element, element, value + scales + 4 * place)


@cache
def rope_and_cache(index: int) -> OperationKernel:
    """backends.base.Backend.rope_and_cache for caches of KINDS[index]. A task is up to 16 rows."""
    element = KINDS[index].element_bytes

    @operation_kernel
    def rope_and_cache_operation(team: int, operation: int) -> None:
        rows, batch = word(word(operation, ROWS), 0), word(operation, BATCH)
        positions = carray(pointer_to_int32(word(batch, POSITIONS)), rows)
        slots = carray(pointer_to_int64(word(batch, SLOTS)), rows)
        head_dim, half = word(operation, HEAD_DIM), word(operation, HEAD_DIM) // 2
        rotated = word(operation, HEADS) + word(operation, KV_HEADS)
        step = min(_TASK_ROWS, max(1, rows // (4 * word(team, PARTS))))
        while True:
            first = take_task(team) * step
            if first >= rows:
                return
            for r in range(first, min(first + step, rows)):
                row = word(operation, QKV) + r * word(operation, QKV_STRIDE)
                cos = carray(pointer_to_float32(word(operation, COS) + 4 * half * positions[r]), half)
                sin = carray(pointer_to_float32(word(operation, SIN) + 4 * half * positions[r]), half)
                for h in range(rotated):
                    _rotate(carray(pointer_to_float32(row + 4 * h * head_dim), head_dim), cos, sin)
                if slots[r] >= 0:
                    _row_to_cache(index, element, row, slots[r], operation)

    return rope_and_cache_operation


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
