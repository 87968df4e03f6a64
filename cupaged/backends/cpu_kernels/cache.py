"""rope_and_cache: queries and keys are rotated, and keys and values written to their slots of the paged cache (cpu_cache.py)."""

from __future__ import annotations

from functools import cache
from typing import Any

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
from cupaged.backends.cpu_kernels.arrays import int32s, int64s
from cupaged.backends.cpu_kernels.ir import (
    F32,
    I64,
    LANES,
    Builder,
    Value,
    at,
    by_lanes,
    emitter,
    fma,
    load,
    loop,
    store,
    vector,
    word,
)
from cupaged.backends.cpu_kernels.jit import Operation, exact_kernel, operation_kernel
from cupaged.backends.cpu_kernels.kv_numbers import narrow_slot, narrow_slots
from cupaged.backends.cpu_kernels.program import take_task
from cupaged.backends.cpu_kv_numbers import KINDS
from cupaged.backends.cpu_program import PARTS, ROWS

_TASK_ROWS = 16


@emitter()
def _rotate(b: Builder, row: Value, heads: Value, half: Value, cos: Value, sin: Value) -> None:
    """Rotate a row's first `heads` heads of 2 * half numbers in place. Products are fused with sums in one way for all lanes: x * cos is not rounded."""
    head_bytes = b.mul(half, I64(8))

    def some(first: Value, lanes: int) -> None:
        kind, offset = vector(F32, lanes), b.mul(first, I64(4))
        c, s = load(b, kind, cos, offset), load(b, kind, sin, offset)

        def head(h: Value, _: list[Value]) -> list[Value]:
            place = b.add(at(b, row, offset), b.mul(h, head_bytes))
            other = b.add(place, b.mul(half, I64(4)))
            x, y = load(b, kind, place), load(b, kind, other)
            store(b, fma(b, x, c, b.fneg(b.fmul(y, s))), place)
            store(b, fma(b, y, c, b.fmul(x, s)), other)
            return []

        loop(b, heads, [], head)

    by_lanes(b, half, some)


@exact_kernel
def _run_length(slots: Any, first: int, block_size: int) -> int:
    """How many rows from `first` on lie in slots side by side: LANES at most, and none beyond a place that LANES divide."""
    n = 1
    while first + n < slots.shape[0] and slots[first + n] == slots[first] + n and slots[first + n] % block_size % LANES:
        n += 1
    return n


@exact_kernel
def _first_run(slots: Any, first: int, last: int, block_size: int) -> int:
    """The first row from `first` on with which a run begins, or `last`."""
    while 0 < first < last and slots[first] == slots[first - 1] + 1 and slots[first] % block_size % LANES:
        first += 1
    return first


@cache
def rope_and_cache(index: int) -> Operation:
    """backends.base.Backend.rope_and_cache for caches of KINDS[index].

    A task is about 16 rows: the runs of rows that begin among them. LANES rows that go to slots side by side are written together.
    """
    element = KINDS[index].element_bytes

    @operation_kernel
    def rope_and_cache_operation(member: int, operation: int) -> None:
        rows, batch = word(word(operation, ROWS), 0), word(operation, BATCH)
        positions = int32s(batch, POSITIONS, rows)
        slots = int64s(batch, SLOTS, rows)
        heads, kv_heads, head_dim, block_size = word(operation, HEADS), word(operation, KV_HEADS), word(operation, HEAD_DIM), word(operation, BLOCK_SIZE)
        half, head_bytes, stride = head_dim // 2, 4 * head_dim, word(operation, QKV_STRIDE)
        scales = (block_size * head_dim * element + 3) // 4 * 4
        step = min(_TASK_ROWS, max(1, rows // (4 * word(member, PARTS))))
        while True:
            first = take_task(member, (rows + step - 1) // step) * step
            if first < 0:
                return
            last = min(first + step, rows)
            r = _first_run(slots, first, last, block_size)
            while r < last:
                run = _run_length(slots, r, block_size)
                start = word(operation, QKV) + r * stride
                for i in range(run):
                    angles = 4 * half * positions[r + i]
                    _rotate(start + i * stride, heads + kv_heads, half, word(operation, COS) + angles, word(operation, SIN) + angles)
                block, place = slots[r] // block_size, slots[r] % block_size
                for h in range(kv_heads if slots[r] >= 0 else 0):
                    skip = (block * kv_heads + h) * word(operation, BLOCK_BYTES)
                    key, value = word(operation, KEY) + skip, word(operation, VALUE) + skip
                    keys = start + (heads + h) * head_bytes
                    values = keys + kv_heads * head_bytes
                    if run == LANES:
                        narrow_slots(index, keys, stride, head_dim, key + place * element, block_size * element, key + scales + 4 * place)
                    for i in range(run):
                        slot, row = place + i, i * stride
                        if run < LANES:
                            narrow_slot(index, 1, keys + row, head_dim, key + slot * element, block_size * element, key + scales + 4 * slot)
                        narrow_slot(index, 0, values + row, head_dim, value + slot * head_dim * element, element, value + scales + 4 * slot)
                r += run

    return rope_and_cache_operation
