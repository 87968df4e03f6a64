"""KVStore: the pool's memory. Blocks are numbers elsewhere; here they are keys and values of every layer."""

from __future__ import annotations

import numpy as np

from cupaged.backends.base import Backend, Cache
from cupaged.config import ModelConfig
from cupaged.step_plan import StepPlan


class KVStore:
    """Keys and values of num_blocks blocks of block_size slots, for every layer, on the backend.

    A block of one head is contiguous: an attention kernel reads it in one run. Uninitialised at first. Beside the pool
    there may be a swap space of the same form in host memory.
    """

    def __init__(
        self, backend: Backend, config: ModelConfig, num_blocks: int, block_size: int, num_swap_blocks: int = 0
    ) -> None:
        self._backend = backend
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (config.num_kv_heads, block_size, config.head_dim)
        self.key, self.value = backend.new_kv_cache(config.num_layers, num_blocks, *shape)
        self._host = backend.new_swap_space(config.num_layers, num_swap_blocks, *shape)

    def layer(self, index: int) -> tuple[Cache, Cache]:
        """One layer's key and value pools."""
        return self.key[index], self.value[index]

    def move_blocks(self, plan: StepPlan) -> None:
        """Carry out the plan's swaps and copies, before the step writes anything.

        Out comes first: the blocks that it leaves may be the targets of all the others, or the step computes into them. Those
        are the first of all to go: a device that swaps beside its steps lets the step wait for no more than them.
        """
        pool = self.key, self.value
        if len(plan.swap_out):
            soon = np.isin(plan.swap_out[:, 0], plan.written_blocks)
            for part in (plan.swap_out[soon], plan.swap_out[~soon]):
                self._backend.swap_blocks(pool, self._host, part)
        if len(plan.swap_in):
            self._backend.swap_blocks(self._host, pool, plan.swap_in)
        if len(plan.copies):
            self._backend.copy_blocks(*pool, plan.copies)
