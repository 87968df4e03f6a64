"""BlockTable: one sequence's map from logical to physical blocks.

    position p  ->  logical block p // block_size, offset p % block_size
                ->  slot = blocks[p // block_size] * block_size + p % block_size
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cupaged.step_plan import IntArray


class BlockTable:
    """The physical blocks of a sequence in logical order; the first `num_computed` slots hold KV.

    The first `num_published` blocks are in the prefix tree. The first `num_released` entries are -1: their blocks lie
    outside the sliding window and were given back.
    """

    __slots__ = ("_array", "_copy", "num_blocks", "num_computed", "num_published", "num_released")

    def __init__(self, blocks: IntArray | None = None, num_computed: int = 0) -> None:
        self.num_blocks = 0 if blocks is None else len(blocks)
        self._array = np.empty(self.num_blocks + 4, np.int32)
        if blocks is not None:
            self._array[: self.num_blocks] = blocks
        self._copy: IntArray | None = None
        self.num_computed = num_computed
        self.num_published = 0
        self.num_released = 0 if blocks is None else int(np.count_nonzero(blocks < 0))

    def __getitem__(self, index: int) -> int:
        return self._array.item(index)

    @property
    def blocks(self) -> IntArray:
        """int32 [num_blocks]: a view, to be read before the next change."""
        return self._array[: self.num_blocks]

    @property
    def held(self) -> IntArray:
        """The blocks that are not released; a view."""
        return self._array[self.num_released : self.num_blocks]

    def snapshot(self) -> IntArray:
        """int32 [num_blocks]: the blocks as they are now, to be read only; the same array until they change."""
        if self._copy is None:
            self._copy = self.blocks.copy()
            self._copy.flags.writeable = False
        return self._copy

    def append(self, blocks: IntArray) -> None:
        needed = self.num_blocks + len(blocks)
        if needed > len(self._array):
            grown = np.empty(max(needed, 2 * len(self._array)), np.int32)
            grown[: self.num_blocks] = self.blocks
            self._array = grown
        self._array[self.num_blocks : needed] = blocks
        self.num_blocks = needed
        self._copy = None

    def replace(self, places: int | slice | npt.NDArray[np.integer], blocks: int | IntArray) -> None:
        """Put other blocks in these places of the table."""
        self.blocks[places] = blocks
        self._copy = None
