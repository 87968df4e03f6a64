"""Program: the operations of a forward pass as a table of numbers, run by a whole crew of threads in one call without the GIL.

An operation is a row of int64 words: the address of its function, the address of the number of rows it is for, then what
the function wants: addresses, sizes, strides in bytes.

    word    0          1                 2 ..
            function   address of rows   the operation's own

Every member of the crew runs the whole table (cpu_kernels/program.py). Of an operation's tasks each has an equal share; when
that is done it takes tasks of the others' till none is left, and waits for them at a barrier before the next operation. So a
member that was late, because another program had its core, does fewer tasks; and as long as none is, the rows that it works
on are the same ones from operation to operation, and lie in its own core's caches. An operation cannot raise: whatever it is given has been checked before.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

WORDS = 24
"""Words of an operation."""

KERNEL, ROWS, FIRST = 0, 1, 2
"""Words that all operations share, and the first of one's own."""

PART, PARTS, SYNC, SCRATCH, CURSOR, TURN = range(6)
"""Words of a member: its number, how many there are, the addresses of what they meet at and of its own scratch memory,
cpu_prefetch's place, and which of two counters of tasks is used in this operation."""

TABLE, COUNT = range(2)
"""Words of a call: the address of a table, and its number of operations."""

_LARGE = 4 << 20
"""Bytes from which NumPy would ask for huge pages, which a machine with scattered memory takes a second a GB to put together."""

LINE = 64
"""Bytes of a cache line."""

Words = npt.NDArray[np.int64]


def operation(function: int, rows: Words, words: Sequence[int]) -> Words:
    """One row of a table; `rows` int64 [1] is read when it runs."""
    record = np.zeros(WORDS, np.int64)
    record[KERNEL], record[ROWS] = function, rows.ctypes.data
    record[FIRST : FIRST + len(words)] = words
    return record


def numbers(words: Sequence[Any]) -> list[int]:
    """Words of which arrays stand for their addresses."""
    return [word.ctypes.data if isinstance(word, np.ndarray) else word for word in words]


def float_word(value: float) -> int:
    """A float32 as the word of an operation."""
    return int(np.float32(value).view(np.uint32))


def aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An uninitialised array that begins at a cache line. Raises MemoryError."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = _pages(size) if size >= _LARGE else np.empty(size + LINE, np.uint8)
    start = -raw.ctypes.data % LINE
    return raw[start : start + size].view(dtype).reshape(shape)


def _pages(size: int) -> npt.NDArray[np.uint8]:
    """Memory that the system gives page by page, when it is first touched."""
    private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    try:
        return np.frombuffer(mmap.mmap(-1, size, **private), np.uint8)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{size} bytes: {error}") from error
