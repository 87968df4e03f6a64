"""The matrix products of the CPU: y = x @ W.T straight from packed weights, with what follows a product done on the way.

A task is some tiles of 32 columns of y (two groups of packed ones) for up to CHUNK_ROWS rows:

    few rows    weights are unpacked in registers and used at once: bound by memory; of one row or two, the tiles are taken
                in pairs, because two sums, each in the order of k, are too few for the multiply-adds to overlap
    more rows   the first few rows leave the unpacked weights in a panel, PANEL_ROWS of K at a time, over which register tiles
                of the others pass: bound by arithmetic; meanwhile the next attention's blocks are asked for (prefetch.py)

Both take every sum in the order of k (tile.py), so a row's result does not depend on how many rows there are. The
sums of a task stay in scratch memory till they are whole; then comes the epilogue:

    PLAIN   y = sums + bias
    ADD     y += sums + bias
    SILU    y = silu(gate) * up          a tile's two groups are 16 columns of the gate and the same ones of up; so are
                                         the sums, and the halves of the bias
"""

from __future__ import annotations

from functools import cache, reduce

from cupaged.backends.cpu_formats import FLOAT32, FORMATS, GROUP, TILE_COLUMNS
from cupaged.backends.cpu_gemm import (
    ADD,
    AHEAD,
    BIAS,
    CHUNK_ROWS,
    EPILOGUE,
    GROUP_BYTES,
    PANEL_ROWS,
    SILU,
    X_STRIDE,
    Y_STRIDE,
    K,
    N,
    W,
    X,
    Y,
)
from cupaged.backends.cpu_kernels.ir import (
    F32,
    I64,
    LANES,
    Builder,
    Value,
    at,
    by_lanes,
    constant,
    emitter,
    exp,
    intrinsic_call,
    load,
    loop,
    store,
    switch,
    vector,
    word,
)
from cupaged.backends.cpu_kernels.jit import Operation, kernel, operation_kernel
from cupaged.backends.cpu_kernels.prefetch import take_piece
from cupaged.backends.cpu_kernels.program import take_task
from cupaged.backends.cpu_kernels.tile import TILE_ROWS, tile_product_fetching
from cupaged.backends.cpu_kernels.unpack import MAX_ROWS, dot_rows, dot_rows_keeping
from cupaged.backends.cpu_program import PARTS, ROWS, SCRATCH

THIN_ROWS = 2 if LANES == 16 else 0
"""Up to so many rows have too few sums in two groups. Registers of fewer lanes have more sums in a group."""

_MOST_THIN = max(1, THIN_ROWS)
_ROW = TILE_COLUMNS * 4
_PANEL_BYTES = PANEL_ROWS * GROUP * 4
_TASKS_A_MEMBER = 16
"""Of many rows: so many that the members end together."""
_LONGEST = 128
"""Most tiles of a task of few rows, which has as many as its member's share: it reads them front to back, and every beginning
waits for memory."""


def _silu_mul(b: Builder, gate: Value, up: Value) -> Value:
    """silu(gate) * up."""
    kind, lanes = gate.type, gate.type.count
    one = constant(F32, lanes, 1.0)
    e = exp(b, b.fneg(intrinsic_call(b, f"llvm.fabs.v{lanes}f32", kind, gate)))  # of -|gate|: never overflows
    above = b.select(b.fcmp_ordered(">=", gate, constant(F32, lanes, 0.0)), one, e)
    return b.fmul(b.fmul(gate, b.fdiv(above, b.fadd(one, e))), up)


@emitter()
def _finish(
    b: Builder, sums: Value, sums_stride: Value, rows: Value, epilogue: Value, bias: Value, up_bias: Value, width: Value, y: Value, y_stride: Value
) -> None:
    """The epilogue of a tile: sums [rows][32] to `width` columns of y. All addresses are of the tile's first number; bias 0: there is none."""

    def case(number: int) -> None:
        epilogue, biased = divmod(number, 2)

        def some(first: Value, lanes: int) -> None:
            kind, offset = vector(F32, lanes), b.mul(first, I64(4))
            terms = [load(b, kind, bias, offset)] if biased else []
            up_terms = [load(b, kind, up_bias, offset)] if biased and epilogue == SILU else []

            def row(r: Value, _: list[Value]) -> list[Value]:
                source = b.add(at(b, sums, offset), b.mul(r, sums_stride))
                target = b.add(at(b, y, offset), b.mul(r, y_stride))
                result = reduce(b.fadd, terms, load(b, kind, source))
                if epilogue == SILU:
                    result = _silu_mul(b, result, reduce(b.fadd, up_terms, load(b, kind, source, 4 * GROUP)))
                store(b, b.fadd(load(b, kind, target), result) if epilogue == ADD else result, target)
                return []

            loop(b, rows, [], row)

        by_lanes(b, width, some)

    has_bias = b.zext(b.icmp_signed("!=", bias, I64(0)), I64)
    switch(b, b.add(b.mul(epilogue, I64(2)), has_bias), range(6), case)


