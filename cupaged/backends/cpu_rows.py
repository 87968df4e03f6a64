"""The operations of the CPU that work row by row: the token table, norms, and the choice of rows. Their words, and their scratch memory.

A task is one row (cpu_kernels/rows.py).
"""

from __future__ import annotations

from cupaged.backends.cpu_formats import GROUP
from cupaged.backends.cpu_program import FIRST

TABLE, GROUP_BYTES, WIDTH, IDS, OUT, OUT_STRIDE = range(FIRST, FIRST + 6)  # embedding
X, X_STRIDE, WEIGHT, EPS, NORM_WIDTH, NORM_OUT, NORM_OUT_STRIDE = range(FIRST, FIRST + 7)  # rms_norm
QKV, QKV_STRIDE, Q_WEIGHT, K_WEIGHT, HEAD_EPS, HEAD_DIM, HEADS, KV_HEADS = range(FIRST, FIRST + 8)  # head_rms_norm
SOURCE, SOURCE_STRIDE, CHOSEN, COUNT, TARGET, TARGET_STRIDE = range(FIRST, FIRST + 6)  # gather_rows

PANEL_ROWS = 512
"""Rows of K of the token table that are unpacked at a time."""

SCRATCH_BYTES = PANEL_ROWS * GROUP * 4
