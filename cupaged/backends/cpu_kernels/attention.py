"""Attention over the paged cache: scores, softmax and the sum of values, a tile of keys after the other.

A task is some rows of one sequence (cpu_batch.py), for all KV heads or, where tasks are few, for one. With the G query
heads of a KV head, for every tile of TILE_KEYS slots that a row sees, beginning at multiples of TILE_KEYS:

    scores [rows * G][keys]  = query @ keys          lanes are keys: a key block is already a panel
    weights                  = exp(scores - running maximum), 0 for keys that the row does not see
    sums, out                = what they were, scaled to the new maximum, + weights, + weights @ values

(online softmax, arXiv 1805.02867). Both products are tile.py's, or few_queries.py's, so they add up in the order of the
dimensions and of the slots; where tiles begin depends on positions only. So a row gets the same bits as a decode step or within
a chunk, alone or in company. Few rows read keys and values where they lie (float32 in whole groups of 16 slots); many rows, or
another storage, unpack a tile once into scratch memory and read it there.

Slots that nobody wrote may hold anything: their scores are never looked at, and their values never multiplied.
"""

from __future__ import annotations

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
    TASK_WORDS,
    TASKS,
)
from cupaged.backends.cpu_formats import GROUP, TILE_COLUMNS
from cupaged.backends.cpu_kernels.few_queries import FEW_QUERIES, add_tile_values, score_tile
from cupaged.backends.cpu_kernels.ir import (
    F32,
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
    prefetch,
    set_word,
    shuffle,
    splat,
    store,
    vector,
    word,
)
from cupaged.backends.cpu_kernels.jit import kernel, operation_kernel
from cupaged.backends.cpu_kernels.kv_numbers import widen
from cupaged.backends.cpu_kernels.program import take_task
from cupaged.backends.cpu_kernels.tile import TILE_ROWS, tile_product
from cupaged.backends.cpu_kv_numbers import FLOAT32
from cupaged.backends.cpu_paged_attention import (
    BATCH,
    BLOCK_BYTES,
    BLOCK_SIZE,
    ELEMENT_BYTES,
    HEAD_DIM,
    HEADS,
    KEYS,
    KIND,
    KV_HEADS,
    OUT,
    OUT_STRIDE,
    QKV,
    QKV_STRIDE,
    SCALE,
    SCALES_AT,
    TILE_KEYS,
    VALUES,
    WINDOW,
)
from cupaged.backends.cpu_prefetch import FETCHING_ROWS
from cupaged.backends.cpu_program import CURSOR, LINE, PARTS, ROWS, SCRATCH

LOWEST = np.float32(-3.0e38)

_FLOAT32 = FLOAT32.index
_DIRECT_ROWS = 3 * TILE_ROWS
"""Below so many rows, times heads, keys and values are read where they lie."""

_PANEL = GROUP * 4
_TILE_GROUPS = TILE_KEYS // GROUP
_TASK_BYTES = 8 * TASK_WORDS


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


@kernel
def _row_of(operation: int, array: int, stride: int, row: int, head: int) -> int:
    """The address of a query head in a row of qkv or out."""
    return word(operation, array) + row * word(operation, stride) + 4 * head * word(operation, HEAD_DIM)


