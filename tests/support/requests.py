"""Short ways to build requests and schedulers in tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupaged.beam import BeamSearch
from cupaged.cache.eviction import POLICIES
from cupaged.cache.manager import CacheManager
from cupaged.params import BeamSearchParams, SamplingParams
from cupaged.policy import POLICIES as QUEUES
from cupaged.scheduler import Scheduler
from cupaged.sequence import Request
from tests.support.integer_model import SWAP_BLOCKS


def make_request(
    name: str, prompt: list[int] | np.ndarray, max_tokens: int = 4, *, eos: tuple[int, ...] = (), salt: str = "", **params: Any
) -> Request:
    return Request(
        name,
        np.array(prompt, np.int32),
        SamplingParams(max_tokens=max_tokens, **params),
        max_len=len(prompt) + max_tokens,
        seed=0,
        eos_ids=frozenset() if params.get("ignore_eos") else frozenset(eos),
        salt=salt,
    )


def make_beam_request(name: str, prompt: list[int], *, eos: frozenset[int] = frozenset(), **params: Any) -> Request:
    beams = BeamSearchParams(**params)
    return Request(
        name,
        np.array(prompt, np.int32),
        SamplingParams(temperature=0, max_tokens=beams.max_tokens),
        max_len=len(prompt) + beams.max_tokens,
        seed=0,
        beam=BeamSearch(beams, beams.max_tokens, eos),
    )


def make_scheduler(
    num_blocks: int, block_size: int = 4, *, budget: int = 64, max_seqs: int = 8, prefix_cache: bool = True, eviction: str = "lru",
    queue: str = "fcfs", preemption: str = "recompute", window: int = 0,
) -> Scheduler:
    cache = CacheManager(num_blocks, block_size, prefix_cache=prefix_cache, eviction=POLICIES[eviction], num_swap_blocks=SWAP_BLOCKS)
    return Scheduler(cache, max_num_batched_tokens=budget, max_num_seqs=max_seqs, policy=QUEUES[queue](), preemption=preemption, window=window)
