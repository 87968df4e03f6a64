"""The cache manager: exact block ids of demand allocation, copy-on-write, sharing, publishing and eviction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupaged.cache.eviction import POLICIES
from cupaged.cache.manager import CacheManager
from cupaged.cache.swap_space import SwapSpace
from cupaged.errors import InvariantError


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def text(length: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + length, dtype=np.int32)


class Cache(CacheManager):
    """Short ways, and every invariant after every change."""

    def compute(self, seq_id: int, tokens: np.ndarray, start: int = 0) -> list[int]:
        """Reserve, run and commit; the table."""
        blocks = self.reserve(seq_id, start, len(tokens))
        assert blocks is not None
        self.copies_done(self.take_copies())
        self.commit(seq_id, tokens, len(tokens))
        self.check_invariants()
        return self._tables[seq_id].blocks.tolist()

    def done(self, seq_id: int, tokens: np.ndarray) -> None:
        self.release(seq_id, tokens)
        self.check_invariants()

    def grow(self, seq_id: int, start: int, stop: int) -> list[int] | None:
        blocks = self.reserve(seq_id, start, stop)
        self.check_invariants()
        return None if blocks is None else blocks.tolist()


def cache(num_blocks: int, block_size: int = 4, **options: Any) -> Cache:
    return Cache(num_blocks, block_size, **options)


# allocation by demand


def test_blocks_are_allocated_by_demand() -> None:
    c = cache(4, prefix_cache=False)
    assert c.grow(0, 0, 4) == [0]
    assert c.grow(1, 0, 1) == [1]
    assert c.grow(0, 0, 4) == [0]
    assert c.grow(0, 4, 5) == [0, 2]
    assert c.grow(1, 1, 13) is None
    assert c.grow(1, 1, 8) == [1, 3]
    assert c.num_free == 0
    c.done(0, text(0))
    c.done(0, text(0))
    assert c.grow(2, 0, 8) == [0, 2]


def test_waste_is_less_than_a_block_a_sequence() -> None:
    c = cache(64, 16)
    for seq_id, length in enumerate((1, 15, 16, 17, 100)):
        c.compute(seq_id, text(length, 1000 * seq_id))
        assert c.num_used * 16 - c.usage().slots_used <= 15 * (seq_id + 1)


def test_commit_never_goes_back_or_past_the_blocks() -> None:
    c = cache(2)
    c.compute(0, text(6))
    with pytest.raises(InvariantError):
        c.commit(0, text(6), 5)
    with pytest.raises(InvariantError):
        c.commit(0, text(9), 9)


def test_memory_is_held_while_a_plan_reads_it() -> None:
    c = cache(2, 1, prefix_cache=False)
    blocks = c.reserve(0, 0, 2)
    pinned = c.pin([blocks])
    c.done(0, text(2))
    assert c.num_free == 0
    assert c.grow(1, 0, 1) is None
    c.unpin(pinned)
    assert c.num_free == 2
    c.check_invariants()


def test_a_plan_pins_a_block_once_however_many_tables_share_it() -> None:
    c = cache(8, prefix_cache=False)
    c.compute(0, text(6))
    c.fork(0, 1, 6)
    blocks = c.grow(1, 6, 9)
    assert blocks == [0, 3, 2]
    pinned = c.pin([ids(0, 1), ids(0, 3, 2), ids(-1, 3)])
    assert pinned.tolist() == [0, 1, 3, 2]
    assert c._pool.pins[:4].tolist() == [1, 2, 1, 2]  # and the copy of block 1 to block 3
    c.unpin(pinned)
    c.copies_done(c.take_copies())
    c.check_invariants()
    assert not c._pool.pins.any()


# copy-on-write


def test_a_fork_shares_all_blocks_and_copies_the_one_it_writes_to() -> None:
    c = cache(8)
    assert c.compute(0, text(6)) == [0, 1]
    c.fork(0, 1, 6)
    assert c.num_used == 2
    assert c.usage().blocks_shared == 2
    assert c.grow(1, 6, 7) == [0, 2]
    assert c.take_copies().tolist() == [[1, 2]]
    assert c.grow(0, 6, 7) == [0, 1], "the last one to write keeps the block"
    assert c.take_copies().tolist() == []
    c.copies_done(ids(1, 2).reshape(1, 2))
    c.check_invariants()
    assert c.usage().blocks_shared == 1


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    c = cache(8)
    c.compute(0, text(8))
    c.fork(0, 1, 8)
    assert c.grow(1, 8, 9) == [0, 1, 2]
    assert c.grow(0, 8, 9) == [0, 1, 3]
    assert c.take_copies().tolist() == []


def test_a_fork_may_share_only_a_beginning() -> None:
    c = cache(8)
    c.compute(0, text(12))
    c.fork(0, 1, 5)
    assert c.grow(1, 5, 6) == [0, 3]
    assert c.take_copies().tolist() == [[1, 3]]


def test_a_fork_of_what_is_not_computed_is_a_bug() -> None:
    c = cache(8)
    c.reserve(0, 0, 8)
    with pytest.raises(InvariantError, match="forks 8 tokens, of which 0"):
        c.fork(0, 1, 8)


def test_a_full_pool_cannot_copy_and_changes_nothing() -> None:
    c = cache(2)
    c.compute(0, text(6))
    c.fork(0, 1, 6)
    assert c.grow(1, 6, 7) is None
    assert c.take_copies().tolist() == []
    c.done(0, text(6))
    assert c.grow(1, 6, 7) == [0, 1], "alone now, and past what is published: in place"


def test_the_source_of_a_copy_outlives_its_last_owner() -> None:
    """Handed out in the same step, it could become the destination of another copy."""
    c = cache(3, prefix_cache=False)
    c.compute(0, text(6))
    c.fork(0, 1, 6)
    assert c.grow(1, 6, 7) == [0, 2]
    c.done(0, text(6))
    assert c.num_free == 0
    assert c.grow(2, 0, 1) is None
    c.copies_done(c.take_copies())
    assert c.grow(2, 0, 1) == [1]


def test_a_copy_that_nobody_waits_for_is_not_made() -> None:
    c = cache(4)
    c.compute(0, text(6))
    c.fork(0, 1, 6)
    c.grow(1, 6, 7)
    c.done(1, text(7))
    assert c.take_copies().tolist() == []
    assert c.num_used == 2
    assert c.cached_prefix(text(8)) == 4, "what was to be copied is not published in its place"


def test_a_copy_of_what_is_still_to_be_copied_comes_from_where_the_content_is() -> None:
    """Sources and destinations of one plan's copies are disjoint."""
    c = cache(8)
    c.compute(0, text(6))
    c.done(0, text(6))
    c.adopt(1, text(5))
    assert c.grow(1, 5, 6) == [0, 2]
    c.fork(1, 2, 5)
    assert c.grow(2, 5, 6) == [0, 3]
    assert c.take_copies().tolist() == [[1, 2], [1, 3]]


