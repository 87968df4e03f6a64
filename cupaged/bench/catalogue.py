"""The benchmarks there are: the claim, what is expected before the run, defaults, and a setting that makes it fail.

Defaults are made for a small model on two cores, each under a minute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cupaged.bench import hits, memory, overhead, preemption, serving, sharing
from cupaged.bench.lab import Choices, Lab
from cupaged.bench.report import Report


@dataclass(frozen=True)
class Benchmark:
    """One measurement.

    help        a line for the list of commands
    prediction  what is expected, with the bound that decides the verdict
    values      what --values means here; "" where nothing is varied
    contrary    options that make the prediction fail, and why they should
    timed       whether seconds count, so that nothing else should run beside it
    stand_in    whether no model is asked but one that answers at random: then a seed's figures are the same on every machine
    """

    run: Callable[[Lab], Report]
    help: str
    prediction: str
    defaults: Choices
    values: str = ""
    contrary: tuple[str, ...] = ()
    contrary_because: str = ""
    timed: bool = True
    stand_in: bool = False


def _engine(max_model_len: int, num_blocks: int, **more: object) -> dict[str, object]:
    return {"max_model_len": max_model_len, "num_blocks": num_blocks, "block_size": 16, **more}


BENCHMARKS: dict[str, Benchmark] = {
    "throughput": Benchmark(
        serving.throughput,
        "Output tokens a second in one pool: pages against reserving the longest.",
        "paged serves at least 1.5 times the output tokens a second of a cache that reserves the longest sequence for every request",
        Choices(requests=32, workload="sharegpt", engine=_engine(512, 128)),
        contrary=("--requests", "2"),
        contrary_because="two requests fit either way: without pressure on memory there is nothing to gain",
    ),
    "latency": Benchmark(
        serving.latency,
        "Time to first token, between tokens and in all: p50, p90, p99.",
        "from a warm prefix cache, which knows every prompt, the median first token comes in at most 0.8 of the time from a cold one",
        Choices(requests=32, rate=2.0, workload="sharegpt", engine=_engine(512, 512)),
        contrary=("--no-prefix-cache",),
        contrary_because="without the prefix cache the second round is as cold as the first, and chance decides",
    ),
    "rates": Benchmark(
        serving.rates,
        "Normalised latency over the arrival rate, up to saturation.",
        "reserving the longest costs at most 1.25 times paged's latency at the lowest rate and at least 1.3 times at the highest",
        Choices(requests=32, workload="sharegpt", values=(0.25, 1.0, 4.0), engine=_engine(512, 128)),
        "arrival rates, over the measured capacity",
        ("--num-blocks", "640"),
        "a pool that holds the longest sequence of every request takes the pressure away",
    ),
    "fragmentation": Benchmark(
        memory.fragmentation,
        "Where the pool's slots are: tokens, reservation, internal, external.",
        "at least 90 % of what paged gives out holds tokens, and more of the pool than under oracle, more there than under max",
        Choices(requests=24, workload="sharegpt", engine=_engine(512, 96)),
        contrary=("--block-size", "128", "--num-blocks", "12"),
        contrary_because="a block of a quarter of the longest sequence is a reservation again",
        timed=False,
    ),
    "prefix": Benchmark(
        sharing.prefix,
        "Time to first token behind a shared prefix, cold and warm.",
        "behind the longest shared prefix a warm first token comes at least 5 times sooner than without the cache",
        Choices(requests=5, values=(64, 256, 1024), engine=_engine(1280, 240)),
        "lengths of the shared prefix in tokens, ascending",
        ("--values", "16"),
        "a prefix as short as the question leaves most of the work",
    ),
    "eviction": Benchmark(
        hits.eviction,
        "Hit rate by eviction policy and workload (counted).",
        "prefix-weighted eviction finds more than LRU under adversarial prefixes",
        Choices(requests=120, values=(5,), engine=_engine(1024, 320)),
        "sizes of the pool, in longest sequences",
        ("--workload", "chats"),
        "the newest turn of a chat is deep in the tree and was used once: what weighted gives up first",
        timed=False,
        stand_in=True,
    ),
    "queue": Benchmark(
        hits.queue,
        "Hit rate by order of service, against the optimum (counted).",
        "longest prefix first and depth first each find at least 96 % of what an endless cache finds",
        Choices(requests=32, values=(2, 4), engine=_engine(1024, 320)),
        "sizes of the pool, in longest sequences",
        ("--requests", "120"),
        "nobody is passed over more than 32 times: with more requests than that the oldest are served out of order",
        timed=False,
        stand_in=True,
    ),
    "beam": Benchmark(
        sharing.beam,
        "Blocks saved by sharing, for samples and for beams.",
        "beams save more blocks than as many samples, and the widest search at least 35 %",
        Choices(requests=6, values=(2, 4, 6), engine=_engine(512, 512)),
        "sequences of a prompt",
        ("--values", "1"),
        "a single sequence shares with nobody",
        timed=False,
    ),
    "block-size": Benchmark(
        memory.block_size,
        "The same memory in blocks of 4 to 256 tokens.",
        "16 reaches at least 90 % of the best size's speed, and the largest size less than 90 % of 16's",
        Choices(requests=20, workload="sharegpt", values=(4, 8, 16, 32, 64, 128, 256), engine=_engine(512, 64)),
        "block sizes in tokens",
        ("--num-blocks", "768"),
        "with memory to spare for every request, the tail of a large block costs nothing",
    ),
    "chunked-prefill": Benchmark(
        serving.chunked_prefill,
        "Long prompts in chunks: variance of the time to first token.",
        "the smallest chunks give TTFT at most 0.9 times the variance of the largest",
        Choices(requests=24, rate=2.0, workload="alpaca", values=(64, 256, 2048), engine=_engine(1024, 512)),
        "most tokens in a step",
        ("--values", "1024,2048"),
        "chunks that hold every prompt whole are no chunks",
    ),
    "preemption": Benchmark(
        preemption.preemption,
        "A pool that is too small: recompute against swap.",
        "recomputing never takes more than 1.2 times as long as swapping, whatever the block size",
        Choices(requests=16, workload="sharegpt", values=(4, 16, 64), engine=_engine(512, 48)),
        "block sizes in tokens",
        ("--num-blocks", "768"),
        "nothing is preempted where there is room",
    ),
    "overhead": Benchmark(
        overhead.overhead,
        "One request alone: blocks against contiguous memory.",
        "alone, a request decodes within 5 % as fast in blocks as in one run of memory: pages gain it nothing",
        Choices(requests=15, values=(16,), engine=_engine(256, 16)),
        "block sizes in tokens",
        ("--values", "1"),
        "a block of one token makes every step of the attention an indirection",
    ),
}
