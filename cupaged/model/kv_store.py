"""KVStore: the pool's memory. Blocks are numbers elsewhere; here they are keys and values of every layer."""

from __future__ import annotations

from cupaged.backends.base import Array, Backend
from cupaged.config import ModelConfig
from cupaged.step_plan import StepPlan


class KVStore:
    """key and value, each [num_layers, num_blocks, num_kv_heads, block_size, head_dim], on the backend.

    A block of one head is contiguous: an attention kernel reads it in one run. Uninitialised at first.
    """

    def __init__(self, backend: Backend, config: ModelConfig, num_blocks: int, block_size: int) -> None:
        self._backend = backend
        self.key, self.value = backend.new_kv_cache(
            config.num_layers, num_blocks, config.num_kv_heads, block_size, config.head_dim
        )

    def layer(self, index: int) -> tuple[Array, Array]:
        """One layer's key and value pools, each [num_blocks, num_kv_heads, block_size, head_dim]."""
        return self.key[index], self.value[index]

    def move_blocks(self, plan: StepPlan) -> None:
        """Carry out the plan's copies, before the step writes anything."""
        if len(plan.copies):
            self._backend.copy_blocks(self.key, self.value, plan.copies)
