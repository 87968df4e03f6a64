"""CacheManager: the only door to the paged KV cache.

It knows sequences by id and tokens by value; which physical blocks they live in is its business alone. "No room" is
the value None, corruption is an InvariantError.

    adopt     begin a sequence with the cached prefix of its tokens, shared, not copied
    reserve   grow a sequence's table, and give it a private copy of what it is about to write to (copy-on-write)
    fork      begin a sequence as a copy of another: all blocks shared by count
    commit    a completed step wrote the KV of so many tokens; full blocks are published; commit_one: of one more each
    release   the sequence gives its blocks back, and publishes what is computed, its partly filled tail included
    swap_out  a preempted request's sequences go to host memory, and swap_in brings them back
    pin       a plan in flight reads or writes these blocks: none of them is reused before unpin

Every block is in one of four states:

    free        nobody holds it and its content is of no use
    held        a table or a plan names it (it may be published, too)
    evictable   published and held by nobody, like everything below it in the tree: taken when the free ones run out
    covered     published and held by nobody, but something below it in the tree is held
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from cupaged.cache.block_pool import BlockPool
from cupaged.cache.block_table import BlockTable
from cupaged.cache.eviction import EvictionQueue, Key, least_recently_used
from cupaged.cache.prefix_tree import Node, PrefixTree
from cupaged.cache.swap_space import SwapSpace
from cupaged.errors import InvariantError
from cupaged.step_plan import IntArray

NO_PAIRS: IntArray = np.empty((0, 2), np.int32)


@dataclass(frozen=True)
class CacheUsage:
    """blocks_used are held by somebody, blocks_cached only kept; blocks_shared: how many more blocks all tables would
    take if none shared; slots_used hold KV of live sequences, each counted once however many share it."""

    blocks_used: int
    blocks_cached: int
    blocks_shared: int
    slots_used: int


@dataclass
class CacheCounters:
    """What happened since the start."""

    blocks_copied: int = 0
    blocks_evicted: int = 0
    blocks_merged: int = 0
    blocks_swapped: int = 0


class CacheManager:
    """Bookkeeping for `num_blocks` blocks of `block_size` tokens each. Allocation is by demand, block by block.

    prefix_cache  publish computed blocks and adopt them; without it blocks are shared by forks only
    eviction      the key of a policy (see eviction.py)
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool = True,
        eviction: Callable[[Node], Key] = least_recently_used,
        num_swap_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._pool = BlockPool(num_blocks)
        self._tree = PrefixTree(num_blocks, block_size)
        self._tables: dict[int, BlockTable] = {}
        self._evictable = EvictionQueue(self._tree, self._pool, eviction)
        self._copies: list[tuple[int, int]] = []
        self._swap = SwapSpace(num_swap_blocks)
        self._swap_out = self._swap_in = NO_PAIRS
        self._first_place = np.empty(num_blocks, np.int32)
        self.counters = CacheCounters()

    # ---- what there is

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds, kept for their content."""
        return self.num_blocks - self._pool.num_free - self.num_used

    @property
    def num_free(self) -> int:
        """Blocks that can be had: free ones and cached ones."""
        return self.num_blocks - self.num_used

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self._pool.num_held

    def usage(self) -> CacheUsage:
        """How the pool is used now. Takes longer than the counts above: for those who watch."""
        tables = self._tables.values()
        shared = sum(len(table.held) for table in tables) - int(np.count_nonzero(self._pool.counts - self._pool.pins))
        slots = self._slots_of_shared() if shared else sum(t.num_computed - t.num_released * self.block_size for t in tables)
        return CacheUsage(self.num_used, self.num_cached, shared, slots)

    def _slots_of_shared(self) -> int:
        """Slots that hold KV, where tables share blocks."""
        filled = np.zeros(self.num_blocks, np.int32)
        for table in self._tables.values():
            whole, rest = divmod(table.num_computed, self.block_size)
            filled[table.blocks[table.num_released : whole]] = self.block_size
            if rest:
                last = table.blocks[whole]
                filled[last] = max(filled[last], rest)
        return int(filled.sum())

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens takes."""
        return -(-num_tokens // self.block_size)

    # ---- a sequence's life

    def cached_prefix(self, tokens: IntArray, salt: str = "") -> int:
        """How many of the first tokens are cached. Changes nothing."""
        return self._tree.match(tokens, salt).num_tokens if self.prefix_cache else 0

    def path(self, tokens: IntArray, salt: str = "") -> tuple[tuple[int, ...], int]:
        """What is cached of the first tokens: numbers of the tree's nodes on the way, and how many tokens. Changes nothing."""
        if not self.prefix_cache:
            return (), 0
        match = self._tree.match(tokens, salt)
        return tuple(node.number for node in match.nodes), match.num_tokens

    def adopt(self, seq_id: int, tokens: IntArray, salt: str = "") -> int:
        """Begin a sequence with what is cached of its first tokens; how many tokens that is. `tokens`: those it may take."""
        if not self.prefix_cache:
            return 0
        match = self._tree.match(tokens, salt)
        if not match.num_tokens:
            return 0
        self._pool.hold(match.blocks)
        self._tables[seq_id] = BlockTable(match.blocks, match.num_tokens)
        return match.num_tokens

    def was_of_use(self, tokens: IntArray, salt: str = "") -> None:
        """A sequence began with these cached tokens: eviction values them higher."""
        self._tree.touch(self._tree.match(tokens, salt).nodes)

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """Begin a sequence with the first `num_tokens` computed tokens of another; blocks are shared, none is copied."""
        parent = self._tables[parent_id]
        if num_tokens > parent.num_computed:
            raise InvariantError(f"sequence {child_id} forks {num_tokens} tokens, of which {parent.num_computed} are computed")
        child = self._tables[child_id] = BlockTable(parent.blocks[: self.blocks_for(num_tokens)], num_tokens)
        self._pool.hold(child.held)

    def table(self, seq_id: int) -> IntArray:
        """The sequence's blocks as they are now, int32 [num_blocks]."""
        return self._tables[seq_id].snapshot()

    def holds_from(self, seq_id: int) -> int:
        """The first position whose block the sequence still has; 0 unless a sliding window has moved on."""
        return self._tables[seq_id].num_released * self.block_size

    def leave_behind(self, seq_id: int, position: int) -> None:
        """Nothing before `position` will be read again: give back the blocks that lie wholly before it."""
        table = self._tables[seq_id]
        first, stop = table.num_released, position // self.block_size
        if stop > first:
            blocks = table.blocks[first:stop].copy()
            table.replace(slice(first, stop), -1)
            table.num_released = stop
            self._let_go(self._pool.release(blocks))

    def reserve(self, seq_id: int, start: int, stop: int) -> IntArray | None:
        """Let a sequence write its tokens start .. stop - 1: the table, int32 [num_blocks]; None and no change if full.

        Blocks are added for what the table does not cover. If the first block to be written holds what others may
        read (it is shared, or published past that slot), the sequence gets a copy of its own: see `take_copies`.
        """
        table = self._tables.get(seq_id) or BlockTable()
        first = start // self.block_size
        missing = self.blocks_for(stop) - table.num_blocks
        must_copy = start < stop and first < table.num_blocks and not self._may_write(table[first], start)
        if missing > 0 or must_copy:
            missing = max(0, missing)
            blocks = self._allocate(missing + must_copy)
            if blocks is None:
                return None
            if must_copy:
                self._copy_on_write(table, first, int(blocks[-1]))
            table.append(blocks[:missing])
            self._tables[seq_id] = table
        return table.snapshot()

    def _may_write(self, block: int, position: int) -> bool:
        """Whether one table alone names the block, and the slot is past what is published of it."""
        holders = self._pool.counts.item(block) - self._pool.pins.item(block)
        return holders == 1 and position % self.block_size >= self._tree.fill.item(block)

    def _copy_on_write(self, table: BlockTable, index: int, copy: int) -> None:
        """Put a private copy in the place of a block. Both are pinned until the plan that copies is applied."""
        shared = table[index]
        # what is itself still to be copied has its content elsewhere: copies of one plan are made all at once
        source = next((origin for origin, target in self._copies if target == shared), shared)
        self._pool.pin(np.array([source, copy], np.int32))
        table.replace(index, copy)
        table.num_published = min(table.num_published, index)
        self._let_go(self._pool.release(np.array([shared], np.int32)))
        self._copies.append((source, copy))
        self.counters.blocks_copied += 1

    def take_copies(self) -> IntArray:
        """The copies that the next plan must make, int32 [n, 2] (from, to); `copies_done` when it has been applied."""
        copies = np.array(self._copies, np.int32).reshape(-1, 2)
        self._copies.clear()
        return copies

    def return_copies(self, copies: IntArray) -> None:
        """The plan was cancelled: the next one must make its copies."""
        self._copies[:0] = [(int(source), int(copy)) for source, copy in copies]

    def copies_done(self, copies: IntArray) -> None:
        """Let go of the blocks of copies: the plan that made them was applied."""
        for block in copies.ravel():
            self.unpin(np.array([block], np.int32))

    def commit(self, seq_id: int, tokens: IntArray, num_computed: int, salt: str = "") -> None:
        """A completed step wrote the KV of the sequence's first `num_computed` tokens; full blocks are published."""
        table = self._tables[seq_id]
        if not table.num_computed <= num_computed <= table.num_blocks * self.block_size:
            raise InvariantError(
                f"sequence {seq_id} commits {num_computed} tokens after {table.num_computed}, with {table.num_blocks} blocks"
            )
        table.num_computed = num_computed
        if num_computed // self.block_size > table.num_published:
            self._publish(table, tokens[: num_computed // self.block_size * self.block_size], salt)

    def commit_one(self, seq_ids: Iterable[int]) -> None:
        """The same of one more token of each of these sequences. Where that fills a block, `commit` has to follow."""
        for seq_id in seq_ids:
            self._tables[seq_id].num_computed += 1

    def take_back(self, seq_id: int, num_computed: int) -> None:
        """Of the sequence's tokens only the first `num_computed` have sound KV after all; none of the others is published."""
        table = self._tables[seq_id]
        if not table.num_published * self.block_size <= num_computed <= table.num_computed:
            raise InvariantError(f"sequence {seq_id} takes back what it has published, or never committed")
        table.num_computed = num_computed

    def _publish(self, table: BlockTable, tokens: IntArray, salt: str) -> None:
        """Put the blocks of these tokens into the tree; where it has equal ones already, the table takes those."""
        if not self.prefix_cache or table.num_released:
            return  # what is not whole cannot be found again
        count = self.blocks_for(len(tokens))
        own = table.blocks[:count].copy()
        held, dropped = self._tree.insert(tokens, own, salt, table.num_published)
        merged = np.flatnonzero(held != own)
        if len(merged):
            self._pool.hold(held[merged])
            table.replace(merged, held[merged])
            self._let_go(self._pool.release(own[merged]))
            self.counters.blocks_merged += len(merged)
        if len(dropped):
            self._pool.free(dropped[self._pool.counts[dropped] == 0])
        table.num_published = len(tokens) // self.block_size

    def release(self, seq_id: int, tokens: IntArray, salt: str = "") -> None:
        """Forget the sequence, publishing what is computed of its `tokens`; unknown ids are fine.

        Its blocks become free, or evictable where published; pinned ones when their plan is applied.
        """
        if seq_id in self._swap:
            self._swap.drop(seq_id)
        table = self._tables.pop(seq_id, None)
        if table is None:
            return
        sound = self._forget_copies(table)
        if sound:
            self._publish(table, tokens[:sound], salt)
        # pushed last to first, so that they are handed out again in the order they had here
        self._let_go(self._pool.release(table.held[::-1]))

    def _forget_copies(self, table: BlockTable) -> int:
        """Drop copies into the table that no plan has taken up; how many of its tokens are computed in sound blocks."""
        sound = table.num_computed
        for source, copy in [pair for pair in self._copies if pair[1] in table.blocks]:
            if self._pool.counts[copy] - self._pool.pins[copy] == 1:  # nobody else waits for it
                self._copies.remove((source, copy))
                self.copies_done(np.array([[source, copy]], np.int32))
            sound = min(sound, int(np.flatnonzero(table.blocks == copy)[0]) * self.block_size)
        return sound

    def reset_prefix_cache(self) -> None:
        """Forget all cached content. Blocks in use stay with their sequences, which may publish them again."""
        kept = np.flatnonzero((self._tree.fill > 0) & (self._pool.counts == 0)).astype(np.int32)
        self._tree.clear()
        self._evictable.clear()
        self._pool.free(kept)

    # ---- swapping

    def swap_out(self, seq_ids: list[int]) -> bool:
        """Move what is computed of these sequences to host memory; False, and no change, where that has no room, or
        where a sliding window has left a part behind.

        Their blocks may be reused at once: the plan that follows copies them out before it writes anything.
        """
        tables = {i: self._tables[i] for i in seq_ids if i in self._tables and self._tables[i].num_computed}
        unmade = {copy for _, copy in self._copies}
        held = {i: (t.blocks[: self.blocks_for(t.num_computed)].copy(), t.num_computed) for i, t in tables.items()}
        if not held or any(table.num_released for table in tables.values()) or any(unmade.intersection(blocks.tolist()) for blocks, _ in held.values()):
            return False
        pairs = self._swap.take(held)
        if pairs is None:
            return False
        self._swap_out = np.concatenate([self._swap_out, pairs])
        self.counters.blocks_swapped += len(pairs)
        for seq_id in seq_ids:
            table = self._tables.pop(seq_id, None)
            if table is not None:
                self._let_go(self._pool.release(table.held[::-1]))
        return True

    def swapped_blocks(self, seq_ids: list[int]) -> int:
        """How many blocks bringing these sequences back takes; 0 if they are not in host memory."""
        return len(self._swap.blocks_of(seq_ids))

    def swap_in(self, seq_ids: list[int]) -> dict[int, int] | None:
        """Bring sequences back, sharing what they shared: seq_id -> computed tokens; None, and no change, if full, or if the plan
        that takes them out has not been applied."""
        host = self._swap.blocks_of(seq_ids)
        device = self._allocate(len(host)) if self._swap.has_got(host) else None
        if device is None:
            return None
        back = self._swap.give(seq_ids)
        for seq_id, (blocks, num_computed) in back.items():
            own = device[np.searchsorted(host, blocks)]
            self._pool.hold(own)
            self._tables[seq_id] = BlockTable(own, num_computed)
        self._pool.release(device)  # the one hold of `allocate`: the tables hold them now
        self._swap_in = np.concatenate([self._swap_in, np.stack([host, device], axis=1)])
        self.counters.blocks_swapped += len(host)
        return {seq_id: num_computed for seq_id, (_, num_computed) in back.items()}

    def take_swaps(self) -> tuple[IntArray, IntArray]:
        """The swaps that the next plan must make, out and in, int32 [n, 2] each; `swaps_done` when it was applied."""
        swaps = self._swap_out, self._swap_in
        self._swap_out = self._swap_in = NO_PAIRS
        return swaps

    def swaps_done(self, out: IntArray, back: IntArray) -> None:
        """The plan that made these swaps was applied."""
        for host in (out[:, 1], back[:, 0]):
            if len(host):
                self._swap.done(host)

    def swaps_cancelled(self, out: IntArray, back: IntArray) -> None:
        """The plan was cancelled: what should have gone out is lost, what should have come back comes with the next."""
        self._swap.lost(out[:, 1])
        self._swap_in = np.concatenate([back, self._swap_in])

    # ---- plans in flight

    def pin(self, tables: Iterable[IntArray]) -> IntArray:
        """Keep the blocks of these tables from being reused until `unpin`, even if their sequences go away: the blocks, int32,
        each once however many tables share it."""
        blocks = np.concatenate([np.empty(0, np.int32), *tables])
        blocks = blocks[blocks >= 0]
        places = np.arange(len(blocks), dtype=np.int32)
        self._first_place[blocks[::-1]] = places[::-1]  # of equal blocks the first one is written last
        distinct: IntArray = blocks[self._first_place[blocks] == places]
        self._pool.pin(distinct)
        return distinct

    def unpin(self, blocks: IntArray) -> None:
        """End one `pin`, which gave these blocks."""
        self._let_go(self._pool.unpin(blocks))

    # ---- room

    def _allocate(self, count: int) -> IntArray | None:
        """Free blocks, made by eviction where needed; None where there is no room, and then nothing was evicted."""
        if count > self.num_free:
            return None
        while self._pool.num_free < count:
            block = self._evictable.pop()
            if block is None:
                return None  # what is left is covered
            self._pool.free(np.array([block], np.int32))
            self.counters.blocks_evicted += 1
        return self._pool.allocate(count)

    def _let_go(self, idle: IntArray) -> None:
        """Nobody holds these blocks any more: published ones are kept, the others are free."""
        if not len(idle):
            return
        published = self._tree.fill[idle] > 0
        self._pool.free(idle[~published])
        for node in dict.fromkeys(self._tree.owner(int(block)) for block in idle[published]):
            if node is not None:
                self._evictable.offer(node)

    # ---- proof

    def check_invariants(self) -> None:
        """Raise InvariantError unless every count is explained and every block is in exactly one state."""
        references = np.zeros(self.num_blocks, np.int32)
        for seq_id, table in self._tables.items():
            blocks = table.held
            if (table.blocks[: table.num_released] != -1).any():
                raise InvariantError(f"sequence {seq_id} names a block that it gave back")
            if len(np.unique(blocks)) != len(blocks):
                raise InvariantError(f"sequence {seq_id} names a block twice")
            references[blocks] += 1
        self._tree.check_invariants()
        self._swap.check_invariants()
        self._pool.check_invariants(references, self._tree.fill)
        self._evictable.check_invariants()
