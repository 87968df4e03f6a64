"""Arrays for kernels: at the end of their own pages, between two that cannot be touched, and poisoned when empty.

The poison is one 16-bit pattern, 0x7FA5 repeated: a NaN as float32, float16 and bfloat16, and a wild int32. The checked
build calls a load of it an uninitialised read. Single-byte elements have no pattern to spare, so their arrays carry a
mark for each byte, which kernels keep; a host that writes such an array says so with `wrote`. (A host's byte that does
not look like poison is known to be written all the same. A 16-bit integer 32677 is taken for poison.)
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.errors import BackendError

POISON = 0x7FA5

_marks: dict[int, npt.NDArray[np.uint8]] = {}  # address of an array of single bytes -> 1 where it was written


def empty(shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """An uninitialised array in guarded memory. An access within 15 bytes past its end may go unnoticed by the guard."""
    return _allocate(shape, np.dtype(dtype), poisoned=True)


def array(values: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
    """`values` copied to guarded memory."""
    source = np.asarray(values, dtype)
    copy = _allocate(source.shape, source.dtype, poisoned=False)
    copy[...] = source
    return copy


def wrote(view: npt.NDArray[Any]) -> None:
    """The host has written all of `view`: what a kernel reads of it is initialised. Only single-byte elements need it."""
    marks = marks_of(view)
    if marks is not None:
        marks[:] = 1


def forget(view: npt.NDArray[Any]) -> None:
    """As if nobody had written any of `view`, contiguous."""
    marks = marks_of(view)
    if marks is not None:
        marks[:] = 0
    elif view.itemsize > 1:
        view.view(np.uint16)[:] = POISON


def copy_blocks(source: npt.NDArray[Any], target: npt.NDArray[Any], pairs: npt.NDArray[np.int32]) -> None:
    """target[:, b] = source[:, a] for every pair (a, b), in contiguous arrays of one type; what nobody wrote stays so."""
    target[:, pairs[:, 1]] = source[:, pairs[:, 0]]
    old, new = marks_of(source), marks_of(target)
    if new is not None:
        new.reshape(target.shape)[:, pairs[:, 1]] = 1 if old is None else old.reshape(source.shape)[:, pairs[:, 0]]


def never_written(view: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which elements of a contiguous array from `empty` nobody wrote, in its shape."""
    marks = marks_of(view)
    if marks is not None:
        unwritten: npt.NDArray[np.bool_] = (marks == 0).reshape(view.shape)
    elif view.itemsize == 1 or not view.size:
        unwritten = np.zeros(view.shape, np.bool_)
    else:
        words = view.reshape(-1).view(np.uint16).reshape(view.size, -1)
        unwritten = (words == POISON).all(axis=1).reshape(view.shape)
    return unwritten


def marks_of(view: npt.NDArray[Any]) -> npt.NDArray[np.uint8] | None:
    """The marks of the bytes from `view`'s first to its last; None for one that is not tracked."""
    if view.itemsize > 1 or not view.size:
        return None
    begin, end = np.lib.array_utils.byte_bounds(view)
    for address, marks in _marks.items():
        if address <= begin and end <= address + len(marks):
            return marks[begin - address : end - address]
    return None


def _allocate(shape: int | Sequence[int], dtype: np.dtype[Any], poisoned: bool) -> npt.NDArray[Any]:
    size = int(np.prod(shape)) * dtype.itemsize
    aligned, page = -(-size // 16) * 16, mmap.PAGESIZE
    room = -(-aligned // page) * page
    memory = np.frombuffer(mmap.mmap(-1, room + 2 * page), np.uint8)
    address = memory.ctypes.data
    for guard in (address, address + page + room):
        _forbid(guard, page)
    start = page + room - aligned
    data = memory[start : start + size]
    if poisoned:
        memory[start : page + room].view(np.uint16)[:] = POISON
    if dtype.itemsize == 1:
        _marks[address + start] = np.full(size, not poisoned, np.uint8)
        weakref.finalize(memory, _marks.pop, address + start, None)
    return data.view(dtype).reshape(shape)


@lru_cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def _forbid(address: int, size: int) -> None:
    if _libc().mprotect(address, size, 0):
        raise BackendError(f"a guard page cannot be protected: {os.strerror(ctypes.get_errno())}")
