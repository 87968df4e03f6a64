"""ContiguousCache: what a KV cache without pages does, behind the CacheManager's own door, to be compared with.

A sequence lives in one run of neighbouring blocks, which a buddy allocator gives (see buddy.py). How long the run is, is
the reservation:

    max      the longest sequence of the model, whatever is asked (FasterTransformer; Orca as it was published)
    pow2     the prompt, and the answer's true length rounded up to a power of two
    oracle   the true length: what nobody can know
    demand   what there is now; when it is full, twice as much: its buddy, or elsewhere, and its content is copied

The first three are the baselines of the PagedAttention paper (arXiv 2309.06180, section 6.1): what runs always ends. The
last reserves nothing, so it preempts. Blocks are the unit of addresses only, so that the same scheduler, runner and
kernels work on it. Nothing is shared: no prefix cache, and one sequence a request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain

import numpy as np

from cupaged.cache.block_pool import BlockPool
from cupaged.cache.block_table import BlockTable
from cupaged.cache.buddy import BuddyAllocator
from cupaged.cache.manager import CacheManager
from cupaged.cache.states import MemoryStates
from cupaged.errors import ConfigError, InvariantError, RequestError, shown
from cupaged.step_plan import IntArray


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


Reservation = Callable[[int, int, int], int]

RESERVATIONS: dict[str, Reservation] = {
    "max": lambda prompt, output, max_len: max_len,
    "pow2": lambda prompt, output, max_len: min(max_len, prompt + power_of_two(output) - 1),
    "oracle": lambda prompt, output, max_len: prompt + output - 1,
    "demand": lambda prompt, output, max_len: 0,
}
"""(prompt, output, longest sequence) -> slots to reserve. The last token of an answer takes none: it is not computed."""


class BuddyPool(BlockPool):
    """A BlockPool that hands out runs. Blocks of one run may come back one by one, as their pins end."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._buddy = BuddyAllocator(num_blocks)

    @property
    def num_free(self) -> int:
        return self._buddy.num_free

    @property
    def largest(self) -> int:
        return self._buddy.largest

    def allocate(self, count: int) -> IntArray | None:
        """A run of at least `count` blocks, each with a count of one; None, and no change, where no free run is as long."""
        run = self._buddy.allocate(count)
        if run is None:
            return None
        self.counts[run.start : run.stop] = 1
        self.num_held += len(run)
        return np.arange(run.start, run.stop, dtype=np.int32)

    def extend(self, blocks: IntArray, count: int) -> IntArray | None:
        """The run of at least `count` blocks that a held run (all its blocks) becomes in place; None where it cannot."""
        run = self._buddy.extend(range(int(blocks[0]), int(blocks[-1]) + 1), count)
        if run is None:
            return None
        longer = np.arange(run.start, run.stop, dtype=np.int32)
        added = np.setdiff1d(longer, blocks)
        self.counts[added] = 1
        self.num_held += len(added)
        return longer

    def free(self, blocks: IntArray) -> None:
        if self.counts[blocks].any():
            raise InvariantError(f"block {blocks[self.counts[blocks].argmax()]} is freed while somebody holds it")
        ordered = np.sort(blocks)
        for part in np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1):
            if len(part):
                self._buddy.free(range(int(part[0]), int(part[-1]) + 1))

    def check_invariants(self, table_references: IntArray, kept: IntArray) -> None:
        free = np.fromiter(chain.from_iterable(self._buddy.free_runs()), np.int32)
        self._stack[: len(free)], self._num_free = free, len(free)
        super().check_invariants(table_references, kept)


