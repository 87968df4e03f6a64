"""BlockPool: which physical blocks are free, and how many holders each of the others has.

A count is the number of block tables that name the block plus the number of plans in flight that pin it. Nobody holds
a block with a count of zero: it is on the free list, or it is kept because its content may be of use (the manager
decides which). The free list is a stack: the block given back last is handed out first, while its memory is still
warm in the processor's caches.

    _stack   [ 9 | 8 | 5 | 2 | . | . ]      entries below _num_free are free, the top is handed out next
                           ^ _num_free
"""

from __future__ import annotations

import numpy as np

from cupaged.errors import InvariantError
from cupaged.step_plan import IntArray


class BlockPool:
    """A fixed number of blocks, all free at first; block 0 is handed out first. Block arrays are int32 and distinct."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.counts = np.zeros(num_blocks, np.int32)
        """int32 [num_blocks], to be read only."""
        self.pins = np.zeros(num_blocks, np.int32)
        """int32 [num_blocks]: the part of `counts` that plans hold; to be read only."""
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks
        self.num_held = 0
        """Blocks with a count above zero."""

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
        if count == 1:  # by far the most frequent, and several times faster so
            self.counts[blocks[0]] = 1
        else:
            self.counts[blocks] = 1
        self.num_held += count
        return blocks

    def hold(self, blocks: IntArray) -> None:
        """One more table names these blocks (which are not on the free list)."""
        self.num_held += int(np.count_nonzero(self.counts[blocks] == 0))
        self.counts[blocks] += 1

    def release(self, blocks: IntArray) -> IntArray:
        """Give up one hold on each block; those that nobody holds any more. They are not free yet: see `free`.

        Raises InvariantError for a block that nobody held.
        """
        counts = self.counts[blocks] - 1
        if counts.size and counts.min() < 0:
            raise InvariantError(f"block {blocks[counts.argmin()]} was released more often than it was held")
        self.counts[blocks] = counts
        idle: IntArray = blocks[counts == 0]
        self.num_held -= len(idle)
        return idle

    def free(self, blocks: IntArray) -> None:
        """Put blocks that nobody holds on the free list; the last of them is handed out first."""
        if self.counts[blocks].any():
            raise InvariantError(f"block {blocks[self.counts[blocks].argmax()]} is freed while somebody holds it")
        self._stack[self._num_free : self._num_free + len(blocks)] = blocks
        self._num_free += len(blocks)

    def pin(self, blocks: IntArray) -> None:
        """Hold the blocks for a plan in flight, so that none is handed out before the plan is applied."""
        counts = self.counts[blocks]
        if counts.size and counts.min() < 1:
            raise InvariantError(f"block {blocks[counts.argmin()]} is held by nobody and cannot be pinned")
        self.counts[blocks] = counts + 1
        self.pins[blocks] += 1

    def unpin(self, blocks: IntArray) -> IntArray:
        """End one `pin`; those blocks that nobody holds any more."""
        self.pins[blocks] -= 1
        return self.release(blocks)

    def check_invariants(self, table_references: IntArray, kept: IntArray) -> None:
        """Raise InvariantError unless counts, pins and the free list agree with what the manager knows.

        table_references int32 [num_blocks]: tables that name each block; kept bool [num_blocks]: not on the free list
        although nobody holds it.
        """
        free = self._stack[: self._num_free]
        if len(np.unique(free)) != self._num_free:
            raise InvariantError("a block is on the free list twice")
        if self.pins.size and self.pins.min() < 0:
            raise InvariantError(f"block {self.pins.argmin()} was unpinned more often than it was pinned")
        wrong = np.flatnonzero(self.counts != table_references + self.pins)
        if wrong.size:
            b = wrong[0]
            raise InvariantError(
                f"block {b} has a count of {self.counts[b]}, but {table_references[b]} tables and {self.pins[b]} pins hold it"
            )
        if self.num_held != np.count_nonzero(self.counts):
            raise InvariantError(f"{self.num_held} blocks are said to be held, {np.count_nonzero(self.counts)} are")
        is_free = np.zeros(self.num_blocks, bool)
        is_free[free] = True
        if not np.array_equal(is_free, (self.counts == 0) & ~kept.astype(bool)):
            raise InvariantError("the free list is not the set of blocks that nobody holds or keeps")
