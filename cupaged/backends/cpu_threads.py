"""Crew: a few threads that run programs together (cpu_program.py), the caller being the first of them.

Between two programs the others sleep in native code, and the call that wakes them works, too, and returns when all have done
the last operation. No Python runs meanwhile in any of them, so an interrupt (Ctrl-C) cannot keep one from the barrier where
the others wait; it is raised when the call has returned.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.backends import cpu_code
from cupaged.backends.cpu_cores import own_cores
from cupaged.backends.cpu_program import COUNT, LINE, PART, PARTS, SCRATCH, SYNC, TABLE, Words, aligned
from cupaged.errors import ConfigError

ARRIVED, GENERATION = 0, LINE
"""The barrier: how many are there, and how often it was passed. Places in bytes in the shared memory."""

CALLS, CALL_TABLE, CALL_COUNT, CALL_STOPS = (2 * LINE + 8 * i for i in range(4))
"""How many programs were started, the last one's table and number of operations, and whether the threads shall end instead."""

LOCK, UNLOCK, WAIT, WAKE_ALL, YIELD = (3 * LINE + 8 * i for i in range(5))
"""The addresses of the system's functions."""

MUTEX, CONDITION = 4 * LINE, 6 * LINE

TAKEN = 8 * LINE
"""Of every member a line: how many tasks of its share are taken, in this operation and, the other word, in the next one."""

_PAGE = 4096


class Crew:
    """`size` threads, the caller included. One caller at a time; the threads end with the object. Raises ConfigError where so
    many cannot be started.

    pin     each computes on a core of its own; the caller is free again after every call. Raises ConfigError where that
            cannot be.
    """

    def __init__(self, size: int, *, pin: bool = False) -> None:
        self.size = size
        self._cores = own_cores(size) if pin else None
        self._run, self._lead = cpu_code.function("run"), cpu_code.function("lead")
        self._call = np.zeros(2, np.int64)
        self._scratch: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._start(1 << 20)

    def _start(self, scratch: int) -> None:
        """Begin with new threads."""
        self._process = os.getpid()
        sync = _new_sync(self.size)
        self._members = aligned((self.size, LINE // 8), np.int64)
        self._members[:] = 0
        self._members[:, PART] = range(self.size)
        self._members[:, PARTS] = self.size
        self._members[:, SYNC] = sync.ctypes.data
        self._alone = self._members[0].copy()
        self._alone[PARTS] = 1
        self._share_scratch(scratch)
        # at the end of the process it is too late to look for a function
        serve, dismiss = cpu_code.function("serve"), cpu_code.function("dismiss")
        end = weakref.finalize(self, _dismiss, dismiss, self._members, sync, self._process)
        try:
            for part in range(1, self.size):
                arguments = serve, self._members, sync, part, None if self._cores is None else self._cores[part]
                threading.Thread(target=_serve, args=arguments, name="cupaged-kernel", daemon=True).start()
        except RuntimeError as error:
            end()
            raise ConfigError(f"no {self.size} threads can be started here ({error}): take fewer, with the option threads") from None

    def reserve(self, scratch: int) -> None:
        """Give every member at least so many bytes of scratch memory."""
        if scratch * self.size > self._scratch.size:
            self._share_scratch(scratch)

    def _share_scratch(self, scratch: int) -> None:
        share = -(-scratch // _PAGE) * _PAGE
        self._scratch = aligned((self.size * share,), np.uint8)
        self._members[:, SCRATCH] = self._scratch.ctypes.data + share * np.arange(self.size)
        self._alone[SCRATCH] = self._scratch.ctypes.data

    def run(self, table: Words, *, alone: bool = False) -> None:
        """Run all operations of a table, in order; `alone`: by the calling thread, for work too small to share."""
        if self._process != os.getpid():  # a copy of the process that had the threads
            self._start(self._scratch.size // self.size)
        self._call[TABLE], self._call[COUNT] = table.ctypes.data, len(table)
        function, member = (self._run, self._alone) if alone or self.size == 1 else (self._lead, self._members)
        with contextlib.nullcontext() if alone or self._cores is None else _on_core(self._cores[0]):
            function(member.ctypes.data, self._call.ctypes.data)


@contextlib.contextmanager
def _on_core(core: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _serve(serve: cpu_code.Function, members: Words, sync: Any, part: int, core: int | None) -> None:
    """What a thread does till it is dismissed; the arrays live as long."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    serve(members[part].ctypes.data, 0)


def _dismiss(dismiss: cpu_code.Function, members: Words, sync: Any, process: int) -> None:
    if process == os.getpid():
        dismiss(members.ctypes.data, 0)


def _new_sync(size: int) -> npt.NDArray[np.uint8]:
    """The memory that so many members share."""
    sync = aligned((TAKEN + LINE * size,), np.uint8)
    sync[:] = 0
    system: Any
    if sys.platform == "win32":  # a lock and a condition there are zeros when they are new
        system = ctypes.windll.kernel32
        names = "AcquireSRWLockExclusive", "ReleaseSRWLockExclusive", "SleepConditionVariableSRW", "WakeAllConditionVariable", "SwitchToThread"
    else:
        system = ctypes.CDLL(None)
        names = "pthread_mutex_lock", "pthread_mutex_unlock", "pthread_cond_wait", "pthread_cond_broadcast", "sched_yield"
        system.pthread_mutex_init(ctypes.c_void_p(sync.ctypes.data + MUTEX), None)
        system.pthread_cond_init(ctypes.c_void_p(sync.ctypes.data + CONDITION), None)
    functions = [ctypes.cast(getattr(system, name), ctypes.c_void_p).value or 0 for name in names]
    sync[LOCK : LOCK + 8 * len(names)].view(np.int64)[:] = functions
    return sync