class ContiguousCache(CacheManager):
    """A CacheManager whose sequences are contiguous. `max_len`: the longest sequence of the model, in tokens.

    Sequences are announced by `expect`. Raises ConfigError for a pool that cannot hold one reservation.
    """

    def __init__(self, num_blocks: int, block_size: int, *, reservation: str, max_len: int) -> None:
        if reservation not in RESERVATIONS:
            raise ConfigError(f"a reservation is one of {', '.join(RESERVATIONS)}, not {shown(reservation)}")
        super().__init__(num_blocks, block_size, prefix_cache=False)
        self._pool: BuddyPool = BuddyPool(num_blocks)
        self._slots = RESERVATIONS[reservation]
        self._max_len = max_len
        self._expected: dict[int, tuple[int, int]] = {}
        if reservation == "max" and self._run_for(max_len) > self._pool.largest:
            raise ConfigError(
                f"a pool of {num_blocks} blocks has no run of {self._run_for(max_len)}, which a reservation of {max_len} tokens"
                " takes: enlarge the pool, or lower the longest sequence"
            )

    def expect(self, seq_id: int, num_prompt: int, num_output: int) -> None:
        """Announce a sequence before it is first scheduled. Raises RequestError for one that no empty pool could hold."""
        final = num_prompt + num_output - 1
        promise = max(self._slots(num_prompt, num_output, self._max_len), 0)
        wanted = self._run_for(max(promise, final))
        if wanted > self._pool.largest:
            raise RequestError(
                f"a request of {num_prompt} + {num_output} tokens takes a run of {wanted} blocks, and the pool of"
                f" {self.num_blocks} has none above {self._pool.largest}"
            )
        self._expected[seq_id] = promise, final

    def _run_for(self, slots: int) -> int:
        """Blocks of the run that so many slots take."""
        return power_of_two(self.blocks_for(slots))

    @property
    def num_free(self) -> int:
        """Blocks that can be had: free ones, and for those that have reserved, what they have not reached yet.

        The scheduler asks so that running sequences can grow by a block each, for which these were reserved.
        """
        reserved = (table.num_blocks - self.blocks_for(table.num_computed) for i, table in self._tables.items() if self._promise(i))
        return self._pool.num_free + sum(reserved)

    def _promise(self, seq_id: int) -> int:
        return self._expected.get(seq_id, (0, 0))[0]

    def reserve(self, seq_id: int, start: int, stop: int) -> IntArray | None:
        """As CacheManager.reserve. The first time a run for all that is promised; when that is full, a longer one."""
        table = self._tables.get(seq_id)
        if table is None or stop > table.num_blocks * self.block_size:
            count = self.blocks_for(max(stop, self._promise(seq_id)))
            blocks = self._pool.allocate(count) if table is None else self._grow(table, count)
            if blocks is None:
                return None
            table = self._tables[seq_id] = BlockTable(blocks, table.num_computed if table else 0)
        snapshot: IntArray = table.blocks[: self.blocks_for(stop)].copy()
        return snapshot

    def _grow(self, table: BlockTable, count: int) -> IntArray | None:
        """A longer run with the table's content: in place, or elsewhere; None, and no change, where there is no room."""
        blocks = self._pool.extend(table.blocks, count)
        if blocks is not None:
            if blocks[0] != table.blocks[0]:
                self._copy(table, blocks)
            return blocks
        blocks = self._pool.allocate(count)
        if blocks is not None:
            self._copy(table, blocks)
            self._let_go(self._pool.release(table.blocks))
        return blocks

    def _copy(self, table: BlockTable, blocks: IntArray) -> None:
        """Let the next plan copy what the table holds. Both sides are pinned until it is applied."""
        for source, copy in zip(table.blocks[: self.blocks_for(table.num_computed)].tolist(), blocks.tolist(), strict=False):
            # what is itself still to be copied has its content elsewhere: copies of one plan are made all at once
            origin = next((before for before, target in self._copies if target == source), source)
            self._pool.pin(np.array([origin, copy], np.int32))
            self._copies.append((origin, copy))
            self.counters.blocks_copied += 1

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        raise InvariantError("contiguous sequences do not fork: they run one sequence a request")

    def states(self, writing: Mapping[int, int]) -> MemoryStates:
        """What the slots are good for while a step writes so many tokens of each sequence (by id)."""
        filled = reservation = internal = 0
        for seq_id, table in self._tables.items():
            promise, final = self._expected[seq_id]
            here = table.num_computed + writing.get(seq_id, 0)
            room = promise or table.num_blocks * self.block_size
            filled += here
            reservation += max(0, min(room, final) - here)
            internal += max(0, room - max(final, here))
        pool = self.num_blocks * self.block_size
        return MemoryStates(pool, filled, reservation, internal, pool - filled - reservation - internal)
