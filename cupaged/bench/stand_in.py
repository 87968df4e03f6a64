"""An engine whose model answers at random: for what is counted, not timed, and does not depend on what a model says.

The scheduler, the cache and the engine around it are the real ones. Candidates for beams are the likeliest of 200 tokens
with normal logits of standard deviation 3: the best has a probability of about a half, as in a model of language.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupaged.cache.eviction import POLICIES as EVICTIONS
from cupaged.cache.manager import CacheManager
from cupaged.config import EngineConfig, ModelConfig
from cupaged.engine import Engine
from cupaged.policy import POLICIES as QUEUES
from cupaged.scheduler import Scheduler
from cupaged.step_plan import FloatArray, IntArray, ModelOutput, StepPlan

VOCABULARY = 1 << 16


class RandomModel:
    """Answers every plan at random, the same way for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def run(self, plan: StepPlan) -> ModelOutput:
        found = {item.seq_id: self._candidates(item.num_candidates) for item in plan.sequences if item.num_candidates}
        return ModelOutput(self._random.integers(0, VOCABULARY, len(plan.samples), np.int32), candidates=found)

    def _candidates(self, count: int) -> tuple[IntArray, FloatArray]:
        logits = self._random.normal(0, 3, 200)
        best = np.argsort(-logits)[:count]
        return best.astype(np.int32), (logits[best] - np.logaddexp.reduce(logits)).astype(np.float32)


def stand_in(num_blocks: int, seed: int, **options: Any) -> Engine:
    """An engine without a model; `options` are EngineConfig's fields, max_model_len among them."""
    config = EngineConfig(num_blocks=num_blocks, **options)
    model = ModelConfig("llama", VOCABULARY, 8, 8, 1, 1, 1, 8, max_position=config.max_model_len or num_blocks * config.block_size)
    cache = CacheManager(num_blocks, config.block_size, prefix_cache=config.prefix_cache, eviction=EVICTIONS[config.eviction])
    scheduler = Scheduler(
        cache,
        max_num_batched_tokens=config.step_tokens,
        max_num_seqs=config.step_seqs,
        policy=QUEUES[config.queue](),
        preemption=config.preemption,
    )
    return Engine(scheduler, RandomModel(seed), config, model)
