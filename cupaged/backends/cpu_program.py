"""Program: the operations of a forward pass as a table of numbers, run by a whole Team in one call without the GIL.

An operation is a row of int64 words: the address of its kernel, the address of the number of rows it is for, then what
the kernel wants: addresses, sizes, strides in bytes.

    word    0        1                 2 ..
            kernel   address of rows   the kernel's own

Every member of the team runs the whole table; in an operation it takes tasks from a common counter until none is left,
and waits for the others at a barrier before the next one. So a member that was late, because another program had its
core, does fewer tasks. A kernel cannot raise: whatever it is given has been checked before.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from typing import Any

import llvmlite.binding
import numpy as np
import numpy.typing as npt
from numba import types

from cupaged.backends.cpu_ir import atomic_add, atomic_load, atomic_store, call_kernel, spin_hint, word
from cupaged.backends.cpu_jit import kernel
from cupaged.backends.cpu_threads import Leader, Team

WORDS = 24
"""Words of an operation."""

KERNEL, ROWS, FIRST = 0, 1, 2
"""Words that all operations share, and the first of a kernel's own."""

PART, PARTS, SYNC, SCRATCH, CURSOR = range(5)
"""Words of a member: its number, how many there are, the addresses of the barrier and of its own scratch memory, and
cpu_prefetch's place."""

_LARGE = 4 << 20
"""Bytes from which NumPy would ask for huge pages, which a machine with scattered memory takes a second a GB to put together."""

_LINE = 64
_ARRIVED, _GENERATION, _NEXT_TASK = 0, _LINE, 2 * _LINE
_PATIENCE = 2000
"""Looks at the barrier before a member offers its core to others; about 20 us."""

Words = npt.NDArray[np.int64]


def _name_yield() -> str:
    """Make the system's "let others run" known to compiled code."""
    function: Any
    if sys.platform == "win32":
        function = ctypes.windll.kernel32.SwitchToThread
    else:
        function = ctypes.CDLL(None).sched_yield
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    llvmlite.binding.add_symbol("cupaged_yield", address)
    return "cupaged_yield"


_yield_core = types.ExternalFunction(_name_yield(), types.int32())


@kernel
def take_task(team: int) -> int:
    """The next task of the operation that the team is at: 0, 1, ..."""
    return atomic_add(word(team, SYNC) + _NEXT_TASK, 1)


@kernel
def _wait_for_all(team: int) -> None:
    sync, parts = word(team, SYNC), word(team, PARTS)
    generation = atomic_load(sync + _GENERATION)
    if atomic_add(sync + _ARRIVED, 1) == parts - 1:
        atomic_store(sync + _ARRIVED, 0)
        atomic_store(sync + _NEXT_TASK, 0)
        atomic_add(sync + _GENERATION, 1)
        return
    looks = 0
    while atomic_load(sync + _GENERATION) == generation:
        spin_hint()
        looks += 1
        if looks > _PATIENCE:
            _yield_core()


@kernel
def _run(part: int, parts: int, members: Words, table: Words) -> None:
    team = members.ctypes.data + part * members.strides[0]
    for i in range(table.shape[0]):
        operation = table.ctypes.data + i * table.strides[0]
        call_kernel(word(operation, KERNEL), team, operation)
        _wait_for_all(team)


class Crew:
    """A Team with what its members need to run programs together: a barrier and scratch memory each."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self._leader = Leader() if team.size > 1 else None
        self._scratch = np.empty(0, np.uint8)
        self._sync = aligned((3 * _LINE // 8,), np.int64)
        self._sync[:] = 0
        self._members = np.zeros((team.size, 8), np.int64)
        self._members[:, PART] = range(team.size)
        self._members[:, PARTS] = team.size
        self._members[:, SYNC] = self._sync.ctypes.data
        self._alone = self._members[:1].copy()
        self._alone[0, PARTS] = 1
        self.reserve(1 << 20)

    def reserve(self, scratch: int) -> None:
        """Give every member at least so many bytes of scratch memory."""
        if scratch * self.team.size <= self._scratch.size:
            return
        self._scratch = aligned((self.team.size * _round_up(scratch),), np.uint8)
        share = self._scratch.size // self.team.size
        self._members[:, SCRATCH] = [self._scratch.ctypes.data + i * share for i in range(self.team.size)]
        self._alone[0, SCRATCH] = self._scratch.ctypes.data

    def run(self, table: Words, *, alone: bool = False) -> None:
        """Run all operations of a table, in order; `alone`: by the calling thread, for work too small to share."""
        if alone or self._leader is None:
            _run(0, 1, self._alone, table)
        else:
            self._leader.call(self.team.run, _run, self._members, table)


def operation(kernel_address: int, rows: Words, words: Sequence[int]) -> Words:
    """One row of a table; `rows` int64 [1] is read when it runs."""
    record = np.zeros(WORDS, np.int64)
    record[KERNEL], record[ROWS] = kernel_address, rows.ctypes.data
    record[FIRST : FIRST + len(words)] = words
    return record


def float_word(value: float) -> int:
    """A float32 as the word of an operation; cpu_ir.float_at reads it."""
    return int(np.float32(value).view(np.uint32))


def aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An uninitialised array that begins at a cache line. Raises MemoryError."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = _pages(size) if size >= _LARGE else np.empty(size + _LINE, np.uint8)
    start = -raw.ctypes.data % _LINE
    return raw[start : start + size].view(dtype).reshape(shape)


def _pages(size: int) -> npt.NDArray[np.uint8]:
    """Memory that the system gives page by page, when it is first touched."""
    private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    try:
        return np.frombuffer(mmap.mmap(-1, size, **private), np.uint8)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{size} bytes: {error}") from error


def _round_up(size: int) -> int:
    return -(-size // 4096) * 4096
