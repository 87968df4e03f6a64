"""The matrix products of the CPU as an operation: its words, and what its kernel (cpu_kernels/gemm.py) needs of memory.

PLAIN   y = x @ W.T + bias
ADD     y += x @ W.T + bias
SILU    y = silu(gate) * up          W's groups are in turn 16 columns of the gate and the same ones of up
"""

from __future__ import annotations

from cupaged.backends.cpu_formats import TILE_COLUMNS
from cupaged.backends.cpu_program import FIRST

PLAIN, ADD, SILU = range(3)

CHUNK_ROWS = 240
"""Most rows of a task: its sums and its rows of x stay in a core's second-level cache. A multiple of a tile's rows."""

PANEL_ROWS = 512
"""Rows of K in a panel of unpacked weights: 64 KB for two groups."""

SCRATCH_BYTES = CHUNK_ROWS * TILE_COLUMNS * 4 + PANEL_ROWS * TILE_COLUMNS * 4

OWN_ROWS, OWN_PARTS = 2, 2
"""A member makes digits of x for itself: of up to so many rows, in a crew of up to so many members, or where nobody else works on its rows."""

# words of an operation
X, X_STRIDE, K, W, GROUP_BYTES, N, Y, Y_STRIDE, BIAS, EPILOGUE = range(FIRST, FIRST + 10)
AHEAD = FIRST + 10
"""The words of cpu_prefetch."""
RECORDS = AHEAD + 4
"""Where weights are quantised: the address of room for `record_numbers` float32 numbers."""
NOTED = RECORDS + 1
"""The address of memory for what is noted of y (cpu_noted.py), or 0."""

TASKS_A_MEMBER = 16
"""Of many rows: so many that the members end together."""

LONGEST_TASK = 128
"""Most tiles of a task of few rows, which has as many as its member's share: it reads them front to back, and every beginning
waits for memory."""


def record_numbers(rows: int, width: int, members: int) -> int:
    """Room for x [rows, width] in digits: all of it, or what every member makes of it for itself."""
    own = min(rows, CHUNK_ROWS if members <= OWN_PARTS else OWN_ROWS)
    return width * max(rows + members, own * members)