@kernel
def _tiles_of_task(rows: int, tiles: int, members: int, at_once: int) -> int:
    """How many tiles, a multiple of `at_once`, a task takes of so many."""
    if rows <= 2 * MAX_ROWS:
        return at_once * max(1, min(_LONGEST, tiles // members) // at_once)
    return max(1, tiles // (_TASKS_A_MEMBER * members))


@kernel
def _finish_tile(operation: int, row: int, rows: int, tile: int, sums: int, sums_stride: int) -> None:
    """The epilogue of the tile's rows from `row` on, whose sums [rows][32] are whole."""
    epilogue, columns, bias = word(operation, EPILOGUE), word(operation, N), word(operation, BIAS)
    width = GROUP if epilogue == SILU else TILE_COLUMNS
    column = tile * width
    own_bias = bias + 4 * column if bias != 0 else 0
    y_stride = word(operation, Y_STRIDE)
    y = word(operation, Y) + row * y_stride + 4 * column
    _finish(sums, sums_stride, rows, epilogue, own_bias, own_bias + 4 * columns, min(width, columns - column), y, y_stride)


@kernel
def _panel_product(member: int, operation: int, k: int, row: int, rows: int, low: int, high: int, tile: int, sums: int) -> None:
    """sums [rows][32] = (k > 0: sums +) the rows of x from `row` on times a panel, whose first k it is, by register tiles of about the same height.

    At the last panel each of them goes straight on to its epilogue: its stores are on their way while the next one is computed.
    """
    x_stride, count = word(operation, X_STRIDE), min(PANEL_ROWS, word(operation, K) - k)
    x = word(operation, X) + row * x_stride + 4 * k
    left = rows
    for passes in range((rows + TILE_ROWS - 1) // TILE_ROWS, 0, -1):
        r, height = rows - left, (left + passes - 1) // passes
        left -= height
        own = sums + r * _ROW
        one, other, size = take_piece(member, operation + 8 * AHEAD, x) if count == PANEL_ROWS else (x, x, 0)
        tile_product_fetching(k, height, x + r * x_stride, x_stride, low, high, GROUP * 4, count, own, _ROW, one, other, size)
        if k + count == word(operation, K):
            _finish_tile(operation, row + r, height, tile, own, _ROW)


@cache
def gemm(format_index: int) -> Operation:
    """The product for weights of FORMATS[format_index]."""
    block_k, block_bytes = FORMATS[format_index].block_k, FORMATS[format_index].block_bytes
    is_float32 = format_index == FLOAT32.index

    @operation_kernel
    def gemm_operation(member: int, operation: int) -> None:
        rows, columns = word(word(operation, ROWS), 0), word(operation, N)
        x, x_stride, count = word(operation, X), word(operation, X_STRIDE), word(operation, K)
        w, group_bytes = word(operation, W), word(operation, GROUP_BYTES)
        sums = word(member, SCRATCH)
        panel = sums + CHUNK_ROWS * _ROW
        width = GROUP if word(operation, EPILOGUE) == SILU else TILE_COLUMNS
        groups = (columns + GROUP - 1) // GROUP * (TILE_COLUMNS // width)
        tiles = (columns + width - 1) // width
        at_once = 2 if rows <= THIN_ROWS else 1
        span = _tiles_of_task(rows, tiles, word(member, PARTS), at_once)
        spans = (tiles + span - 1) // span
        chunks = max(1, (rows + CHUNK_ROWS - 1) // CHUNK_ROWS)
        chunk_rows = ((rows + chunks - 1) // chunks + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
        while True:
            task = take_task(member)
            if task >= spans * chunks:
                return
            row = task // spans * chunk_rows
            part = min(chunk_rows, rows - row)
            x_rows = x + row * x_stride
            tile = task % spans * span
            last = min(tile + span, tiles)
            while tile < last:
                first = w + 2 * tile * group_bytes
                second = first + group_bytes if 2 * tile + 1 < groups else first
                pair = at_once == 2 and tile + 1 < last and 2 * tile + 3 < groups
                sums_stride, whole = _ROW, part
                if pair:
                    sums_stride = 2 * _ROW
                    dot_rows(format_index, 4, _MOST_THIN, part, x_rows, x_stride, first, group_bytes, count // block_k, sums, sums_stride)
                elif part <= 2 * MAX_ROWS:  # unpacking twice still beats the detour over a panel
                    height = part if part <= MAX_ROWS else (part + 1) // 2
                    for half in range(2):
                        r = half * height
                        n = min(height, part - r)
                        if n > 0:
                            dot_rows(format_index, 2, MAX_ROWS, n, x_rows + r * x_stride, x_stride, first, second - first, count // block_k, sums + r * _ROW, _ROW)
                else:
                    whole = 0 if is_float32 else MAX_ROWS  # the others are finished with their last panel
                    for k in range(0, count, PANEL_ROWS):
                        n, skip = min(PANEL_ROWS, count - k), k // block_k * block_bytes
                        low, high = first + skip, second + skip
                        if not is_float32:
                            dot_rows_keeping(format_index, k, x_rows + 4 * k, x_stride, low, second - first, n // block_k, sums, _ROW, panel, _PANEL_BYTES)
                            low, high = panel, panel + _PANEL_BYTES
                        _panel_product(member, operation, k, row + whole, part - whole, low, high, tile, sums + whole * _ROW)
                for i in range(1 + pair):
                    _finish_tile(operation, row, whole, tile + i, sums + i * _ROW, sums_stride)
                tile += 1 + pair

    return gemm_operation