@kernel
def _start(operation: int, first_row: int, rows: int, head: int, query: int, states: int) -> None:
    """The scaled queries [rows * G][D] of a KV head, and states before the first tile."""
    head_dim, group = word(operation, HEAD_DIM), word(operation, HEADS) // word(operation, KV_HEADS)
    scale = float_at(operation, SCALE)
    for n in range(rows * group):
        numbers = carray(pointer_to_float32(_row_of(operation, QKV, QKV_STRIDE, first_row + n // group, head * group + n % group)), head_dim)
        scaled = carray(pointer_to_float32(query + 4 * n * head_dim), head_dim)
        for i in range(head_dim):
            scaled[i] = numbers[i] * scale
        state = carray(pointer_to_float32(states + 8 * n), 2)
        state[0], state[1] = LOWEST, np.float32(0)


@kernel
def _finish(operation: int, first_row: int, rows: int, head: int, total: int, width: int, states: int) -> None:
    """The output of a KV head: the sums of values over the sums of weights."""
    head_dim, group = word(operation, HEAD_DIM), word(operation, HEADS) // word(operation, KV_HEADS)
    for n in range(rows * group):
        out = carray(pointer_to_float32(_row_of(operation, OUT, OUT_STRIDE, first_row + n // group, head * group + n % group)), head_dim)
        result = carray(pointer_to_float32(total + 4 * n * width), head_dim)
        whole = carray(pointer_to_float32(states + 8 * n), 2)[1]
        for i in range(head_dim):
            out[i] = result[i] / whole


@kernel
def _product(more: int, rows: int, x: int, x_stride: int, low: int, high: int, panel_stride: int, count: int, y: int, y_stride: int) -> None:
    """tile_product for any number of rows."""
    for r in range(0, rows, TILE_ROWS):
        height = min(TILE_ROWS, rows - r)
        tile_product(more, height, x + r * x_stride, x_stride, low, high, panel_stride, count, y + r * y_stride, y_stride)


@kernel
def _weigh(rows: int, group: int, position: int, window: int, tile: int, scores: int, states: int, total: int, width: int) -> None:
    """Scores [rows * G][TILE_KEYS] of a tile become weights; the rows are those from `position` on."""
    for n in range(rows * group):
        own = position + n // group
        end = min(TILE_KEYS, own + 1 - tile)
        begin = max(0, own - window + 1 - tile) if window > 0 else 0
        if begin < end:
            _soften(scores + 4 * n * TILE_KEYS, begin, end, states + 8 * n, total + 4 * n * width, width)
        else:
            _zero(scores + 4 * n * TILE_KEYS, TILE_KEYS)


@kernel
def _add_values(rows: int, weights: int, values: int, stride: int, count: int, total: int, width: int) -> None:
    """total [rows][width] += weights [rows][count] @ values [count][width]; rows of weights are TILE_KEYS numbers apart."""
    for c in range(0, width, TILE_COLUMNS):
        first = values + 4 * c
        _product(1, rows, weights, 4 * TILE_KEYS, first, first + _PANEL, stride, count, total + 4 * c, 4 * width)


@kernel
def _block(operation: int, cache: int, table: int, slot: int, head: int) -> int:
    """The address of a head's block of keys or values that holds a slot of the sequence."""
    block = carray(pointer_to_int32(table + 4 * (slot // word(operation, BLOCK_SIZE))), 1)[0]
    return word(operation, cache) + (block * word(operation, KV_HEADS) + head) * word(operation, BLOCK_BYTES)


@emitter()
def _fetch(b: Builder, address: Value, size: Value) -> None:
    """Ask for the cache lines of some bytes, which need not stay in the cache after their use."""

    def line(i: Value, _: list[Value]) -> list[Value]:
        prefetch(b, address, b.mul(i, I64(LINE)), level=0)
        return []

    loop(b, b.udiv(b.add(size, I64(LINE - 1)), I64(LINE)), [], line)


@kernel
def _fetch_next(operation: int, table: int, head: int, heads_end: int, stop: int, oldest: int, end: int) -> None:
    """Ask for the keys and values of the tile after the one that ends at `stop`: the same head's, or the next one's first."""
    start = stop
    if stop == end:
        head, start = head + 1, oldest
    if head < heads_end:
        block_size = word(operation, BLOCK_SIZE)
        after = min(end, start // TILE_KEYS * TILE_KEYS + TILE_KEYS)
        for i in range(start // block_size, (after + block_size - 1) // block_size):
            for cache in (KEYS, VALUES):
                _fetch(_block(operation, cache, table, i * block_size, head), word(operation, BLOCK_BYTES))


# ---- a tile of keys and values where it lies: float32, in whole groups of 16 slots


@kernel
def _list_groups(operation: int, table: int, head: int, tile: int, start: int, stop: int, groups: int) -> None:
    """Where the groups of keys, and behind four of them those of values, of slots start .. stop - 1 of a tile are: int64 [2][4]."""
    block_size, head_dim = word(operation, BLOCK_SIZE), word(operation, HEAD_DIM)
    for slot in range(start // GROUP * GROUP, stop, GROUP):
        number, place = (slot - tile) // GROUP, slot % block_size
        set_word(groups, number, _block(operation, KEYS, table, slot, head) + 4 * place)
        set_word(groups, _TILE_GROUPS + number, _block(operation, VALUES, table, slot, head) + 4 * head_dim * place)


@kernel
def _score_few(operation: int, rows: int, tile: int, start: int, stop: int, query: int, groups: int, scores: int) -> None:
    first, last = (start - tile) // GROUP, (stop - tile + GROUP - 1) // GROUP
    head_dim, stride = word(operation, HEAD_DIM), 4 * word(operation, BLOCK_SIZE)
    score_tile(rows, last - first, query, head_dim, groups + 8 * first, stride, scores + _PANEL * first, 4 * TILE_KEYS)


@kernel
def _score_in_place(operation: int, rows: int, table: int, head: int, tile: int, start: int, stop: int, query: int, scores: int) -> None:
    head_dim, block_size = word(operation, HEAD_DIM), word(operation, BLOCK_SIZE)
    for at in range(start // TILE_COLUMNS * TILE_COLUMNS, stop, TILE_COLUMNS):
        # of a pair of groups one may lie outside: its scores are not looked at
        left = max(at, start // GROUP * GROUP)
        right = at + GROUP if at + GROUP < stop else left
        low = _block(operation, KEYS, table, left, head) + 4 * (left % block_size)
        high = _block(operation, KEYS, table, right, head) + 4 * (right % block_size)
        _product(0, rows, query, 4 * head_dim, low, high, 4 * block_size, head_dim, scores + 4 * (at - tile), 4 * TILE_KEYS)


@kernel
def _add_values_in_place(operation: int, rows: int, table: int, head: int, tile: int, start: int, stop: int, weights: int, total: int, width: int) -> None:
    block_size = word(operation, BLOCK_SIZE)
    for at in range(start // GROUP * GROUP, stop, GROUP):
        begin, end = max(at, start), min(at + GROUP, stop)
        values = _block(operation, VALUES, table, at, head) + 4 * width * (begin % block_size)
        _add_values(rows, weights + 4 * (begin - tile), values, 4 * width, end - begin, total, width)


# ---- a tile that is unpacked into scratch memory: keys as panels [TILE_KEYS / 16][D][16], values as [TILE_KEYS][width]


@kernel
def _unpack(operation: int, table: int, head: int, tile: int, start: int, stop: int, keys: int, values: int, width: int) -> None:
    """Slots start .. stop - 1, and whatever follows them in their group."""
    kind, element, head_dim, block_size = word(operation, KIND), word(operation, ELEMENT_BYTES), word(operation, HEAD_DIM), word(operation, BLOCK_SIZE)
    slot = start
    while slot < stop:
        offset, at = slot % block_size, slot - tile
        whole = at % GROUP == 0 and block_size - offset >= GROUP
        part = GROUP if whole else min(stop - slot, block_size - offset, GROUP - at % GROUP)
        block = _block(operation, KEYS, table, slot, head)
        source, scales = block + element * offset, block + word(operation, SCALES_AT) + 4 * offset
        panel = keys + at // GROUP * head_dim * _PANEL + 4 * (at % GROUP)
        if whole:
            widen(GROUP, 1, kind, source, element * block_size, head_dim, scales, panel, _PANEL)
        else:
            for t in range(part):
                widen(1, 1, kind, source + element * t, element * block_size, head_dim, scales + 4 * t, panel + 4 * t, _PANEL)
        block = _block(operation, VALUES, table, slot, head)
        scales = block + word(operation, SCALES_AT) + 4 * offset
        done = head_dim // GROUP * GROUP
        for t in range(min(part, stop - slot)):
            source, target = block + element * (offset + t) * head_dim, values + 4 * (at + t) * width
            widen(GROUP, 0, kind, source, GROUP * element, done // GROUP, scales + 4 * t, target, _PANEL)
            widen(1, 0, kind, source + element * done, element, head_dim - done, scales + 4 * t, target + 4 * done, 4)
        slot += part


@kernel
def _score_unpacked(rows: int, head_dim: int, tile: int, start: int, stop: int, query: int, keys: int, scores: int) -> None:
    for at in range((start - tile) // TILE_COLUMNS * TILE_COLUMNS, stop - tile, TILE_COLUMNS):
        low = keys + at // GROUP * head_dim * _PANEL
        _product(0, rows, query, 4 * head_dim, low, low + head_dim * _PANEL, _PANEL, head_dim, scores + 4 * at, 4 * TILE_KEYS)


# ---- the operation


@operation_kernel
def attention(member: int, operation: int) -> None:
    kv_heads, head_dim, window, batch = word(operation, KV_HEADS), word(operation, HEAD_DIM), word(operation, WINDOW), word(operation, BATCH)
    group = word(operation, HEADS) // kv_heads
    width = (head_dim + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
    most = TASK_ROWS * group
    query = word(member, SCRATCH)
    scores = query + 4 * most * head_dim
    total = scores + 4 * most * TILE_KEYS
    states = total + 4 * most * width
    keys = states + 8 * most
    values = keys + 4 * TILE_KEYS * head_dim
    groups = values + 4 * TILE_KEYS * width
    set_word(member, CURSOR, 0)
    lies_ready = word(operation, KIND) == _FLOAT32 and word(operation, BLOCK_SIZE) % GROUP == 0 and head_dim == width
    fetches = word(word(operation, ROWS), 0) <= FETCHING_ROWS
    # all KV heads of a task lie side by side in a block; where tasks are few, the crew shares out the heads
    num_tasks = word(batch, NUM_TASKS)
    span = kv_heads if num_tasks >= 4 * word(member, PARTS) else 1
    while True:
        number = take_task(member, num_tasks * kv_heads // span)
        if number < 0:
            return
        task, first_head = word(batch, TASKS) + _TASK_BYTES * (number * span // kv_heads), number * span % kv_heads
        sequence, first_row, rows = word(task, SEQUENCE), word(task, FIRST_ROW), word(task, ROW_COUNT)
        if sequence < 0:
            for row in range(first_row, first_row + rows):
                _zero(_row_of(operation, OUT, OUT_STRIDE, row, first_head * group), span * group * head_dim)
            continue
        table = word(batch, TABLES) + sequence * word(batch, TABLE_STRIDE)
        position = np.int64(carray(pointer_to_int32(word(batch, POSITIONS) + 4 * first_row), 1)[0])
        oldest = max(0, position - window + 1) if window > 0 else 0
        count, end, last_head = rows * group, position + rows, first_head + span
        for head in range(first_head, last_head):
            _start(operation, first_row, rows, head, query, states)
            _zero(total, count * width)
            for tile in range(oldest // TILE_KEYS * TILE_KEYS, end, TILE_KEYS):
                start, stop = max(tile, oldest), min(tile + TILE_KEYS, end)
                if fetches:
                    _fetch_next(operation, table, head, last_head, stop, oldest, end)
                if lies_ready and count <= FEW_QUERIES:
                    _list_groups(operation, table, head, tile, start, stop, groups)
                    _score_few(operation, count, tile, start, stop, query, groups, scores)
                    _weigh(rows, group, position, window, tile, scores, states, total, width)
                    add_tile_values(count, scores, 4 * TILE_KEYS, start - tile, stop - tile, groups + 8 * _TILE_GROUPS, width, total)
                elif lies_ready and count < _DIRECT_ROWS:
                    _score_in_place(operation, count, table, head, tile, start, stop, query, scores)
                    _weigh(rows, group, position, window, tile, scores, states, total, width)
                    _add_values_in_place(operation, count, table, head, tile, start, stop, scores, total, width)
                else:
                    _unpack(operation, table, head, tile, start, stop, keys, values, width)
                    _score_unpacked(count, head_dim, tile, start, stop, query, keys, scores)
                    _weigh(rows, group, position, window, tile, scores, states, total, width)
                    _add_values(count, scores + 4 * (start - tile), values + 4 * (start - tile) * width, 4 * width, stop - start, total, width)
            _finish(operation, first_row, rows, head, total, width, states)
