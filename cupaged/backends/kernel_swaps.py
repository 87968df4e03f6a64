"""KernelSwaps: KV blocks travel between the pool and host memory beside the steps. Each of the two ways waits for the other
where both touch a block, and nowhere else.

    steps    | step 1 ............... | step 2, writes 9 ............... | step 3, writes 4 ...
    swaps      in 7, 8 | . . . . . . .| out 9 | out 4, 5, 6 ...... |
                       |              |       |                    step 3 waits for "out 4, 5, 6"
                       |              |       step 2 waits for "out 9"
                       |              step 1 computed on 4, 5, 6 and 9: "out" waits for it
                       step 2 reads 7 and 8, so it waits for "in"; step 1 does not touch them, so "in" does not wait for it

A swap waits for all work that came before the newest step, and for that step too if it touches one of the swap's blocks. A
step waits for the swaps in of blocks that it reads or writes, and for the swaps out of blocks that it writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.backends.base import Array, AttentionBatch
from cupaged.backends.device import Device, Mark

I32 = npt.NDArray[np.int32]
Blocks = npt.NDArray[np.signedinteger]


@dataclass(frozen=True, slots=True, eq=False)
class _Swap:
    """A swap that no step has waited for yet; `blocks` of the pool."""

    done: Mark
    blocks: I32
    inward: bool


class KernelSwaps:
    """`new_swap_space` and `swap_blocks` of backends.base.Backend over a device, and what others must ask for before they touch
    the pool."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._spaces: list[Array] = []
        self._under_way: list[_Swap] = []  # in their order
        self._before: Mark | None = None  # all that came before the newest step
        self._touched: Callable[[], Blocks] | None = None  # the blocks that work since then reads or writes; None: it may be any

    def new_space(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Host memory of the form of a pool [layers, blocks, ...]."""
        space = self._device.empty_host(shape, dtype)
        if space.size:
            self._spaces.append(space)
        return space

    def swap(self, source: tuple[Array, Array], target: tuple[Array, Array], pairs: I32) -> None:
        """See Backend.swap_blocks."""
        if not len(pairs):
            return
        inward = any(source[0] is space for space in self._spaces)
        blocks = pairs[:, 1] if inward else pairs[:, 0]
        after = self._before
        if after is None or self._touched is None or np.isin(blocks, self._touched()).any():
            after = self._device.mark()
        try:
            done = self._device.swap(source, target, pairs, after)
            self._under_way = [*(swap for swap in self._under_way if not swap.done.done), _Swap(done, blocks, inward)]
        except BaseException:  # Ctrl-C, perhaps half-way: what is on its way must be waited for, and who knows what that is
            self._device.wait_for(self._device.swap(source, target, pairs[:0], after))
            raise

    def before_step(self, batch: AttentionBatch, block_size: int) -> None:
        """A step is to be asked for next."""
        if self._spaces:
            if self._under_way:
                self._wait(_touched(batch, block_size), _written(batch, block_size))
            self._before, self._touched = self._device.mark(), lambda: _touched(batch, block_size)  # nobody may ask

    def before_copies(self, pairs: I32) -> None:
        """Blocks are to be copied within the pool next."""
        self._wait(pairs.ravel(), pairs[:, 1])
        self._touched = None

    def settle(self) -> None:
        """Whatever comes next finds all swaps done."""
        if self._under_way:
            self._device.wait_for(self._under_way.pop().done)
            self._under_way.clear()

    def _wait(self, touched: Blocks, written: Blocks) -> None:
        """For the last swap that matters: those before it are done before it is."""
        for i, swap in reversed([*enumerate(self._under_way)]):
            if np.isin(swap.blocks, touched if swap.inward else written).any():
                self._device.wait_for(swap.done)
                del self._under_way[: i + 1]
                return


def _written(batch: AttentionBatch, block_size: int) -> Blocks:
    written: Blocks = batch.slots[batch.slots >= 0] // block_size
    return written


def _touched(batch: AttentionBatch, block_size: int) -> Blocks:
    return np.concatenate([_written(batch, block_size), batch.block_tables.ravel()])


def runs_of(pairs: I32) -> list[tuple[int, int, int]]:
    """Pairs of blocks (source, target) as runs (first source, first target, how many) of blocks that lie side by side in both."""
    pairs = pairs[np.argsort(pairs[:, 0])]
    starts = np.flatnonzero(np.r_[len(pairs) > 0, (np.diff(pairs, axis=0) != 1).any(axis=1)])
    counts = np.diff(np.r_[starts, len(pairs)])
    return [(int(source), int(target), int(count)) for (source, target), count in zip(pairs[starts], counts, strict=True)]
