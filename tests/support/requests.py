"""Short ways to build requests and schedulers in tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupaged.cache.manager import CacheManager
from cupaged.params import SamplingParams
from cupaged.scheduler import Scheduler
from cupaged.sequence import Request


def make_request(name: str, prompt: list[int] | np.ndarray, max_tokens: int = 4, *, eos: tuple[int, ...] = (), **params: Any) -> Request:
    return Request(
        name,
        np.array(prompt, np.int32),
        SamplingParams(max_tokens=max_tokens, **params),
        max_len=len(prompt) + max_tokens,
        seed=0,
        eos_ids=frozenset(eos),
    )


def make_scheduler(num_blocks: int, block_size: int = 4, *, budget: int = 64, max_seqs: int = 8) -> Scheduler:
    return Scheduler(CacheManager(num_blocks, block_size), max_num_batched_tokens=budget, max_num_seqs=max_seqs)
