"""Arrays whose addresses stand in a table of words: word `index` of `table` as an array of `count` numbers."""

from __future__ import annotations

from typing import Any

from numba import carray

from cupaged.backends.cpu_kernels.ir import (
    pointer_to_float32,
    pointer_to_float64,
    pointer_to_int32,
    pointer_to_int64,
    pointer_to_uint8,
    word,
)
from cupaged.backends.cpu_kernels.jit import kernel


@kernel
def float32s(table: int, index: int, count: int) -> Any:
    return carray(pointer_to_float32(word(table, index)), count)


@kernel
def float64s(table: int, index: int, count: int) -> Any:
    return carray(pointer_to_float64(word(table, index)), count)


@kernel
def int32s(table: int, index: int, count: int) -> Any:
    return carray(pointer_to_int32(word(table, index)), count)


@kernel
def int64s(table: int, index: int, count: int) -> Any:
    return carray(pointer_to_int64(word(table, index)), count)


@kernel
def uint8s(table: int, index: int, count: int) -> Any:
    return carray(pointer_to_uint8(word(table, index)), count)
