"""The operations that work row by row: the token table, norms, and the choice of rows. A task is one row."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray

from cupaged.backends.cpu_formats import FORMATS, GROUP
from cupaged.backends.cpu_kernels.arrays import float32s, int32s
from cupaged.backends.cpu_kernels.ir import float_at, pointer_to_float32, word
from cupaged.backends.cpu_kernels.jit import Operation, kernel, operation_kernel
from cupaged.backends.cpu_kernels.program import take_task
from cupaged.backends.cpu_kernels.unpack import unpack_panel
from cupaged.backends.cpu_program import ROWS, SCRATCH
from cupaged.backends.cpu_rows import (
    CHOSEN,
    COUNT,
    EPS,
    GROUP_BYTES,
    HEAD_DIM,
    HEAD_EPS,
    HEADS,
    IDS,
    K_WEIGHT,
    KV_HEADS,
    NORM_OUT,
    NORM_OUT_STRIDE,
    NORM_WIDTH,
    OUT,
    OUT_STRIDE,
    PANEL_ROWS,
    Q_WEIGHT,
    QKV,
    QKV_STRIDE,
    SOURCE,
    SOURCE_STRIDE,
    TABLE,
    TARGET,
    TARGET_STRIDE,
    WEIGHT,
    WIDTH,
    X_STRIDE,
    X,
)


@cache
def embedding(format_index: int) -> Operation:
    """A token's column of a packed table: the group that holds it is unpacked, a piece at a time."""
    block_k, block_bytes = FORMATS[format_index].block_k, FORMATS[format_index].block_bytes

    @operation_kernel
    def embedding_operation(member: int, operation: int) -> None:
        rows, width = word(word(operation, ROWS), 0), word(operation, WIDTH)
        ids = int32s(operation, IDS, rows)
        panel = word(member, SCRATCH)
        numbers = carray(pointer_to_float32(panel), (PANEL_ROWS, GROUP))
        while True:
            row = take_task(member, rows)
            if row < 0:
                return
            group, lane = divmod(ids[row], GROUP)
            blocks = word(operation, TABLE) + group * word(operation, GROUP_BYTES)
            out = carray(pointer_to_float32(word(operation, OUT) + row * word(operation, OUT_STRIDE)), width)
            for k in range(0, width, PANEL_ROWS):
                part = min(PANEL_ROWS, width - k)
                unpack_panel(format_index, blocks + k // block_k * block_bytes, part // block_k, panel)
                for i in range(part):
                    out[k + i] = numbers[i, lane]

    return embedding_operation


@kernel
def _norm(source: Any, weight: Any, eps: Any, out: Any) -> None:
    width = source.shape[0]
    total = np.float32(0)
    for i in range(width):
        total += source[i] * source[i]
    scale = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
    for i in range(width):
        out[i] = source[i] * scale * weight[i]


@operation_kernel
def rms_norm(member: int, operation: int) -> None:
    rows, width, eps = word(word(operation, ROWS), 0), word(operation, NORM_WIDTH), float_at(operation, EPS)
    weight = float32s(operation, WEIGHT, width)
    while True:
        row = take_task(member, rows)
        if row < 0:
            return
        x = carray(pointer_to_float32(word(operation, X) + row * word(operation, X_STRIDE)), width)
        out = carray(pointer_to_float32(word(operation, NORM_OUT) + row * word(operation, NORM_OUT_STRIDE)), width)
        _norm(x, weight, eps, out)


@operation_kernel
def head_rms_norm(member: int, operation: int) -> None:
    rows, width, eps = word(word(operation, ROWS), 0), word(operation, HEAD_DIM), float_at(operation, HEAD_EPS)
    q_weight = float32s(operation, Q_WEIGHT, width)
    k_weight = float32s(operation, K_WEIGHT, width)
    heads, kv_heads = word(operation, HEADS), word(operation, KV_HEADS)
    while True:
        row = take_task(member, rows)
        if row < 0:
            return
        for h in range(heads + kv_heads):
            head = carray(pointer_to_float32(word(operation, QKV) + row * word(operation, QKV_STRIDE) + 4 * h * width), width)
            _norm(head, q_weight if h < heads else k_weight, eps, head)


@operation_kernel
def gather_rows(member: int, operation: int) -> None:
    rows, width = word(word(operation, ROWS), 0), word(operation, COUNT)
    chosen = int32s(operation, CHOSEN, rows)
    while True:
        row = take_task(member, rows)
        if row < 0:
            return
        source = carray(pointer_to_float32(word(operation, SOURCE) + chosen[row] * word(operation, SOURCE_STRIDE)), width)
        out = carray(pointer_to_float32(word(operation, TARGET) + row * word(operation, TARGET_STRIDE)), width)
        for i in range(width):
            out[i] = source[i]
