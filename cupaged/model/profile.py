"""How much of a GPU's memory is left for the KV pool: measured, by a step as large as any will be."""

from __future__ import annotations

import numpy as np

from cupaged.backends.base import Backend
from cupaged.config import EngineConfig
from cupaged.errors import ConfigError
from cupaged.model.kv_store import KVStore
from cupaged.model.llama import Llama
from cupaged.model.runner import Runner
from cupaged.params import SamplingParams
from cupaged.step_plan import SampleSpec, ScheduledSequence, StepPlan


def memory_for_pool(backend: Backend, model: Llama, config: EngineConfig) -> int:
    """Bytes for the pool: gpu_memory_utilization of the GPU's memory, less what others use and weights, activations and
    kernels take, as it is after the largest step of a prompt has run. Raises ConfigError if nothing is left.
    """
    memory = backend.memory()
    assert memory is not None
    total = memory[1]
    rows = min(config.step_tokens, len(model.cos))
    num_blocks = -(-rows // config.block_size)
    runner = Runner(
        backend, model, KVStore(backend, model.config, num_blocks, config.block_size), max_rows=config.step_tokens, max_seqs=config.step_seqs
    )
    runner.run(_largest_step(rows, num_blocks, config.block_size))
    free, _ = backend.memory() or (0, 0)
    own_pool = num_blocks * config.block_size * model.config.kv_bytes_per_token(config.stored_kv)
    left = int(total * config.gpu_memory_utilization) - (total - free) + own_pool
    if left <= 0:
        raise ConfigError(
            f"the model and its activations leave nothing of {config.gpu_memory_utilization:.0%} of the GPU's {total / 2**30:.1f} GiB for the KV pool:"
            " raise gpu_memory_utilization, or lower max_num_batched_tokens or max_num_seqs"
        )
    return left


def _largest_step(rows: int, num_blocks: int, block_size: int) -> StepPlan:
    """One prompt of `rows` tokens and its first token, greedy."""
    sample = SampleSpec(params=SamplingParams(temperature=0), row_id=0, seed=0, index=0)
    prompt = ScheduledSequence(0, 0, np.zeros(rows, np.int32), np.arange(num_blocks, dtype=np.int32), (sample,))
    return StepPlan(0, block_size, (prompt,))
