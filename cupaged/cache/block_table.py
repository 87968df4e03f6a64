"""BlockTable: one sequence's map from logical to physical blocks.

    position p  ->  logical block p // block_size, offset p % block_size
                ->  slot = blocks[p // block_size] * block_size + p % block_size
"""

from __future__ import annotations

import numpy as np

from cupaged.step_plan import IntArray


class BlockTable:
    """The physical blocks of a sequence in logical order; the first `num_computed` slots hold KV.

    The first `num_released` entries are -1: their blocks lie outside the sliding window and were given back.
    """

    __slots__ = ("_array", "num_blocks", "num_computed", "num_published", "num_released")

    def __init__(self, blocks: IntArray | None = None, num_computed: int = 0) -> None:
        self.num_blocks = 0 if blocks is None else len(blocks)
        self._array = np.empty(self.num_blocks + 4, np.int32)
        if blocks is not None:
            self._array[: self.num_blocks] = blocks
        self.num_computed = num_computed
        self.num_published = 0
        self.num_released = 0 if blocks is None else int(np.count_nonzero(blocks < 0))

    @property
    def blocks(self) -> IntArray:
        """int32 [num_blocks]: a view, to be read or written in place before the next `append`."""
        return self._array[: self.num_blocks]

    @property
    def held(self) -> IntArray:
        """The blocks that are not released; a view."""
        return self._array[self.num_released : self.num_blocks]

    def append(self, blocks: IntArray) -> None:
        needed = self.num_blocks + len(blocks)
        if needed > len(self._array):
            grown = np.empty(max(needed, 2 * len(self._array)), np.int32)
            grown[: self.num_blocks] = self.blocks
            self._array = grown
        self._array[self.num_blocks : needed] = blocks
        self.num_blocks = needed
