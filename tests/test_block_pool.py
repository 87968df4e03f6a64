"""The pool hands out exact block ids, last released first, and notices every wrong count."""

from __future__ import annotations

import numpy as np
import pytest

from cupaged.cache.block_pool import BlockPool
from cupaged.cache.block_table import BlockTable
from cupaged.errors import InvariantError


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


def test_blocks_come_in_order_and_the_last_released_comes_first() -> None:
    pool = BlockPool(6)
    assert pool.allocate(3).tolist() == [0, 1, 2]
    assert pool.allocate(2).tolist() == [3, 4]
    for blocks in (ids(1), ids(3, 0)):
        pool.free(pool.release(blocks))
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
    assert pool.release(blocks).tolist() == [0]
    assert pool.unpin(ids(1)).tolist() == [1]


def test_a_block_that_somebody_holds_cannot_be_freed() -> None:
    pool = BlockPool(2)
    with pytest.raises(InvariantError, match="block 0 is freed while somebody holds it"):
        pool.free(pool.allocate(1))


def test_a_free_block_cannot_be_pinned() -> None:
    with pytest.raises(InvariantError, match="block 1 is held by nobody"):
        BlockPool(2).pin(ids(1))


def test_check_finds_a_count_that_nobody_explains() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    nothing_kept = np.zeros(2, np.int32)
    pool.check_invariants(np.array([1, 0], np.int32), nothing_kept)
    with pytest.raises(InvariantError, match="block 0 has a count of 1"):
        pool.check_invariants(np.array([0, 0], np.int32), nothing_kept)


def test_a_table_grows_and_keeps_its_order() -> None:
    table = BlockTable()
    table.append(ids(7, 3))
    table.append(np.arange(10, 30, dtype=np.int32))
    assert table.blocks.tolist() == [7, 3, *range(10, 30)]
    assert table.num_blocks == 22


def test_a_snapshot_stays_as_it_was_and_is_the_same_until_the_table_changes() -> None:
    table = BlockTable(ids(7, 3))
    first = table.snapshot()
    assert table.snapshot() is first
    table.replace(1, 9)
    second = table.snapshot()
    table.append(ids(4))
    third = table.snapshot()
    table.replace(np.array([0, 2]), ids(5, 6))
    assert [s.tolist() for s in (first, second, third, table.snapshot())] == [[7, 3], [7, 9], [7, 9, 4], [5, 9, 6]]
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1


