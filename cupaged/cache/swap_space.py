"""SwapSpace: host memory for the KV of preempted requests, block by block.

A request's sequences go out together and come back together, and a block that several of them share goes once. The
space knows where each sequence's blocks lie; the copies themselves are part of a plan, and their host blocks are neither
read nor reused before that plan has run: if it is cancelled, what should have gone out is lost.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cupaged.cache.block_pool import BlockPool
from cupaged.errors import InvariantError
from cupaged.step_plan import IntArray


class Swapped(NamedTuple):
    """A sequence in host memory: its blocks there, int32, and how many of its tokens they hold."""

    blocks: IntArray
    num_computed: int


class SwapSpace:
    """`num_blocks` blocks of host memory."""

    def __init__(self, num_blocks: int) -> None:
        self._pool = BlockPool(num_blocks)
        self._sequences: dict[int, Swapped] = {}
        self._awaited = np.zeros(num_blocks, np.bool_)  # to be written by a plan that has not run yet

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._sequences

    @property
    def num_used(self) -> int:
        return self._pool.num_held

    def blocks_of(self, seq_ids: list[int]) -> IntArray:
        """The distinct host blocks of these sequences, int32."""
        held = [self._sequences[i].blocks for i in seq_ids if i in self._sequences]
        return np.unique(np.concatenate(held)) if held else np.empty(0, np.int32)

    def has_got(self, host_blocks: IntArray) -> bool:
        """Whether what went out to these blocks is there."""
        return not self._awaited[host_blocks].any()

    def take(self, tables: dict[int, tuple[IntArray, int]]) -> IntArray | None:
        """Make room for sequences: seq_id -> (device blocks, computed tokens). The copies to make, int32 [n, 2]
        (device, host), with their host blocks pinned; None, and no change, where there is no room."""
        device = np.unique(np.concatenate([blocks for blocks, _ in tables.values()]))
        host = self._pool.allocate(len(device))
        if host is None:
            return None
        for seq_id, (blocks, num_computed) in tables.items():
            own = host[np.searchsorted(device, blocks)]
            self._pool.hold(own)
            self._sequences[seq_id] = Swapped(own, num_computed)
        self._awaited[host] = True
        self._pool.pin(host)
        self._pool.release(host)  # the one hold of `allocate`: tables and the pin hold them now
        return np.stack([device, host], axis=1)

    def give(self, seq_ids: list[int]) -> dict[int, Swapped]:
        """Take sequences out; their host blocks stay pinned until `done`, because a plan is to read them."""
        self._pool.pin(self.blocks_of(seq_ids))
        return {seq_id: self.drop(seq_id) for seq_id in seq_ids if seq_id in self._sequences}

    def drop(self, seq_id: int) -> Swapped:
        """Forget a sequence."""
        swapped = self._sequences.pop(seq_id)
        self._pool.free(self._pool.release(swapped.blocks))
        return swapped

    def done(self, host_blocks: IntArray) -> None:
        """The plan that wrote or read these (distinct) host blocks has run."""
        self._awaited[host_blocks] = False
        self._pool.free(self._pool.unpin(host_blocks))

    def lost(self, host_blocks: IntArray) -> None:
        """The plan that should have written these blocks was cancelled: drop the sequences that lie there."""
        for seq_id in [s for s, swapped in self._sequences.items() if np.isin(swapped.blocks, host_blocks).any()]:
            self.drop(seq_id)
        self.done(host_blocks)

    def check_invariants(self) -> None:
        """Raise InvariantError unless every count is explained."""
        references = np.zeros(self._pool.num_blocks, np.int32)
        for swapped in self._sequences.values():
            references[swapped.blocks] += 1
        if (self._awaited & (self._pool.pins == 0)).any():
            raise InvariantError("a host block waits for a plan that does not write it")
        self._pool.check_invariants(references, np.zeros(self._pool.num_blocks, np.int32))
