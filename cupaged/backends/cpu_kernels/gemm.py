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

from functools import cache

from numba import carray

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
    LANES,
    Builder,
    Value,
    constant,
    emitter,
    exp,
    intrinsic_call,
    load,
    pointer_to_float32,
    store,
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


@emitter()
def _silu_mul_row(b: Builder, row: Value) -> None:
    """row[0:16] = silu(row[0:16]) * row[16:32], in place."""
    kind, one = vector(F32, LANES), constant(F32, LANES, 1.0)
    for lane in range(0, GROUP, LANES):
        x, up = load(b, kind, row, 4 * lane), load(b, kind, row, 4 * (GROUP + lane))
        e = exp(b, b.fneg(intrinsic_call(b, f"llvm.fabs.v{LANES}f32", kind, x)))  # of -|x|: never overflows
        above = b.select(b.fcmp_ordered(">=", x, constant(F32, LANES, 0.0)), one, e)
        store(b, b.fmul(b.fmul(x, b.fdiv(above, b.fadd(one, e))), up), row, 4 * lane)


@kernel
def _finish(sums: int, sums_stride: int, rows: int, epilogue: int, bias: int, up_bias: int, width: int, y: int, y_stride: int) -> None:
    """The epilogue of a tile: sums [rows][32] to `width` columns of y. All addresses are of the tile's first number."""
    for r in range(rows):
        source = sums + r * sums_stride
        row = carray(pointer_to_float32(source), TILE_COLUMNS)
        out = carray(pointer_to_float32(y + r * y_stride), width)
        if bias != 0:
            add = carray(pointer_to_float32(bias), width)
            for c in range(width):
                row[c] += add[c]
        if epilogue == SILU:
            if bias != 0:
                add = carray(pointer_to_float32(up_bias), width)
                for c in range(width):
                    row[GROUP + c] += add[c]
            _silu_mul_row(source)
        if epilogue == ADD:
            for c in range(width):
                out[c] += row[c]
        else:
            for c in range(width):
                out[c] = row[c]


@kernel
def _tiles_of_task(rows: int, tiles: int, members: int, at_once: int) -> int:
    """How many tiles, a multiple of `at_once`, a task takes of so many."""
    if rows <= 2 * MAX_ROWS:
        return at_once * max(1, min(_LONGEST, tiles // members) // at_once)
    return max(1, tiles // (_TASKS_A_MEMBER * members))


@kernel
def _panel_product(team: int, ahead: int, more: int, rows: int, x: int, x_stride: int, low: int, high: int, count: int, sums: int) -> None:
    """sums [rows][32] = (more, if it is not 0: sums +) x [rows][count] times a panel, by tiles of about the same height."""
    left = rows
    for passes in range((rows + TILE_ROWS - 1) // TILE_ROWS, 0, -1):
        r, height = rows - left, (left + passes - 1) // passes
        left -= height
        one, other, size = take_piece(team, ahead, x) if count == PANEL_ROWS else (x, x, 0)
        tile_product_fetching(more, height, x + r * x_stride, x_stride, low, high, GROUP * 4, count, sums + r * _ROW, _ROW, one, other, size)


@cache
def gemm(format_index: int) -> Operation:
    """The product for weights of FORMATS[format_index]; all in one function, whose constants are numbers, so that it is cached."""
    block_k, block_bytes = FORMATS[format_index].block_k, FORMATS[format_index].block_bytes
    is_float32 = format_index == FLOAT32.index

    @operation_kernel
    def gemm_operation(team: int, operation: int) -> None:
        rows, columns, epilogue = word(word(operation, ROWS), 0), word(operation, N), word(operation, EPILOGUE)
        x, x_stride, count = word(operation, X), word(operation, X_STRIDE), word(operation, K)
        w, group_bytes = word(operation, W), word(operation, GROUP_BYTES)
        y, y_stride, bias = word(operation, Y), word(operation, Y_STRIDE), word(operation, BIAS)
        ahead = operation + 8 * AHEAD
        sums = word(team, SCRATCH)
        panel = sums + CHUNK_ROWS * _ROW
        width = GROUP if epilogue == SILU else TILE_COLUMNS
        groups = (columns + GROUP - 1) // GROUP * (TILE_COLUMNS // width)
        tiles = (columns + width - 1) // width
        at_once = 2 if rows <= THIN_ROWS else 1
        span = _tiles_of_task(rows, tiles, word(team, PARTS), at_once)
        spans = (tiles + span - 1) // span
        chunks = (rows + CHUNK_ROWS - 1) // CHUNK_ROWS
        while True:
            task = take_task(team)
            if task >= spans * chunks:
                return
            row = task // spans * CHUNK_ROWS
            part = min(CHUNK_ROWS, rows - row)
            x_rows = x + row * x_stride
            tile = task % spans * span
            last = min(tile + span, tiles)
            while tile < last:
                first = w + 2 * tile * group_bytes
                second = first + group_bytes if 2 * tile + 1 < groups else first
                pair = at_once == 2 and tile + 1 < last and 2 * tile + 3 < groups
                sums_stride = _ROW
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
                    for k in range(0, count, PANEL_ROWS):
                        n, skip = min(PANEL_ROWS, count - k), k // block_k * block_bytes
                        low, high, done = first + skip, second + skip, 0
                        if not is_float32:
                            done = MAX_ROWS
                            dot_rows_keeping(format_index, k, x_rows + 4 * k, x_stride, low, second - first, n // block_k, sums, _ROW, panel, _PANEL_BYTES)
                            low, high = panel, panel + _PANEL_BYTES
                        some_x, some_sums = x_rows + 4 * k + done * x_stride, sums + done * _ROW
                        _panel_product(team, ahead, k, part - done, some_x, x_stride, low, high, n, some_sums)
                for i in range(1 + pair):
                    column = (tile + i) * width
                    own_bias = bias + 4 * column if bias != 0 else 0
                    target = y + row * y_stride + 4 * column
                    _finish(sums + i * _ROW, sums_stride, part, epilogue, own_bias, own_bias + 4 * columns, min(width, columns - column), target, y_stride)
                tile += 1 + pair

    return gemm_operation
