"""The pool hands out exact block ids, last released first, and notices every wrong count."""

from __future__ import annotations

import numpy as np
import pytest

from cupaged.cache.block_pool import BlockPool
from cupaged.cache.block_table import BlockTable
from cupaged.cache.manager import CacheManager
from cupaged.errors import InvariantError


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


def test_blocks_come_in_order_and_the_last_released_comes_first() -> None:
    pool = BlockPool(6)
    assert pool.allocate(3).tolist() == [0, 1, 2]
    assert pool.allocate(2).tolist() == [3, 4]
    pool.release(ids(1))
    pool.release(ids(3, 0))
    assert pool.num_free == 4
    assert pool.allocate(4).tolist() == [0, 3, 1, 5]


def test_a_full_pool_answers_none_and_changes_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert pool.allocate(1).tolist() == [2]
    assert pool.allocate(0).tolist() == []


def test_a_double_release_is_corruption() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(InvariantError, match="block 0 was released more often"):
        pool.release(blocks)


def test_a_pinned_block_is_free_only_when_its_plan_is_applied() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.pin(ids(1))
    pool.release(blocks)
    assert pool.num_free == 1
    assert pool.allocate(2) is None
    pool.unpin(ids(1))
    assert pool.allocate(2).tolist() == [1, 0]


def test_a_free_block_cannot_be_pinned() -> None:
    with pytest.raises(InvariantError, match="block 1 is free"):
        BlockPool(2).pin(ids(1))


def test_check_finds_a_count_that_nobody_explains() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool.check_invariants(np.array([1, 0], np.int32))
    with pytest.raises(InvariantError, match="block 0 has a count of 1"):
        pool.check_invariants(np.array([0, 0], np.int32))


def test_a_table_grows_and_keeps_its_order() -> None:
    table = BlockTable()
    table.append(ids(7, 3))
    table.append(np.arange(10, 30, dtype=np.int32))
    assert table.blocks.tolist() == [7, 3, *range(10, 30)]
    assert table.num_blocks == 22


def test_reserve_allocates_by_demand() -> None:
    cache = CacheManager(num_blocks=4, block_size=4)
    assert cache.reserve(0, 4).tolist() == [0]
    assert cache.reserve(1, 1).tolist() == [1]
    assert cache.reserve(0, 4).tolist() == [0]
    assert cache.reserve(0, 5).tolist() == [0, 2]
    assert cache.reserve(1, 13) is None
    assert cache.reserve(1, 8).tolist() == [1, 3]
    assert cache.num_free == 0
    cache.check_invariants()
    cache.release(0)
    cache.release(0)
    assert cache.reserve(2, 8).tolist() == [0, 2]
    cache.check_invariants()


def test_waste_is_less_than_a_block_a_sequence() -> None:
    cache = CacheManager(num_blocks=64, block_size=16)
    for seq_id, length in enumerate((1, 15, 16, 17, 100)):
        cache.reserve(seq_id, length)
        cache.commit(seq_id, length)
        wasted = cache.num_used * 16 - cache.slots_used
        assert wasted <= 15 * (seq_id + 1)


def test_commit_never_goes_back_or_past_the_blocks() -> None:
    cache = CacheManager(num_blocks=2, block_size=4)
    cache.reserve(0, 6)
    cache.commit(0, 6)
    with pytest.raises(InvariantError):
        cache.commit(0, 5)
    with pytest.raises(InvariantError):
        cache.commit(0, 9)


def test_memory_is_held_while_a_plan_reads_it() -> None:
    cache = CacheManager(num_blocks=2, block_size=1)
    blocks = cache.reserve(0, 2)
    cache.pin(blocks)
    cache.release(0)
    assert cache.num_free == 0
    assert cache.reserve(1, 1) is None
    cache.check_invariants()
    cache.unpin(blocks)
    assert cache.num_free == 2
    cache.check_invariants()
