"""Matrix products on float32 numbers: weights are unpacked on their way to the multiply-adds.

    few rows    weights are unpacked in registers and used at once: bound by memory; of one row or two, the tiles are taken
                in pairs, because two sums, each in the order of k, are too few for the multiply-adds to overlap
    more rows   the first few rows leave the unpacked weights in a panel, PANEL_ROWS of K at a time, over which register tiles
                of the others pass: bound by arithmetic; meanwhile the next attention's blocks are asked for (prefetch.py)

Both take every sum in the order of k (tile.py), so a row's result does not depend on how many rows there are. The
sums of a task stay in scratch memory till they are whole; then comes the epilogue (epilogue.py).
"""

from __future__ import annotations

from functools import cache

from cupaged.backends.cpu_formats import FLOAT32, FORMATS, GROUP, TILE_COLUMNS
from cupaged.backends.cpu_gemm import AHEAD, CHUNK_ROWS, GROUP_BYTES, PANEL_ROWS, X_STRIDE, K, W, X
from cupaged.backends.cpu_kernels.epilogue import finish_tile
from cupaged.backends.cpu_kernels.extremes import note_extremes
from cupaged.backends.cpu_kernels.gemm_tasks import rows_a_task, tiles_a_task, tiles_of
from cupaged.backends.cpu_kernels.ir import LANES, word
from cupaged.backends.cpu_kernels.jit import Operation, kernel, operation_kernel
from cupaged.backends.cpu_kernels.prefetch import take_piece
from cupaged.backends.cpu_kernels.program import take_task
from cupaged.backends.cpu_kernels.tile import TILE_ROWS, tile_product_fetching
from cupaged.backends.cpu_kernels.unpack import MAX_ROWS, dot_rows, dot_rows_keeping
from cupaged.backends.cpu_program import ROWS, SCRATCH

THIN_ROWS = 2 if LANES == 16 else 0
"""Up to so many rows have too few sums in two groups. Registers of fewer lanes have more sums in a group."""

_MOST_THIN = max(1, THIN_ROWS)
_ROW = TILE_COLUMNS * 4
_PANEL_BYTES = PANEL_ROWS * GROUP * 4


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
            finish_tile(operation, row + r, height, tile, own, _ROW)


@cache
def float_gemm(format_index: int) -> Operation:
    """The product for weights of FORMATS[format_index]."""
    block_k, block_bytes = FORMATS[format_index].block_k, FORMATS[format_index].block_bytes
    is_float32 = format_index == FLOAT32.index

    @kernel
    def few_rows(rows: int, x: int, x_stride: int, first: int, group_stride: int, blocks: int, sums: int) -> None:
        """sums [rows][32] of up to 2 * MAX_ROWS: unpacking twice still beats the detour over a panel."""
        height = rows if rows <= MAX_ROWS else (rows + 1) // 2
        for half in range(2):
            r = half * height
            n = min(height, rows - r)
            if n > 0:
                dot_rows(format_index, 2, MAX_ROWS, n, x + r * x_stride, x_stride, first, group_stride, blocks, sums + r * _ROW, _ROW)

    @kernel
    def many_rows(member: int, operation: int, row: int, rows: int, tile: int, first: int, group_stride: int, sums: int) -> int:
        """sums [rows][32]; returns how many of the rows are not finished yet."""
        x_stride, count, panel = word(operation, X_STRIDE), word(operation, K), sums + CHUNK_ROWS * _ROW
        x = word(operation, X) + row * x_stride
        left = 0 if is_float32 else MAX_ROWS  # the others are finished with their last panel
        for k in range(0, count, PANEL_ROWS):
            low = first + k // block_k * block_bytes
            high = low + group_stride
            if not is_float32:
                n = min(PANEL_ROWS, count - k) // block_k
                dot_rows_keeping(format_index, k, x + 4 * k, x_stride, low, group_stride, n, sums, _ROW, panel, _PANEL_BYTES)
                low, high = panel, panel + _PANEL_BYTES
            _panel_product(member, operation, k, row + left, rows - left, low, high, tile, sums + left * _ROW)
        return left

    @operation_kernel
    def gemm_operation(member: int, operation: int) -> None:
        rows, sums = word(word(operation, ROWS), 0), word(member, SCRATCH)
        x, x_stride, blocks = word(operation, X), word(operation, X_STRIDE), word(operation, K) // block_k
        w, group_bytes = word(operation, W), word(operation, GROUP_BYTES)
        tiles, groups = tiles_of(operation)
        at_once = 2 if rows <= THIN_ROWS else 1
        span = tiles_a_task(member, operation, 2 * MAX_ROWS, at_once)
        spans = (tiles + span - 1) // span
        chunk_rows = rows_a_task(rows, max(1, (rows + CHUNK_ROWS - 1) // CHUNK_ROWS), TILE_ROWS)
        tasks = (rows + chunk_rows - 1) // chunk_rows * spans
        while True:
            task = take_task(member, tasks)
            if task < 0:
                return
            row = task // spans * chunk_rows
            part = min(chunk_rows, rows - row)
            tile = task % spans * span
            last = min(tile + span, tiles)
            while tile < last:
                first = w + 2 * tile * group_bytes
                group_stride = group_bytes if 2 * tile + 1 < groups else 0
                pair = at_once == 2 and tile + 1 < last and 2 * tile + 3 < groups
                sums_stride, left = _ROW * (1 + pair), part
                if pair:
                    dot_rows(format_index, 4, _MOST_THIN, part, x + row * x_stride, x_stride, first, group_bytes, blocks, sums, sums_stride)
                elif part <= 2 * MAX_ROWS:
                    few_rows(part, x + row * x_stride, x_stride, first, group_stride, blocks, sums)
                else:
                    left = many_rows(member, operation, row, part, tile, first, group_stride, sums)
                for i in range(1 + pair):
                    finish_tile(operation, row, left, tile + i, sums + i * _ROW, sums_stride)
                tile += 1 + pair
            note_extremes(operation, row, part, task % spans, span * TILE_COLUMNS)

    return gemm_operation
