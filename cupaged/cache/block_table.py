"""BlockTable: one sequence's map from logical to physical blocks.

    position p  ->  logical block p // block_size, offset p % block_size
                ->  slot = blocks[p // block_size] * block_size + p % block_size
"""

from __future__ import annotations

import numpy as np

from cupaged.step_plan import IntArray


class BlockTable:
    """The physical blocks of a sequence in logical order, and how many of their slots hold KV."""

    __slots__ = ("_array", "num_blocks", "num_computed")

    def __init__(self) -> None:
        self._array = np.empty(4, np.int32)
        self.num_blocks = 0
        self.num_computed = 0

    @property
    def blocks(self) -> IntArray:
        """int32 [num_blocks], a view that the next `append` may leave behind."""
        return self._array[: self.num_blocks]

    def append(self, blocks: IntArray) -> None:
        needed = self.num_blocks + len(blocks)
        if needed > len(self._array):
            grown = np.empty(max(needed, 2 * len(self._array)), np.int32)
            grown[: self.num_blocks] = self.blocks
            self._array = grown
        self._array[self.num_blocks : needed] = blocks
        self.num_blocks = needed
