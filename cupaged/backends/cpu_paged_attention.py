"""Attention over the paged cache: scores, softmax and the sum of values, a tile of keys after the other.

A task is some rows of one sequence and the G query heads of a KV head (cpu_batch.py). For every tile of TILE_KEYS slots
that a row of it sees, beginning at multiples of TILE_KEYS:

    scores [rows * G][keys]  = query @ keys          lanes are keys: a key block is already a panel
    weights                  = exp(scores - running maximum), 0 for keys that the row does not see
    sums, out                = what they were, scaled to the new maximum, + weights, + weights @ values

(online softmax, arXiv 1805.02867). Both products are cpu_tile's, so they add up in the order of the dimensions and of the
slots; where tiles begin depends on positions only. So a row gets the same bits as a decode step or within a chunk, alone
or in company. Few rows read keys and values where they lie (float32 in whole groups of 16 slots); many rows, or another
storage, unpack a tile once into scratch memory and read it there.

Slots that nobody wrote may hold anything: their scores are never looked at, and their values never multiplied.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray

from cupaged.backends.cpu_batch import (
    FIRST_ROW,
    NUM_TASKS,
    POSITIONS,
    ROW_COUNT,
    SEQUENCE,
    TABLE_STRIDE,
    TABLES,
    TASK_ROWS,
    TASKS,
    CpuBatch,
)
from cupaged.backends.cpu_cache import FLOAT32, KINDS, U8, widen
from cupaged.backends.cpu_ir import (
    F32,
    GROUP,
    I32,
    I64,
    LANES,
    Builder,
    Value,
    constant,
    emitter,
    exp,
    float_at,
    fma,
    halves_sum,
    load,
    loop,
    maximum,
    pointer_to_float32,
    pointer_to_int32,
    shuffle,
    splat,
    store,
    vector,
    word,
)  # fmt: skip
from cupaged.backends.cpu_jit import OperationKernel, kernel, operation_kernel
from cupaged.backends.cpu_program import FIRST, PARTS, SCRATCH, take_task
from cupaged.backends.cpu_tile import TILE_COLUMNS, TILE_ROWS, tile_product

TILE_KEYS = 64
"""Slots of a tile, from a multiple of itself on."""

LOWEST = np.float32(-3.0e38)

# words of an operation
QKV, QKV_STRIDE, KEYS, VALUES, BATCH, HEADS, KV_HEADS, BLOCK_SIZE, HEAD_DIM, SCALE, WINDOW, OUT, OUT_STRIDE = range(FIRST, FIRST + 13)

_PANEL = GROUP * 4


def scratch_bytes(group: int, head_dim: int) -> int:
    """Scratch memory that a member of the team needs."""
    width = -(-head_dim // TILE_COLUMNS) * TILE_COLUMNS
    rows = TASK_ROWS * group
    return 4 * (rows * (head_dim + TILE_KEYS + width + 2) + TILE_KEYS * (head_dim + width)) + 1024


def words(
    qkv: Any, key_cache: U8, value_cache: U8, batch: CpuBatch, num_heads: int, scale: float, window: int, out: Any
) -> tuple[Any, ...]:
    """The words of the operation; the caches are one layer each."""
    return (
        *(qkv, qkv.strides[0], key_cache, value_cache, batch.words, num_heads, key_cache.shape[1], batch.limits.block_size),
        *(out.shape[1] // num_heads, int(np.float32(scale).view(np.uint32)), window, out, out.strides[0]),
    )


@emitter()
def _soften(b: Builder, scores: Value, low: Value, high: Value, state: Value, total: Value, width: Value) -> None:
    """One row and one tile: scores [TILE_KEYS] become weights, of which low .. high - 1 count and the others are 0.

    state holds the running maximum and sum; total [width], a multiple of GROUP, is scaled to the new maximum.
    """
    kind, zero = vector(F32, LANES), constant(F32, LANES, 0.0)
    integers = vector(I32, LANES)
    first, last = (splat(b, b.trunc(bound, I32), LANES) for bound in (low, high))
    places = [ir.Constant(integers, list(range(at, at + LANES))) for at in range(0, TILE_KEYS, LANES)]
    counts = [b.and_(b.icmp_signed(">=", place, first), b.icmp_signed("<", place, last)) for place in places]
    numbers = [load(b, kind, scores, 4 * at) for at in range(0, TILE_KEYS, LANES)]
    largest = constant(F32, LANES, float(LOWEST))
    for number, count in zip(numbers, counts, strict=True):
        largest = maximum(b, largest, b.select(count, number, constant(F32, LANES, float(LOWEST))))
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        largest = maximum(b, shuffle(b, largest, largest, range(lanes)), shuffle(b, largest, largest, range(lanes, 2 * lanes)))
    before = load(b, F32, state)
    now = maximum(b, before, b.extract_element(largest, I32(0)))
    shift = splat(b, now, LANES)
    added = zero
    for i, (number, count) in enumerate(zip(numbers, counts, strict=True)):
        weight = b.select(count, exp(b, b.fsub(number, shift)), zero)
        store(b, weight, scores, 4 * LANES * i)
        added = b.fadd(added, weight)
    shrink = exp(b, b.fsub(splat(b, before, LANES), shift))
    factor = b.extract_element(shrink, I32(0))
    store(b, now, state)
    store(b, fma(b, load(b, F32, state, 4), factor, halves_sum(b, added)), state, 4)

    def scale(i: Value, carried: list[Value]) -> list[Value]:
        at = b.mul(i, I64(4 * LANES))
        store(b, b.fmul(load(b, kind, total, at), shrink), total, at)
        return []

    with b.if_then(b.fcmp_ordered("!=", factor, ir.Constant(F32, 1.0))):
        loop(b, b.udiv(width, I64(LANES)), [], scale)


@kernel
def _zero(address: int, count: int) -> None:
    numbers = carray(pointer_to_float32(address), count)
    for i in range(count):
        numbers[i] = np.float32(0)


@cache
def attention(kind: int) -> OperationKernel:
    """The operation for one storage of the cache."""
    element, has_scales, is_float32 = KINDS[kind].element_bytes, KINDS[kind].has_scales, KINDS[kind] is FLOAT32

    @operation_kernel
    def attention_operation(team: int, operation: int) -> None:
        heads, kv_heads, head_dim = word(operation, HEADS), word(operation, KV_HEADS), word(operation, HEAD_DIM)
        group, block_size, window = heads // kv_heads, word(operation, BLOCK_SIZE), word(operation, WINDOW)
        scale, batch = float_at(operation, SCALE), word(operation, BATCH)
        width = (head_dim + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
        size = block_size * head_dim * element
        size = (size + 3) // 4 * 4
        head_bytes = size + (4 * block_size if has_scales else 0)
        num_tasks = word(batch, NUM_TASKS)
        most = TASK_ROWS * group
        query = word(team, SCRATCH)
        scores = query + 4 * most * head_dim
        total = scores + 4 * most * TILE_KEYS
        states = total + 4 * most * width
        key_tile = states + 8 * most
        value_tile = key_tile + 4 * TILE_KEYS * head_dim
        in_place = is_float32 and block_size % GROUP == 0 and head_dim == width
        # all KV heads of a task lie side by side in a block; where tasks are few, the team shares out the heads
        span = kv_heads if num_tasks >= 4 * word(team, PARTS) else 1
        while True:
            number = take_task(team)
            if number * span >= num_tasks * kv_heads:
                return
            task = word(batch, TASKS) + 32 * (number * span // kv_heads)
            first_head = number * span % kv_heads
            sequence, first_row, rows = word(task, SEQUENCE), word(task, FIRST_ROW), word(task, ROW_COUNT)
            if sequence < 0:
                for row in range(first_row, first_row + rows):
                    target = word(operation, OUT) + row * word(operation, OUT_STRIDE) + 4 * first_head * group * head_dim
                    _zero(target, span * group * head_dim)
                continue
            table = carray(pointer_to_int32(word(batch, TABLES) + sequence * word(batch, TABLE_STRIDE)), 1 << 30)
            position = np.int64(carray(pointer_to_int32(word(batch, POSITIONS) + 4 * first_row), 1)[0])
            count = rows * group
            oldest = max(0, position - window + 1) if window > 0 else 0
            context = position + rows
            for head in range(first_head, first_head + span):
                for n in range(count):
                    source = word(operation, QKV) + (first_row + n // group) * word(operation, QKV_STRIDE) + 4 * (head * group + n % group) * head_dim
                    numbers = carray(pointer_to_float32(source), head_dim)
                    scaled = carray(pointer_to_float32(query + 4 * n * head_dim), head_dim)
                    for i in range(head_dim):
                        scaled[i] = numbers[i] * scale
                    state = carray(pointer_to_float32(states + 8 * n), 2)
                    state[0], state[1] = LOWEST, np.float32(0)
                _zero(total, count * width)
                for tile in range(oldest // TILE_KEYS * TILE_KEYS, context, TILE_KEYS):
                    start, stop = max(tile, oldest), min(tile + TILE_KEYS, context)
                    direct = in_place and count < 3 * TILE_ROWS
                    if not direct:
                        slot = start
                        while slot < stop:
                            block, offset, at = table[slot // block_size] * kv_heads + head, slot % block_size, slot - tile
                            keys, values = word(operation, KEYS) + block * head_bytes, word(operation, VALUES) + block * head_bytes
                            whole = at % GROUP == 0 and block_size - offset >= GROUP
                            part = GROUP if whole else min(stop - slot, block_size - offset, GROUP - at % GROUP)
                            panel = key_tile + at // GROUP * head_dim * _PANEL + 4 * (at % GROUP)
                            row = element * block_size
                            if whole:
                                widen(kind, GROUP, 1, keys + element * offset, row, head_dim, keys + size + 4 * offset, panel, _PANEL)
                            else:
                                for t in range(part):
                                    widen(kind, 1, 1, keys + element * (offset + t), row, head_dim, keys + size + 4 * (offset + t), panel + 4 * t, _PANEL)
                            for t in range(min(part, stop - slot)):
                                source, target = values + element * (offset + t) * head_dim, value_tile + 4 * (at + t) * width
                                factor, whole_groups = values + size + 4 * (offset + t), head_dim // GROUP
                                widen(kind, GROUP, 0, source, GROUP * element, whole_groups, factor, target, _PANEL)
                                done = whole_groups * GROUP
                                widen(kind, 1, 0, source + element * done, element, head_dim - done, factor, target + 4 * done, 4)
                            slot += part
                    for at in range(start // TILE_COLUMNS * TILE_COLUMNS, stop, TILE_COLUMNS):
                        if direct:
                            # of a pair of groups one may lie outside: its scores are not looked at
                            left = max(at, start // GROUP * GROUP)
                            right = at + GROUP if at + GROUP < stop else left
                            low = word(operation, KEYS) + (table[left // block_size] * kv_heads + head) * head_bytes + 4 * (left % block_size)
                            high = word(operation, KEYS) + (table[right // block_size] * kv_heads + head) * head_bytes + 4 * (right % block_size)
                            stride = 4 * block_size
                        else:
                            low = key_tile + (at - tile) // GROUP * head_dim * _PANEL
                            high, stride = low + head_dim * _PANEL, _PANEL
                        for r in range(0, count, TILE_ROWS):
                            height = min(TILE_ROWS, count - r)
                            y = scores + 4 * (r * TILE_KEYS + at - tile)
                            tile_product(0, height, query + 4 * r * head_dim, 4 * head_dim, low, high, stride, head_dim, y, 4 * TILE_KEYS)
                    for n in range(count):
                        own = position + n // group
                        end = min(TILE_KEYS, own + 1 - tile)
                        begin = max(0, own - window + 1 - tile) if window > 0 else 0
                        if begin < end:
                            _soften(scores + 4 * n * TILE_KEYS, begin, end, states + 8 * n, total + 4 * n * width, width)
                        else:
                            _zero(scores + 4 * n * TILE_KEYS, TILE_KEYS)
                    if direct:
                        for at in range(start // GROUP * GROUP, stop, GROUP):
                            begin, end = max(at, start), min(at + GROUP, stop)
                            values = word(operation, VALUES) + (table[at // block_size] * kv_heads + head) * head_bytes + 4 * head_dim * (begin % block_size)
                            for r in range(0, count, TILE_ROWS):
                                height = min(TILE_ROWS, count - r)
                                for c in range(0, width, TILE_COLUMNS):
                                    tile_product(
                                        1, height, scores + 4 * (r * TILE_KEYS + begin - tile), 4 * TILE_KEYS, values + 4 * c, values + 4 * c + _PANEL,
                                        4 * head_dim, end - begin, total + 4 * (r * width + c), 4 * width,
                                    )  # fmt: skip
                    else:
                        for r in range(0, count, TILE_ROWS):
                            height = min(TILE_ROWS, count - r)
                            for c in range(0, width, TILE_COLUMNS):
                                values = value_tile + 4 * ((start - tile) * width + c)
                                tile_product(
                                    1, height, scores + 4 * (r * TILE_KEYS + start - tile), 4 * TILE_KEYS, values, values + _PANEL,
                                    4 * width, stop - start, total + 4 * (r * width + c), 4 * width,
                                )  # fmt: skip
                for n in range(count):
                    target = word(operation, OUT) + (first_row + n // group) * word(operation, OUT_STRIDE) + 4 * (head * group + n % group) * head_dim
                    out = carray(pointer_to_float32(target), head_dim)
                    result = carray(pointer_to_float32(total + 4 * n * width), head_dim)
                    whole = carray(pointer_to_float32(states + 8 * n), 2)[1]
                    for i in range(head_dim):
                        out[i] = result[i] / whole

    return attention_operation


