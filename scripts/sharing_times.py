"""What sharing costs and what it gains, timed: a long system prompt on a real model, and the bookkeeping alone."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sharing_counts
from sharing_counts import BLOCK_SIZE, Figures

from cupaged import LLM, SamplingParams
from cupaged.bench.stand_in import RandomModel
from cupaged.cache.block_pool import BlockPool
from cupaged.cache.prefix_tree import PrefixTree
from cupaged.step_plan import StepRecord

WORKLOAD = Path(__file__).resolve().parent.parent / "tests" / "golden" / "workload.json"
SYSTEM_TOKENS, QUESTION_TOKENS = 1000, 24


def workload() -> list[Figures]:
    loaded: list[Figures] = json.loads(WORKLOAD.read_text(encoding="utf-8"))
    return loaded


# ---- a real model


def questions(count: int) -> list[list[int]]:
    """Prompts of real text: one system prompt, and a question that each has for itself."""
    text = [token for request in workload() for token in request["prompt_ids"]]
    system, rest = text[:SYSTEM_TOKENS], text[SYSTEM_TOKENS:]
    return [system + rest[i * QUESTION_TOKENS : (i + 1) * QUESTION_TOKENS] for i in range(count)]


def system_prompt(model: str, count: int, threads: int | None) -> Figures:
    """Prompts one after another, with and without the tree: tokens computed, and seconds to the first token."""
    result: Figures = {}
    for name, prefix_cache in (("without", False), ("with", True)):
        llm = LLM(model, threads=threads, prefix_cache=prefix_cache, max_num_seqs=4, num_blocks=300, max_model_len=2048)
        records: list[StepRecord] = []
        llm.engine.observers.append(records.append)
        one = SamplingParams(temperature=0, max_tokens=1)
        llm.generate([7] * 32, one)  # compiles and warms up
        records.clear()
        seconds, cached = [], []
        for prompt in questions(count):
            output = llm.generate(prompt, one)[0]
            seconds.append((output.metrics.first_token or 0.0) - output.metrics.arrival)
            cached.append(output.num_cached_tokens)
        result[name] = {"computed": sum(r.num_tokens for r in records), "cached": sum(cached), "seconds": seconds}
    return result


def real_run(model: str, threads: int | None) -> Figures:
    """The golden workload at once on a real model, with the tree: seconds in all, and seconds of planning and booking."""
    engine = LLM(model, threads=threads).engine
    records: list[StepRecord] = []
    engine.observers.append(records.append)
    for each in workload():
        engine.add_request(each["prompt_ids"], SamplingParams(temperature=0, max_tokens=each["max_new_tokens"], ignore_eos=True))
    started = time.perf_counter()
    while engine.has_unfinished():
        engine.step()
    return {
        "seconds": time.perf_counter() - started,
        "bookkeeping": sum(r.schedule_seconds + r.apply_seconds for r in records),
        "steps": len(records),
    }


def bookkeeping(prefix_cache: bool) -> float:
    """Seconds of planning and booking the golden workload's lengths, with prompts that share nothing, and no model."""
    served = sharing_counts.scheduler(4000, max_seqs=64, prefix_cache=prefix_cache)
    model, random = RandomModel(0), np.random.default_rng(0)
    for each in workload():
        prompt = random.integers(0, 1 << 20, len(each["prompt_ids"]))
        served.add(sharing_counts.request(prompt, each["max_new_tokens"]))
    seconds = 0.0
    while served.has_unfinished():
        started = time.perf_counter()
        plan = served.schedule()
        seconds += time.perf_counter() - started
        output = model.run(plan)
        started = time.perf_counter()
        served.apply(plan, output)
        seconds += time.perf_counter() - started
    return seconds


def overhead(model: str, threads: int | None, repeat: int) -> Figures:
    """The tree's cost where nothing is shared: the difference that it makes to the bookkeeping, over a real run."""
    pairs = [(bookkeeping(False), bookkeeping(True)) for _ in range(2 * repeat + 1)]
    off, on = (min(times) for times in zip(*pairs, strict=True))
    run = real_run(model, threads)
    return {"off": off, "on": on, "run": run, "share": (on - off) / run["seconds"]}


# ---- the bookkeeping alone


def tree_speed(num_blocks: int = 100_000, tokens: int = 4000, repeat: int = 200) -> Figures:
    """Milliseconds to match and insert a prompt in a tree of so many blocks; half of each prompt is in it already."""
    per_prompt = tokens // BLOCK_SIZE
    random = np.random.default_rng(0)
    tree = PrefixTree(num_blocks + repeat * per_prompt, BLOCK_SIZE)
    blocks = np.arange(num_blocks + repeat * per_prompt, dtype=np.int32)
    prompts: list[Any] = []
    used = 0
    while used + per_prompt <= num_blocks:
        prompts.append(random.integers(0, 1 << 16, tokens).astype(np.int32))
        tree.insert(prompts[-1], blocks[used : used + per_prompt])
        used += per_prompt
    in_tree = len(tree)
    seconds = []
    for _ in range(repeat):
        prompt = random.integers(0, 1 << 16, tokens).astype(np.int32)
        prompt[: tokens // 2] = prompts[random.integers(len(prompts))][: tokens // 2]
        own = blocks[used : used + per_prompt]
        used += per_prompt
        started = time.perf_counter()
        tree.match(prompt)
        tree.insert(prompt, own)
        seconds.append(time.perf_counter() - started)
    return {"blocks": in_tree, "tokens": tokens, "median_ms": 1e3 * statistics.median(seconds), "worst_ms": 1e3 * max(seconds)}


def allocation_speed(num_blocks: int = 100_000, at_once: int = 64) -> Figures:
    """Microseconds a block to allocate, and to allocate, release and free, `at_once` blocks a call and one a call."""

    def measure(size: int, give_back: bool) -> float:
        pool = BlockPool(num_blocks)
        count = num_blocks // size

        def work() -> None:
            for _ in range(count):
                blocks = pool.allocate(size)
                if give_back and blocks is not None:
                    pool.free(pool.release(blocks))

        return 1e6 * _seconds(work) / (count * size)

    return {
        "at_once": at_once,
        "allocate_us": measure(at_once, False),
        "round_trip_us": measure(at_once, True),
        "single_us": measure(1, False),
    }


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
