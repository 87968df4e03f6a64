"""Exclusive: a lock for bookkeeping that must be done wholly or not at all, Ctrl-C included."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Exclusive:
    """`with exclusive:` runs in one thread at a time (which may enter again), and an interrupt waits for its end.

    Python raises KeyboardInterrupt in the main thread, between any two instructions. While that thread is inside, SIGINT
    is only noted; on leaving it is raised again for the handler that was there before. Where `interruptible` is set,
    because the code within can be undone, that handler is called at once.
    """

    def __init__(self) -> None:
        self.interruptible = False
        self._lock = threading.RLock()
        self._before: list[Any] = []  # SIGINT's handlers, one for each time that the main thread has entered
        self._main_is_inside = False  # and no longer waits for another thread
        self._pressed = False

    def __enter__(self) -> None:
        main = threading.current_thread() is threading.main_thread()
        if main:
            self._before.append(signal.getsignal(signal.SIGINT))
            signal.signal(signal.SIGINT, self._press)
        self._lock.acquire()
        self._main_is_inside = main

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        main = threading.current_thread() is threading.main_thread()
        self._main_is_inside = main and len(self._before) > 1
        self._lock.release()
        if not main:
            return
        signal.signal(signal.SIGINT, self._before.pop() or signal.SIG_DFL)
        pressed, self._pressed = self._pressed, False
        if pressed:
            signal.raise_signal(signal.SIGINT)

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self.interruptible and self._main_is_inside and callable(self._before[0]):
            self._before[0](number, frame)
        else:
            self._pressed = True
