"""How kernels are written: functions that Numba compiles, and among them those that a program can call.

    @kernel              called by other kernels; its sums may be reordered, which vectorises them
    @exact_kernel        the same where the order of operations matters
    @operation_kernel    void(int64 member, int64 operation): called by its address, with two tables of words (cpu_program.py)

They are plain serial code that cannot raise, allocates nothing and knows no Python object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])

# Sums may be reordered and fused, which vectorises them. NaN and infinity keep their meaning.
_FAST_MATH = {"reassoc", "contract", "arcp", "nsz"}


def kernel(function: F) -> F:
    return cast(F, numba.njit(error_model="numpy", fastmath=_FAST_MATH)(function))


def exact_kernel(function: F) -> F:
    return cast(F, numba.njit(error_model="numpy", fastmath={"contract"})(function))


class Operation:
    """A function that becomes machine code of its own (compiler.py). The order of its sums is kept."""

    def __init__(self, function: Callable[[int, int], None]) -> None:
        self._function = function

    def module(self) -> tuple[str, str]:
        """The LLVM IR of all that it needs, and the name there of int32(result, error, int64 member, int64 operation)."""
        compiled: Any = numba.cfunc("void(int64, int64)", error_model="numpy", fastmath={"contract"})(self._function)
        return compiled.inspect_llvm(), compiled.native_name.removeprefix("cfunc.")


def operation_kernel(function: Callable[[int, int], None]) -> Operation:
    return Operation(function)
