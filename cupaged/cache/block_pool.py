"""BlockPool: which physical blocks are free, and how many holders each of the others has.

A count is the number of block tables that name the block plus the number of plans in flight that pin it. A block is
free exactly when its count is zero. The free list is a stack: the block released last is handed out first, while its
memory is still warm in the processor's caches.

    _stack   [ 9 | 8 | 5 | 2 | . | . ]      entries below _num_free are free, the top is handed out next
                           ^ _num_free
"""

from __future__ import annotations

import numpy as np

from cupaged.errors import InvariantError
from cupaged.step_plan import IntArray


class BlockPool:
    """A fixed number of blocks, all free at first; block 0 is handed out first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._counts = np.zeros(num_blocks, np.int32)
        self._pins = np.zeros(num_blocks, np.int32)
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate(self, count: int) -> IntArray | None:
        """Take `count` free blocks, each with a count of one; None, and no change, where there are fewer."""
        if count > self._num_free:
            return None
        first = self._num_free - count
        blocks: IntArray = self._stack[first : self._num_free][::-1].copy()
        self._num_free = first
        self._counts[blocks] = 1
        return blocks

    def release(self, blocks: IntArray) -> None:
        """Give up one hold on each of the (distinct) blocks; those without another holder become free.

        Raises InvariantError for a block that nobody holds.
        """
        counts = self._counts[blocks] - 1
        if counts.size and counts.min() < 0:
            raise InvariantError(f"block {blocks[counts.argmin()]} was released more often than it was held")
        self._counts[blocks] = counts
        freed = blocks[counts == 0]
        self._stack[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)

    def pin(self, blocks: IntArray) -> None:
        """Hold the (distinct) blocks for a plan in flight, so that none is handed out before the plan is applied."""
        counts = self._counts[blocks]
        if counts.size and counts.min() < 1:
            raise InvariantError(f"block {blocks[counts.argmin()]} is free and cannot be pinned")
        self._counts[blocks] = counts + 1
        self._pins[blocks] += 1

    def unpin(self, blocks: IntArray) -> None:
        """End one `pin`; a block that its last table gave up meanwhile becomes free now."""
        self._pins[blocks] -= 1
        self.release(blocks)

    def check_invariants(self, table_references: IntArray) -> None:
        """Raise InvariantError unless counts, pins, the free list and int32 [num_blocks] table references agree."""
        free = self._stack[: self._num_free]
        if len(np.unique(free)) != self._num_free:
            raise InvariantError("a block is on the free list twice")
        if self._pins.size and self._pins.min() < 0:
            raise InvariantError(f"block {self._pins.argmin()} was unpinned more often than it was pinned")
        wrong = np.flatnonzero(self._counts != table_references + self._pins)
        if wrong.size:
            b = wrong[0]
            raise InvariantError(
                f"block {b} has a count of {self._counts[b]}, but {table_references[b]} tables and {self._pins[b]} pins hold it"
            )
        is_free = np.zeros(self.num_blocks, bool)
        is_free[free] = True
        if not np.array_equal(is_free, self._counts == 0):
            raise InvariantError("the free list is not the set of blocks without holders")
