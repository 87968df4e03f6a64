"""The split plan: every tile once, in order, and in equal shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged.backends.split_plan import TILE, SplitPlan, plan_decode


def lengths(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def rows_of(plan: SplitPlan) -> list[list[int]]:
    return plan.items[: plan.part_start[-1]].tolist()


def test_a_line_is_cut_in_equal_shares() -> None:
    plan = plan_decode(lengths(160, 32), num_kv_heads=1, num_shares=2)
    assert rows_of(plan) == [[0, 0, 0, 6], [0, 0, 6, 10], [1, 0, 0, 2]]  # costs 8 and 4 + 2 + 2 + 2 of a line of 16
    assert plan.item_start.tolist() == [0, 1, 3]
    assert plan.part_start.tolist() == [0, 2, 3]
    assert plan.work.tolist() == [8, 10]


def test_a_window_begins_at_the_tile_of_its_oldest_position() -> None:
    assert rows_of(plan_decode(lengths(100, 10), 1, 1, window=20)) == [[0, 0, 5, 7], [1, 0, 0, 1]]  # position 80 is the oldest
    assert rows_of(plan_decode(lengths(100), 1, 1, window=21)) == [[0, 0, 4, 7]]


def test_padded_lanes_have_no_items() -> None:
    plan = plan_decode(lengths(0, 20, 0), 2, 4)
    assert {(row[0], row[1]) for row in rows_of(plan)} == {(1, 0), (1, 1)}
    assert np.diff(plan.part_start)[[0, 1, 4, 5]].tolist() == [0] * 4
    nothing = plan_decode(lengths(0), 2, 4)
    assert rows_of(nothing) == []
    assert not nothing.item_start.any()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 200), st.sampled_from([0, 0, 1, 15, 16, 17, 500]))
def test_every_tile_is_attended_to_once(contexts: list[int], num_kv_heads: int, num_shares: int, window: int) -> None:
    plan = plan_decode(lengths(*contexts), num_kv_heads, num_shares, window)
    assert plan.items.shape == (len(contexts) * num_kv_heads + num_shares, 4)
    assert plan.item_start[0] == 0
    assert plan.item_start[-1] == plan.part_start[-1]
    assert (np.diff(plan.item_start) >= 0).all()
    for pair in range(len(contexts) * num_kv_heads):
        parts = plan.items[plan.part_start[pair] : plan.part_start[pair + 1]]
        context = contexts[pair // num_kv_heads]
        oldest = max(0, context - window) if window else 0
        wanted = range(oldest // TILE, -(-context // TILE)) if context else range(0)
        assert [tile for part in parts for tile in range(part[2], part[3])] == list(wanted)
        assert (parts[:, :2] == np.divmod(pair, num_kv_heads)).all()
        assert (parts[:, 2] < parts[:, 3]).all()


@pytest.mark.parametrize("num_shares", [132, 264, 216])
@pytest.mark.parametrize("seed", range(10))
def test_shares_are_equal_within_five_percent(num_shares: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    contexts = np.minimum(rng.lognormal(7.0, 1.2, rng.integers(100, 256)), 32768).astype(np.int32) + 256
    work = plan_decode(contexts, 8, num_shares).work
    assert work.mean() > 100  # a tile is less than 1 % of a share
    assert work.max() / work.mean() <= 1.05
