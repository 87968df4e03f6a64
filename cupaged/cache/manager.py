"""CacheManager: the only door to the paged KV cache.

It knows sequences by id and tokens by number; which physical blocks they live in is its business alone. "No room" is
the value None, corruption is an InvariantError.

    reserve   grow a sequence's table to cover so many tokens
    commit    a completed step wrote the KV of so many tokens
    release   the sequence gives its blocks back
    pin       a plan in flight reads or writes these blocks: none of them is reused before unpin
"""

from __future__ import annotations

import numpy as np

from cupaged.cache.block_pool import BlockPool
from cupaged.cache.block_table import BlockTable
from cupaged.errors import InvariantError
from cupaged.step_plan import IntArray


class CacheManager:
    """Bookkeeping for `num_blocks` blocks of `block_size` tokens each. Allocation is by demand, block by block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._tables: dict[int, BlockTable] = {}

    # ---- what there is

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_used(self) -> int:
        return self._pool.num_blocks - self._pool.num_free

    @property
    def slots_used(self) -> int:
        """Slots of live sequences that hold KV."""
        return sum(table.num_computed for table in self._tables.values())

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens takes."""
        return -(-num_tokens // self.block_size)

    # ---- a sequence's life

    def reserve(self, seq_id: int, num_tokens: int) -> IntArray | None:
        """Make the sequence's table cover `num_tokens`; the table as int32 [num_blocks], or None and no change if full.

        The first call for an id creates the table.
        """
        table = self._tables.get(seq_id)
        missing = self.blocks_for(num_tokens) - (table.num_blocks if table else 0)
        if missing > 0:
            blocks = self._pool.allocate(missing)
            if blocks is None:
                return None
            if table is None:
                table = self._tables[seq_id] = BlockTable()
            table.append(blocks)
        if table is None:
            raise InvariantError(f"sequence {seq_id} reserves room for no token")
        snapshot: IntArray = table.blocks.copy()
        return snapshot

    def commit(self, seq_id: int, num_computed: int) -> None:
        """A completed step wrote the KV of the sequence's first `num_computed` tokens."""
        table = self._tables[seq_id]
        if not table.num_computed <= num_computed <= table.num_blocks * self.block_size:
            raise InvariantError(
                f"sequence {seq_id} commits {num_computed} tokens after {table.num_computed}, with {table.num_blocks} blocks"
            )
        table.num_computed = num_computed

    def release(self, seq_id: int) -> None:
        """Forget the sequence; its blocks become free, pinned ones when their plan is applied. Unknown ids are fine."""
        table = self._tables.pop(seq_id, None)
        if table is not None:
            # pushed last to first, so that they are handed out again in the order they had here
            self._pool.release(table.blocks[::-1])

    # ---- plans in flight

    def pin(self, blocks: IntArray) -> None:
        """Keep one sequence's blocks from being reused until `unpin`, even if the sequence goes away."""
        self._pool.pin(blocks)

    def unpin(self, blocks: IntArray) -> None:
        self._pool.unpin(blocks)

    # ---- proof

    def check_invariants(self) -> None:
        """Raise InvariantError unless every count is explained: tables + pins = counts, free + held = all."""
        references = np.zeros(self.num_blocks, np.int32)
        for seq_id, table in self._tables.items():
            blocks = table.blocks
            if len(np.unique(blocks)) != len(blocks):
                raise InvariantError(f"sequence {seq_id} names a block twice")
            references[blocks] += 1
        self._pool.check_invariants(references)
