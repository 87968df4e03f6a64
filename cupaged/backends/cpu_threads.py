"""Team: a few threads that run one kernel together, each its own part. Leader: one that no interrupt reaches.

A kernel is called as kernel(part, parts, *arguments) and does the rows or tasks part, part + parts, ... of its work.
The calling thread is the first member. Handing over and waiting costs about 15 us, so the caller runs small work alone.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

Kernel = Callable[..., Any]


class _Run:
    """One call of a kernel by the whole team: who has finished, and with what error."""

    __slots__ = ("arguments", "errors", "finished", "kernel", "wake")

    def __init__(self, kernel: Kernel, arguments: tuple[Any, ...], size: int) -> None:
        self.kernel = kernel
        self.arguments = arguments
        self.finished = [False] * size
        self.errors: list[BaseException] = []
        self.wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def do(self, part: int) -> None:
        try:
            self.kernel(part, len(self.finished), *self.arguments)
        except BaseException as error:  # raised in the calling thread
            self.errors.append(error)
        self.finished[part] = True
        self.wake.put(None)


_Inbox = queue.SimpleQueue[_Run | None]


class Team:
    """`size` threads, the caller included. One caller at a time; the threads end with the object."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._inboxes: list[_Inbox] = [queue.SimpleQueue() for _ in range(size - 1)]
        for part, inbox in enumerate(self._inboxes, start=1):
            threading.Thread(target=_work, args=(part, inbox), name="cupaged-kernel", daemon=True).start()
        weakref.finalize(self, _stop, self._inboxes)

    def run(self, kernel: Kernel, *arguments: Any) -> None:
        """Run all parts; returns when every one is done, an interrupt (Ctrl-C) notwithstanding: it is raised then.

        Raises what a part raised.
        """
        run = _Run(kernel, arguments, self.size)
        for inbox in self._inboxes:
            inbox.put(run)
        run.do(0)
        while not all(run.finished):
            try:
                run.wake.get()
            except KeyboardInterrupt as interrupt:
                run.errors.append(interrupt)
        if run.errors:
            raise run.errors[0]


def _work(part: int, inbox: _Inbox) -> None:
    while (run := inbox.get()) is not None:
        run.do(part)
        del run  # an idle thread keeps no arrays alive


def _stop(inboxes: list[_Inbox]) -> None:
    for inbox in inboxes:
        inbox.put(None)


class Leader:
    """A thread of its own that carries out calls which an interrupt (Ctrl-C) must not tear.

    Python raises an interrupt in the main thread, between any two steps of its code. Members of a team who meet at a
    barrier would wait for ever for one who was interrupted on the way there; so the first member is this thread.
    """

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        threading.Thread(target=_carry_out, args=(self._inbox,), name="cupaged-leader", daemon=True).start()
        weakref.finalize(self, self._inbox.put, None)

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call and wait. Raises what the function raised, or an interrupt, once the function has ended."""
        call = _Call(function, arguments)
        try:
            self._inbox.put(call)
            call.ended.get()
        except BaseException:
            self._let_end()
            raise
        if call.error is not None:
            raise call.error

    def _let_end(self) -> None:
        """Wait for what has been handed over: calls are carried out in order, so for an empty one."""
        while True:
            try:
                last = _Call(lambda: None, ())
                self._inbox.put(last)
                last.ended.get()
                return
            except KeyboardInterrupt:  # one is on its way already
                continue


class _Call:
    """A call to carry out, and how it ended."""

    __slots__ = ("arguments", "ended", "error", "function")

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.arguments = arguments
        self.ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.error: BaseException | None = None

    def do(self) -> None:
        try:
            self.function(*self.arguments)
        except BaseException as error:  # raised in the calling thread
            self.error = error
        self.ended.put(None)


def _carry_out(inbox: queue.SimpleQueue[_Call | None]) -> None:
    while (call := inbox.get()) is not None:
        call.do()
        del call  # an idle thread keeps no arrays alive


def usable_cores() -> int:
    """The cores this process may use: its affinity, and under a Linux container's quota no more than that."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        if quota != "max":
            cores = min(cores, max(1, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # no cgroup v2 here
        pass
    return cores
