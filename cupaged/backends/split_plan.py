"""The plan of paged_decode: which block of the grid attends to which part of which context, in equal shares.

Every (sequence, key/value head) pair has its tiles of 16 positions. Laid end to end, with an overhead for each pair, they
are one line; it is cut at equal distances, one piece for each block of a grid that just fills the GPU. So a pair may be
worked on by several blocks, and a block may have several pairs:

    pairs     |  A A A A A A A A A  | B B |  C C C C C  |
    blocks    |      0       |      1       |     2     |
    items        A 0..6        A 6..9, B 0..2, C 0..1     C 1..5
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TILE = 16
"""Positions of a tile; a pair begins at a multiple of it."""

OVERHEAD = 2
"""What beginning and ending an item costs, in tiles."""

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class SplitPlan:
    """items       int32 [max_items, 4]: sequence, key/value head, first tile, end tile; of all zeros where unused
    item_start  int32 [num_shares + 1]: the items of each block of the grid
    part_start  int32 [num_seqs * num_kv_heads + 1]: the items of each pair
    """

    items: I32
    item_start: I32
    part_start: I32

    @property
    def work(self) -> npt.NDArray[np.int64]:
        """int64 [num_shares]: what each block has to do, in tiles."""
        costs = np.concatenate([[0], np.cumsum(self.items[:, 3] - self.items[:, 2] + OVERHEAD)])
        work: npt.NDArray[np.int64] = np.diff(costs[self.item_start])
        return work


def largest_plan(num_seqs: int, num_kv_heads: int, num_shares: int) -> int:
    """The number of rows of a plan's `items`: every pair once, and once more for every cut."""
    return num_seqs * num_kv_heads + num_shares


def plan_decode(context_lens: I32, num_kv_heads: int, num_shares: int, window: int = 0) -> SplitPlan:
    """Cut the contexts of decode rows (int32 [num_seqs]; 0: a padded lane) for a grid of num_shares blocks.

    The number of rows of `items` depends on the sizes only, not on the lengths: see `largest_plan`.
    """
    first = np.maximum(context_lens - window, 0) // TILE if window else np.zeros_like(context_lens)
    tiles = np.where(context_lens > 0, -(-context_lens // TILE) - first, 0).astype(np.int64)
    pair_tiles = np.repeat(tiles, num_kv_heads)
    pairs = np.flatnonzero(pair_tiles)  # those that have any

    begin = np.concatenate([[0], np.cumsum(pair_tiles[pairs])])  # of each pair, in tiles, on the line
    cost = begin + OVERHEAD * np.arange(len(begin))
    targets = cost[-1] * np.arange(1, num_shares) / num_shares
    at = np.searchsorted(cost, targets, side="right") - 1
    inside = np.rint(targets - cost[at] - OVERHEAD).astype(np.int64)
    cuts = begin[at] + np.clip(inside, 0, pair_tiles[pairs[at]]) if len(pairs) else np.zeros(num_shares - 1, np.int64)

    starts = np.unique(np.concatenate([begin, cuts]))
    starts, ends = starts[:-1], starts[1:]
    owner = np.searchsorted(begin, starts, side="right") - 1
    sequence, kv_head = np.divmod(pairs[owner], num_kv_heads)
    offset = first[sequence] - begin[owner]
    items = np.zeros((largest_plan(len(context_lens), num_kv_heads, num_shares), 4), np.int32)
    items[: len(starts)] = np.stack([sequence, kv_head, starts + offset, ends + offset], axis=1)
    share = np.searchsorted(cuts, starts, side="right")
    return SplitPlan(
        items,
        np.searchsorted(share, np.arange(num_shares + 1)).astype(np.int32),
        np.searchsorted(pairs[owner], np.arange(len(pair_tiles) + 1)).astype(np.int32),
    )