def test_a_copy_that_a_fork_waits_for_is_made_though_its_first_owner_is_gone() -> None:
    c = cache(8)
    c.compute(0, text(6))
    c.done(0, text(6))
    c.adopt(1, text(5))
    assert c.grow(1, 5, 6) == [0, 2]
    c.fork(1, 2, 5)
    c.done(1, text(6))
    assert c.grow(2, 5, 6) == [0, 2]
    assert c.take_copies().tolist() == [[1, 2]]


def test_copies_of_a_cancelled_plan_go_to_the_next_one() -> None:
    c = cache(4)
    c.compute(0, text(6))
    c.fork(0, 1, 6)
    c.grow(1, 6, 7)
    c.return_copies(c.take_copies())
    c.check_invariants()
    assert c.take_copies().tolist() == [[1, 2]]


# the prefix cache


def test_full_blocks_are_shared_while_they_are_computed() -> None:
    c = cache(8)
    c.compute(0, text(9))
    assert c.adopt(1, text(9)) == 8
    assert c.grow(1, 8, 9) == [0, 1, 3]
    assert c.take_copies().tolist() == []
    assert c.usage().blocks_shared == 2


def test_a_finished_sequence_leaves_its_tail_and_the_next_goes_on_in_place() -> None:
    c = cache(8)
    c.compute(0, text(6))
    c.done(0, text(6))
    assert c.num_used == 0
    assert c.num_cached == 2
    assert c.adopt(1, text(7)[:6]) == 6
    assert c.grow(1, 6, 7) == [0, 1], "alone, and past the published slots: no copy"
    assert c.take_copies().tolist() == []


def test_a_match_inside_a_block_goes_on_in_a_copy() -> None:
    c = cache(8)
    c.compute(0, text(8))
    c.done(0, text(8))
    assert c.adopt(1, text(6)) == 6
    assert c.grow(1, 6, 7) == [0, 2]
    assert c.take_copies().tolist() == [[1, 2]]


def test_two_may_share_a_tail_and_both_go_on_in_copies() -> None:
    c = cache(8)
    c.compute(0, text(6))
    c.done(0, text(6))
    c.adopt(1, text(6))
    c.adopt(2, text(6))
    assert c.grow(1, 6, 7) == [0, 2]
    assert c.grow(2, 6, 7) == [0, 1], "alone by now"
    assert c.take_copies().tolist() == [[1, 2]]


def test_equal_blocks_computed_twice_become_one() -> None:
    c = cache(8)
    c.reserve(0, 0, 8)
    c.reserve(1, 0, 8)
    c.commit(0, text(8), 8)
    c.commit(1, text(8), 8)
    c.check_invariants()
    assert c.num_used == 2
    assert c.counters.blocks_merged == 2
    assert c.grow(1, 8, 9) == [0, 1, 3]


