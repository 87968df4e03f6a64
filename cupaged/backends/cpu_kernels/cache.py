"""rope_and_cache: queries and keys are rotated, and keys and values written to their slots of the paged cache (cpu_cache.py)."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray

from cupaged.backends.cpu_batch import POSITIONS, SLOTS
from cupaged.backends.cpu_cache import (
    BATCH,
    BLOCK_BYTES,
    BLOCK_SIZE,
    COS,
    HEAD_DIM,
    HEADS,
    KEY,
    KV_HEADS,
    QKV,
    QKV_STRIDE,
    SIN,
    VALUE,
)
from cupaged.backends.cpu_kernels.ir import pointer_to_float32, pointer_to_int32, pointer_to_int64, word
from cupaged.backends.cpu_kernels.jit import Operation, exact_kernel, operation_kernel
from cupaged.backends.cpu_kernels.kv_numbers import narrow
from cupaged.backends.cpu_kernels.program import take_task
from cupaged.backends.cpu_kv_numbers import KINDS
from cupaged.backends.cpu_program import PARTS, ROWS

_TASK_ROWS = 16


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
def rope_and_cache(index: int) -> Operation:
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
