"""Buddy allocation: contiguous runs whose sizes are powers of two (Knuth, The Art of Computer Programming 1, section 2.5).

A run of 2^k starts at a multiple of 2^k. To get a smaller one it is split in halves, the buddies; when both are free
again they become one. What a request rounds up to, and free runs too small for the next one, is the memory that such an
allocator wastes; the PagedAttention paper's contiguous baselines use it (arXiv 2309.06180, section 6.1).

    allocate(3) of 16    [ 0 1 2 3 | 4 5 6 7 | 8 9 10 11 12 13 14 15 ]
                           taken     free 2^2  free 2^3
"""

from __future__ import annotations

from bisect import insort

from cupaged.errors import InvariantError


class BuddyAllocator:
    """Places 0 .. size - 1, all free at first. A size that is no power of two is a sum of them, the largest first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_free = 0
        self._free: list[list[int]] = [[] for _ in range(size.bit_length())]
        """By exponent: where free runs of that size start, sorted."""
        self._exponent: dict[int, int] = {}
        """Where a free run starts -> its exponent."""
        self.free(range(size))

    @property
    def largest(self) -> int:
        """The longest run that there is when everything is free."""
        return 1 << (self.size.bit_length() - 1)

    def free_runs(self) -> list[range]:
        """The free runs in the order of their places."""
        return [range(start, start + (1 << exponent)) for start, exponent in sorted(self._exponent.items())]

    def allocate(self, count: int) -> range | None:
        """A run of `count` places rounded up to a power of two; None, and no change, where none is free.

        It is taken from the smallest free run that is large enough, of equals the first.
        """
        wanted = (count - 1).bit_length()
        found = next((exponent for exponent in range(wanted, len(self._free)) if self._free[exponent]), None)
        if found is None:
            return None
        start = self._free[found][0]
        self._take(start, found)
        for exponent in range(found - 1, wanted - 1, -1):
            self._put(start + (1 << exponent), exponent)
        self.num_free -= 1 << wanted
        return range(start, start + (1 << wanted))

    def extend(self, run: range, count: int) -> range | None:
        """The longer run of at least `count` places that a run becomes by taking its free buddies in; None, and no change,
        where one is not free. The run may lie anywhere in it."""
        start, exponent = run.start, len(run).bit_length() - 1
        taken = []
        while 1 << exponent < count:
            buddy = start ^ (1 << exponent)
            if self._exponent.get(buddy) != exponent:
                return None
            taken.append((buddy, exponent))
            start, exponent = min(start, buddy), exponent + 1
        for buddy, size in taken:
            self._take(buddy, size)
        self.num_free -= (1 << exponent) - len(run)
        return range(start, start + (1 << exponent))

    def free(self, run: range) -> None:
        """Give places back: a run that `allocate` gave, or any part of one. Raises InvariantError for one that is free."""
        if run.start < 0 or run.stop > self.size:
            raise InvariantError(f"places {run.start} .. {run.stop - 1} are given back, of 0 .. {self.size - 1}")
        start = run.start
        while start < run.stop:
            aligned = (start & -start).bit_length() - 1 if start else len(self._free)
            exponent = min(aligned, (run.stop - start).bit_length() - 1)
            self._check_taken(start, exponent)
            self._merge(start, exponent)
            start += 1 << exponent
        self.num_free += len(run)

    def _check_taken(self, start: int, exponent: int) -> None:
        """Raise InvariantError if a part of this aligned run is free: a free run starts inside, or holds all of it."""
        around = ((start >> k) << k for k in range(exponent, len(self._free)))
        inside = any(start <= s < start + (1 << exponent) for s in self._exponent) if exponent else start in self._exponent
        if inside or any(s + (1 << self._exponent[s]) > start for s in around if s in self._exponent):
            raise InvariantError(f"places {start} .. {start + (1 << exponent) - 1} are given back, but a part of them is free")

    def _merge(self, start: int, exponent: int) -> None:
        """Put a run among the free ones, made one with its buddy as long as that is free, too."""
        while self._exponent.get(start ^ (1 << exponent)) == exponent:
            buddy = start ^ (1 << exponent)
            self._take(buddy, exponent)
            start, exponent = min(start, buddy), exponent + 1
        self._put(start, exponent)

    def _take(self, start: int, exponent: int) -> None:
        self._free[exponent].remove(start)
        del self._exponent[start]

    def _put(self, start: int, exponent: int) -> None:
        insort(self._free[exponent], start)
        self._exponent[start] = exponent
