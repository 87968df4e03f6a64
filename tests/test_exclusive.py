"""Exclusive: one thread at a time, and SIGINT waits outside."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from cupaged.exclusive import Exclusive


@pytest.fixture
def pressed() -> Iterator[list[int]]:
    """The signals that reached the handler around the block."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGINT, before)


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_for_the_outermost_end(pressed: list[int]) -> None:
    exclusive, other = Exclusive(), Exclusive()
    with exclusive:
        with exclusive, other:
            press()
            press()
        assert pressed == []
    assert pressed == [signal.SIGINT]


def test_what_can_be_undone_is_interrupted_at_once(pressed: list[int]) -> None:
    exclusive = Exclusive()
    with exclusive:
        exclusive.interruptible = True
        press()
        assert pressed == [signal.SIGINT]
        exclusive.interruptible = False
    assert pressed == [signal.SIGINT]


def test_the_handler_is_put_back_after_an_error(pressed: list[int]) -> None:
    with pytest.raises(ZeroDivisionError), Exclusive():
        raise ZeroDivisionError
    press()
    assert pressed == [signal.SIGINT]


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Exclusive():
            press()
    finally:
        signal.signal(signal.SIGINT, before)


def test_waiting_for_another_thread_is_not_interrupted(pressed: list[int]) -> None:
    exclusive = Exclusive()
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with exclusive:
            exclusive.interruptible = True
            inside.set()
            leave.wait(10)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            threading.Event().wait(0.05)
            exclusive.interruptible = False

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(10)
    leave.set()
    with exclusive:
        assert pressed == []
    assert pressed == [signal.SIGINT]
