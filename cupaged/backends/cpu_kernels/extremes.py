"""The smallest and the largest of many float32 numbers, and whether a token may be chosen from them.

Read as integers, floats keep their order once the lower bits of negative ones are flipped (`order_of`), and a minimum and a maximum
of integers are vector code, as those of floats are not because of NaN.

A product may note them of the logits that it makes, task by task, while they lie in a cache (cpu_noted.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types

from cupaged.backends.cpu_gemm import NOTED, Y_STRIDE, N, Y
from cupaged.backends.cpu_kernels.ir import F32, I32, Builder, Value, emitter, pointer_to_int32, set_word, word
from cupaged.backends.cpu_kernels.jit import exact_kernel, kernel
from cupaged.backends.cpu_noted import FIRST_PAIR, WIDTH
from cupaged.backends.cpu_program import ROWS


@exact_kernel
def order_of(bits: np.int32) -> np.int32:
    """float32 bits -> an int32 in the order of the floats; its own inverse."""
    key: np.int32 = np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return key


@exact_kernel
def extremes(bits: Any) -> tuple[np.int32, np.int32]:
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for i in range(len(bits)):
        key = order_of(bits[i])
        low, high = min(low, key), max(high, key)
    return low, high


@emitter(returns=types.float32)
def _float_of(b: Builder, bits: Value) -> Value:
    return b.bitcast(b.trunc(bits, I32), F32)


@exact_kernel
def as_float(key: np.int32) -> np.float32:
    value: np.float32 = _float_of(np.int64(order_of(key)))
    return value


@exact_kernel
def refused(low: np.int32, high: np.int32) -> bool:
    """Whether there is NaN or +inf among numbers with these extremes."""
    return low < np.int32(-0x7F800001) or high >= np.int32(0x7F800000)  # beyond -inf: NaN; at or beyond +inf


@kernel
def note_extremes(operation: int, row: int, rows: int, part: int, width: int) -> None:
    """Note, if a product is told to, those of the rows from `row` on in the part of y that a task has computed: its columns are
    cut into parts of `width`."""
    noted = word(operation, NOTED)
    if noted == 0:
        return
    set_word(noted, WIDTH, width)  # every task the same
    first, columns = part * width, min(width, word(operation, N) - part * width)
    for r in range(row, row + rows):
        low, high = extremes(carray(pointer_to_int32(word(operation, Y) + r * word(operation, Y_STRIDE) + 4 * first), columns))
        pair = carray(pointer_to_int32(noted + 8 * (FIRST_PAIR + part * word(word(operation, ROWS), 0) + r)), 2)
        pair[0], pair[1] = low, high


@exact_kernel
def noted_extremes(noted: int, number: int) -> tuple[np.int32, np.int32]:
    pair = carray(pointer_to_int32(noted + 8 * (FIRST_PAIR + number)), 2)
    return pair[0], pair[1]
