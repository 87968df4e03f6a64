"""Matrix products with quantised weights in whole numbers (digit_tile.py).

A task is some tiles of 32 columns for a chunk of rows. Of many rows every member has chunks of its own, for all columns: what
it reads of x is what it wrote itself, an operation before, and lies in its caches. Few rows, and in a large crew weights too
large for a cache, are shared out by columns instead.

A chunk's rows become records first. A member makes those of the chunk that it works on for itself; only a large crew that works
on the same rows makes them together. For a tile, the codes of 32 k are unpacked once into registers, and used for all rows of
the chunk. The sums stay in scratch memory till they are whole; then comes the epilogue (epilogue.py).
"""

from __future__ import annotations

from functools import cache

from cupaged.backends.cpu_formats import BLOCK, FORMATS, TILE_COLUMNS
from cupaged.backends.cpu_gemm import AHEAD, CHUNK_ROWS, GROUP_BYTES, OWN_PARTS, OWN_ROWS, RECORDS, X_STRIDE, K, W, X
from cupaged.backends.cpu_kernels.digit_tile import FETCH_BLOCKS, PIECE_WORDS, PIECES_AT, digit_product, tile_rows
from cupaged.backends.cpu_kernels.digits import RECORD, to_digits
from cupaged.backends.cpu_kernels.epilogue import finish_tile
from cupaged.backends.cpu_kernels.extremes import note_extremes
from cupaged.backends.cpu_kernels.gemm_tasks import tiles_a_task, tiles_of
from cupaged.backends.cpu_kernels.ir import set_word, word
from cupaged.backends.cpu_kernels.jit import Operation, kernel, operation_kernel
from cupaged.backends.cpu_kernels.prefetch import take_piece
from cupaged.backends.cpu_kernels.program import take_task, wait_for_all
from cupaged.backends.cpu_prefetch import FETCHING_ROWS
from cupaged.backends.cpu_program import PART, PARTS, ROWS, SCRATCH

FEW_ROWS = FETCHING_ROWS
"""Up to so many rows a product is bound by memory, and leaves none of its speed to others."""

_RECORD_BYTES = 512 << 10
"""About as many bytes of records belong to a chunk: they stay in a core's second-level cache."""

_CACHED_BYTES = 8 << 20
"""Weights up to this size every member may read: after the first one they come from a cache."""

_ROW = TILE_COLUMNS * 4


@kernel
def _rows_of_chunk(rows: int, owners: int, blocks: int) -> int:
    """Rows of a chunk where everyone of so many owners has as many chunks."""
    most = owners * max(FEW_ROWS, min(CHUNK_ROWS, _RECORD_BYTES // (blocks * RECORD)))
    chunks = owners * max(1, (rows + most - 1) // most)
    return (rows + chunks - 1) // chunks


@cache
def digit_gemm(format_index: int) -> Operation:
    """The product for weights of FORMATS[format_index], which is quantised."""
    block_bytes, height = FORMATS[format_index].block_bytes, tile_rows(FORMATS[format_index])

    @kernel
    def make_records(operation: int, first: int, row: int, rows: int, blocks: int, records: int) -> None:
        """Those of row `row` among `rows` from `first` on, a chunk, whose records lie together, a block's side by side."""
        x, x_stride = word(operation, X), word(operation, X_STRIDE)
        to_digits(format_index, x + (first + row) * x_stride, blocks, records + row * RECORD, rows * RECORD)

    @kernel
    def make_together(member: int, operation: int, rows: int, chunk_rows: int, blocks: int, records: int) -> None:
        while True:
            row = take_task(member, rows)
            if row < 0:
                wait_for_all(member)
                return
            first = row // chunk_rows * chunk_rows
            make_records(operation, first, row - first, min(chunk_rows, rows - first), blocks, records + first * blocks * RECORD)

    @kernel
    def multiply(member: int, operation: int, rows: int, records: int, tile: int, group_stride: int, blocks: int, sums: int) -> None:
        """sums [rows][32], with pieces of what the next attention reads (prefetch.py) on their way."""
        w, stride, work = word(operation, W) + 2 * tile * word(operation, GROUP_BYTES), rows * RECORD, sums + CHUNK_ROWS * _ROW
        for first in range(0, blocks, FETCH_BLOCKS):
            count = min(FETCH_BLOCKS, blocks - first)
            asks = word(word(operation, ROWS), 0) > FEW_ROWS and count == FETCH_BLOCKS
            for i in range((rows + 2 * height - 1) // (2 * height)):
                piece = take_piece(member, operation + 8 * AHEAD, records) if asks else (records, records, 0)
                for j in range(PIECE_WORDS):
                    set_word(work + PIECES_AT, PIECE_WORDS * i + j, piece[j])
            digit_product(format_index, first, rows, records + first * stride, stride, w + first * block_bytes, group_stride, count, sums, work)

    @operation_kernel
    def gemm_operation(member: int, operation: int) -> None:
        rows, sums, blocks = word(word(operation, ROWS), 0), word(member, SCRATCH), word(operation, K) // BLOCK
        parts, records, group_bytes = word(member, PARTS), word(operation, RECORDS), word(operation, GROUP_BYTES)
        tiles, groups = tiles_of(operation)
        owners = parts if rows >= parts * FEW_ROWS and groups * group_bytes <= _CACHED_BYTES else 1
        chunk_rows = _rows_of_chunk(rows, owners, blocks)
        span = tiles_a_task(member, operation, FEW_ROWS, 1)
        spans = (tiles + span - 1) // span
        together = parts > OWN_PARTS and rows > OWN_ROWS and owners == 1
        if together:
            make_together(member, operation, rows, chunk_rows, blocks, records)
        chunks, made = (rows + chunk_rows - 1) // chunk_rows, -1
        while True:
            task = take_task(member, chunks * spans)
            if task < 0:
                return
            chunk, of_columns = (task % chunks, task // chunks) if together else (task // spans, task % spans)
            first = chunk * chunk_rows
            part = min(chunk_rows, rows - first)
            own = records + (first if together else word(member, PART) * chunk_rows) * blocks * RECORD
            if not together and made != first:
                for row in range(part):
                    make_records(operation, first, row, part, blocks, own)
                made = first
            for tile in range(of_columns * span, min((of_columns + 1) * span, tiles)):
                group_stride = group_bytes if 2 * tile + 1 < groups else 0
                multiply(member, operation, part, own, tile, group_stride, blocks, sums)
                finish_tile(operation, first, part, tile, sums, _ROW)
            note_extremes(operation, first, part, of_columns, span * TILE_COLUMNS)

    return gemm_operation
