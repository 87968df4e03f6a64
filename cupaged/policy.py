"""Who goes first and who gives way. A policy only compares; the scheduler acts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from cupaged.sequence import Sequence


class Policy(Protocol):
    def key(self, sequence: Sequence) -> tuple[int, ...]:
        """Sort key of the queue: the smallest is served first."""
        ...

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """The running sequence that gives its blocks up when the pool is full."""
        ...


class FirstComeFirstServed:
    """The earliest is served first and the latest gives way, so the earliest always finishes: nobody starves."""

    def key(self, sequence: Sequence) -> tuple[int, ...]:
        return (sequence.arrival,)

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        return max(running, key=self.key)