def test_without_the_cache_nothing_is_kept() -> None:
    c = cache(8, prefix_cache=False)
    c.compute(0, text(8))
    assert c.adopt(1, text(8)) == 0
    c.done(0, text(8))
    assert (c.num_cached, c.num_free) == (0, 8)


def test_what_is_evicted_is_found_no_more_and_is_not_mistaken() -> None:
    c = cache(2)
    c.compute(0, text(8))
    c.done(0, text(8))
    assert c.compute(1, text(8, 100)) == [0, 1]
    assert c.cached_prefix(text(8)) == 0
    assert c.counters.blocks_evicted == 2
    c.done(1, text(8, 100))
    assert c.cached_prefix(text(8, 100)) == 8


def test_blocks_in_use_are_not_evicted_and_branches_lose_their_ends_first() -> None:
    c = cache(4)
    c.compute(0, text(12))
    c.done(0, text(12))
    c.adopt(1, text(4))
    assert c.grow(2, 0, 16) is None
    assert c.grow(2, 0, 8) == [2, 3]
    assert c.cached_prefix(text(12)) == 8
    assert c.grow(2, 8, 12) == [2, 3, 1]
    assert c.cached_prefix(text(12)) == 4


@pytest.mark.parametrize(
    ("policy", "room", "kept"),
    [
        ("lru", 2, [True, False, True]),
        ("fifo", 2, [False, True, True]),
        ("lfu", 4, [True, False, False]),
        ("weighted", 2, [True, False, False]),  # the ends of two: what lies deep is worth less
    ],
)
def test_policies_differ_in_what_goes_first(policy: str, room: int, kept: list[bool]) -> None:
    """Three texts: the first is old but often of use, the second was of use once, the last is new."""
    c = cache(6, eviction=POLICIES[policy])
    texts = [text(8, 100 * i) for i in range(3)]
    for seq_id, tokens in enumerate(texts[:2]):
        c.compute(seq_id, tokens)
        c.done(seq_id, tokens)
    for seq_id, tokens in ((10, texts[1]), (11, texts[0]), (12, texts[0])):
        c.adopt(seq_id, tokens)
        c.was_of_use(tokens)
        c.done(seq_id, tokens)
    c.compute(20, texts[2])
    c.done(20, texts[2])
    c.grow(30, 0, 4 * room)
    assert [c.cached_prefix(tokens) == 8 for tokens in texts] == kept


def test_a_block_that_was_copied_from_was_of_use() -> None:
    """Its beginning served somebody who went on otherwise: the other text, not asked for since, goes first."""
    c = cache(6)
    for seq_id, tokens in enumerate((text(8), text(8, 100))):
        c.compute(seq_id, tokens)
        c.done(seq_id, tokens)
    other = np.concatenate([text(6), ids(50, 51)])
    c.adopt(2, other[:6])
    c.was_of_use(other[:6])
    c.compute(2, other, start=6)
    c.done(2, other)
    c.grow(3, 0, 8)
    assert (c.cached_prefix(text(8)), c.cached_prefix(text(8, 100))) == (8, 4)


def test_reset_forgets_everything_but_what_runs() -> None:
    c = cache(8)
    c.compute(0, text(8))
    c.compute(1, text(8, 50))
    c.done(1, text(8, 50))
    c.reset_prefix_cache()
    c.check_invariants()
    assert c.num_free == 6
    assert c.cached_prefix(text(8)) == c.cached_prefix(text(8, 50)) == 0
    c.compute(0, text(12), start=8)
    c.done(0, text(12))
    assert c.cached_prefix(text(12)) == 12


def test_salts_keep_apart() -> None:
    c = cache(8)
    c.reserve(0, 0, 4)
    c.commit(0, text(4), 4, salt="mine")
    assert c.cached_prefix(text(4)) == 0
    assert c.cached_prefix(text(4), salt="mine") == 4


def test_host_memory_is_not_reused_before_the_plan_that_reads_it_has_run() -> None:
    space = SwapSpace(1)
    assert space.take({0: (ids(5), 4)}).tolist() == [[5, 0]]
    space.done(ids(0))
    space.give([0])
    assert space.take({1: (ids(6), 4)}) is None
    space.done(ids(0))
    assert space.take({1: (ids(6), 4)}).tolist() == [[6, 0]]
    space.check_invariants()


def test_a_hot_prefix_does_not_make_the_eviction_queue_grow() -> None:
    c = cache(8)
    for seq_id in range(50):
        c.adopt(seq_id, text(8))
        c.compute(seq_id, text(9), start=8 if seq_id else 0)
        c.done(seq_id, text(9))
    assert len(c._evictable._heap) <= 2
