"""What sharing saves, counted: the real scheduler and cache manager, and a stand-in for the model that answers at random.

Nothing here is timed, so a figure is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cupaged.beam import BeamSearch
from cupaged.bench.stand_in import RandomModel
from cupaged.cache.eviction import POLICIES
from cupaged.cache.manager import CacheManager
from cupaged.params import BeamSearchParams, SamplingParams
from cupaged.scheduler import Scheduler
from cupaged.sequence import Request

BLOCK_SIZE = 16
LENGTHS = {"Alpaca": (19.31, 58.45), "ShareGPT": (161.31, 337.99)}
"""Mean prompt and output tokens, as the PagedAttention paper has them."""

PAPER = {
    ("Alpaca", "samples"): ("6.1", "8.5", "9.8"),
    ("Alpaca", "beams"): ("37.6", "53.1", "55.2"),
    ("ShareGPT", "samples"): ("16.2 - 30.5",) * 3,
    ("ShareGPT", "beams"): ("44.3 - 66.3",) * 3,
}
"""Its share of blocks saved in percent for 2, 4, 6 sequences; for ShareGPT it gives the range alone."""

SPREAD = 0.8
"""Standard deviation of the logarithm of a length: a few long ones, many short ones."""

Figures = dict[str, Any]


def scheduler(num_blocks: int, *, max_seqs: int = 256, prefix_cache: bool = True, eviction: str = "lru") -> Scheduler:
    cache = CacheManager(num_blocks, BLOCK_SIZE, prefix_cache=prefix_cache, eviction=POLICIES[eviction])
    return Scheduler(cache, max_num_batched_tokens=2048, max_num_seqs=max_seqs)


def request(prompt: Any, max_tokens: int, *, n: int = 1, beams: bool = False) -> Request:
    tokens = np.asarray(prompt, np.int32)
    search = BeamSearch(BeamSearchParams(beam_width=n, max_tokens=max_tokens), max_tokens, frozenset()) if beams else None
    params = SamplingParams(n=1 if beams else n, max_tokens=max_tokens)
    return Request("", tokens, params, max_len=len(tokens) + max_tokens, seed=0, beam=search)


# ---- blocks saved


def draw(random: np.random.Generator, mean: float) -> int:
    """A length around a mean: log-normal."""
    return max(1, round(float(random.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD))))


def blocks_saved(dataset: str, n: int, beams: bool, num_requests: int, seed: int = 0) -> float:
    """Blocks saved by sharing over blocks without sharing, both summed over all steps.

    Requests share nothing with each other, only the n sequences of each do.
    """
    random = np.random.default_rng(seed)
    served, model = scheduler(1 << 16, max_seqs=16 * n, prefix_cache=False), RandomModel(seed)
    prompt_mean, output_mean = LENGTHS[dataset]
    for _ in range(num_requests):
        prompt = random.integers(0, 1 << 20, draw(random, prompt_mean))
        served.add(request(prompt, draw(random, output_mean), n=n, beams=beams))
    saved = without = 0
    while served.has_unfinished():
        plan = served.schedule()
        usage = served.cache.usage()
        saved += usage.blocks_shared
        without += usage.blocks_shared + usage.blocks_used
        served.apply(plan, model.run(plan))
    return saved / without


def saved_table(num_requests: int) -> list[Figures]:
    return [
        {"dataset": dataset, "kind": kind, "n": n, "paper": paper, "saved": blocks_saved(dataset, n, kind == "beams", num_requests)}
        for (dataset, kind), figures in PAPER.items()
        for n, paper in zip((2, 4, 6), figures, strict=True)
    ]


# ---- hit rates


Turns = Iterator[tuple[Any, int, Callable[[list[int]], None]]]
"""(prompt, max_tokens, what to do with all tokens when it is answered)."""


def system_prompts(random: np.random.Generator, count: int) -> Turns:
    """24 system prompts of about 300 tokens, some much in demand, each question new."""
    heads = [random.integers(0, 1 << 20, draw(random, 300)).tolist() for _ in range(24)]
    weights = 1 / np.arange(1, 25)
    for _ in range(count):
        head = heads[random.choice(24, p=weights / weights.sum())]
        yield head + random.integers(0, 1 << 20, draw(random, 40)).tolist(), draw(random, 60), lambda tokens: None


def chats(random: np.random.Generator, count: int) -> Turns:
    """12 conversations at a time that take turns at random; one that grew past 1,500 tokens makes way for a new one."""
    histories: list[list[int]] = [[] for _ in range(12)]
    for _ in range(count):
        place = int(random.integers(12))
        if len(histories[place]) > 1500:
            histories[place] = []

        def remember(tokens: list[int], place: int = place) -> None:
            histories[place] = tokens

        yield histories[place] + random.integers(0, 1 << 20, draw(random, 40)).tolist(), draw(random, 80), remember


def adversarial(random: np.random.Generator, count: int) -> Turns:
    """Four prompts that come again and again, between bursts of long ones that begin alike and never come again."""
    heads = [random.integers(0, 1 << 20, 500).tolist() for _ in range(4)]
    bait = random.integers(0, 1 << 20, 64).tolist()
    for number in range(count):
        if number % 12 < 4:
            yield heads[number % 12] + random.integers(0, 1 << 20, 20).tolist(), 20, lambda tokens: None
        else:
            yield bait + random.integers(0, 1 << 20, 800).tolist(), 20, lambda tokens: None


MIXES = {"system prompts": (system_prompts, 320), "chats": (chats, 640), "adversarial": (adversarial, 320)}
"""What is asked, and a pool (in blocks) that holds a good part of it but not all."""


def hit_rate(mix: str, eviction: str, count: int, num_blocks: int | None = None, seed: int = 0) -> float:
    """Prompt tokens found in the cache over prompt tokens, one request at a time; in the mix's pool or another."""
    turns, usual = MIXES[mix]
    served, model = scheduler(num_blocks or usual, eviction=eviction), RandomModel(seed)
    found = asked = 0
    for prompt, max_tokens, answered in turns(np.random.default_rng(seed), count):
        sequence = served.add(request(prompt, max_tokens))
        while served.has_unfinished():
            plan = served.schedule()
            served.apply(plan, model.run(plan))
        found += sequence.request.num_cached or 0
        asked += len(prompt)
        answered(sequence.tokens.tolist())
    return found / asked


def hit_table(count: int) -> list[Figures]:
    """By mix: the hit rate of each policy, and of a pool that never evicts."""
    return [
        {"mix": mix, **{policy: hit_rate(mix, policy, count) for policy in POLICIES}, "unbounded": hit_rate(mix, "lru", count, 1 << 17)}
        for mix in MIXES
    ]
