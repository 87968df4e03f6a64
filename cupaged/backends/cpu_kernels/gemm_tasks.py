"""How a product is cut into tasks: some tiles of 32 columns of y (two groups of packed ones) for some rows."""

from __future__ import annotations

from cupaged.backends.cpu_formats import GROUP, TILE_COLUMNS
from cupaged.backends.cpu_gemm import EPILOGUE, LONGEST_TASK, SILU, TASKS_A_MEMBER, N
from cupaged.backends.cpu_kernels.ir import word
from cupaged.backends.cpu_kernels.jit import kernel
from cupaged.backends.cpu_program import PARTS, ROWS


@kernel
def tiles_of(operation: int) -> tuple[int, int]:
    """Tiles of the product, and its groups of packed columns: an odd number leaves the last tile with one."""
    columns = word(operation, N)
    width = GROUP if word(operation, EPILOGUE) == SILU else TILE_COLUMNS
    return (columns + width - 1) // width, (columns + GROUP - 1) // GROUP * (TILE_COLUMNS // width)


@kernel
def tiles_a_task(member: int, operation: int, few: int, at_once: int) -> int:
    """How many tiles belong to a task; a multiple of `at_once` up to `few` rows."""
    members, tiles = word(member, PARTS), tiles_of(operation)[0]
    if word(word(operation, ROWS), 0) <= few:
        return at_once * max(1, min(LONGEST_TASK, tiles // members) // at_once)
    return max(1, tiles // (TASKS_A_MEMBER * members))


@kernel
def rows_a_task(rows: int, chunks: int, height: int) -> int:
    """How many rows belong to a task where there are about so many chunks of rows: a multiple of `height`."""
    return ((rows + chunks - 1) // chunks + height - 1) // height * height
