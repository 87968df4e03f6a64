"""Decode attention: how near to the bandwidth probe it comes, what block tables cost, and how the kernel is best set up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from cupaged.backends import kernel_attention
from cupaged.backends import kernel_specs as specs
from cupaged.backends.launch import Launch, ceil_div
from cupaged.backends.split_plan import plan_decode
from gpu.bench import BF16, Bench, Heads
from gpu.cases import Case, Failure, Figures

BLOCK = 16
FEWEST_CALLS = 4
KERNELS = ("tuned", "v2")
TARGET = 90
"""Percent of the probe, at batch 32 and 4,096 tokens of context."""

AGREE = 2e-2
"""How far two kernels' results may be apart, as a share of the largest number: both are rounded to bfloat16."""


class Step:
    """One decode step's attention: `batch` sequences of `context` tokens in shuffled blocks, or each in one stretch.

    Both layouts lie over the same memory, so they read the same bytes. Every call takes the next of several pools.
    """

    def __init__(self, bench: Bench, heads: Heads, batch: int, context: int, stages: int | None = None, blocks: int | None = None) -> None:
        self.bench, self.heads, self.batch, self.context = bench, heads, batch, context
        device = bench.device
        best_stages, best_blocks = kernel_attention._decode_shape(device.capability, heads.head_dim)
        self._stages, shares = stages or best_stages, device.multiprocessors * (blocks or best_blocks)
        self.bytes = 2 * BF16.itemsize * batch * context * heads.kv * heads.head_dim
        pool = (batch, heads.kv, context, heads.head_dim)
        self._pools = bench.numbers(pool, pool, copies=bench.copies(self.bytes))
        ((self._qkv,),) = bench.numbers((batch, heads.width))
        self._out = device.empty((batch, heads.query * heads.head_dim), BF16)
        tables = np.random.default_rng(0).permutation(batch * context // BLOCK).astype(np.int32).reshape(batch, -1)
        contexts = np.full(batch, context, np.int32)
        self._tables = {True: device.upload(tables), False: device.upload(np.arange(batch, dtype=np.int32)[:, None])}
        self._positions, self._contexts = device.upload(contexts - 1), device.upload(contexts)
        plan = plan_decode(contexts, heads.kv, shares)
        self._plan = {"items": device.upload(plan.items), "item_start": device.upload(plan.item_start)}
        self._part_start = device.upload(plan.part_start)
        self._part_size = max(kernel_attention.PART_SIZE, ceil_div(context, kernel_attention.MOST_PARTS))
        parts = max(1, ceil_div(context, self._part_size))
        self._partial = {"tuned": self._scratch(len(plan.items), heads.group), "v2": self._scratch(batch, heads.query, parts)}

    def _scratch(self, *shape: int) -> Mapping[str, Any]:
        empty = self.bench.device.empty
        return {"partial_out": empty((*shape, self.heads.head_dim), np.float32), "partial_max": empty(shape, np.float32), "partial_sum": empty(shape, np.float32)}

    def launches(self, kernel: str, paged: bool, pool: int) -> list[Launch]:
        """The two passes of one call."""
        key, value = self._pools[pool % len(self._pools)]
        shape = (-1, self.heads.kv, BLOCK, self.heads.head_dim) if paged else key.shape
        same: dict[str, Any] = {
            "qkv": self._qkv, "key_cache": key.reshape(shape), "value_cache": value.reshape(shape), "block_tables": self._tables[paged],
            "positions": self._positions, "num_heads": self.heads.query, "scale": self.heads.head_dim**-0.5, "window": 0, "paged": int(paged),
        }  # fmt: skip
        partial_, of_merge = self._partial[kernel], {"num_heads": self.heads.query, "head_dim": self.heads.head_dim, "out": self._out}
        if kernel == "v2":
            first = specs.ATTENTION_PARTITION.bind(**same, **partial_, context_lens=self._contexts, part_size=self._part_size)
            return [first, specs.MERGE_PARTITIONS.bind(**partial_, **of_merge)]
        first = specs.PAGED_DECODE.bind(**same, **partial_, **self._plan, stages=self._stages)
        return [first, specs.MERGE_ITEMS.bind(**partial_, **of_merge, part_start=self._part_start, num_kv_heads=self.heads.kv)]

    def run(self, kernel: str, paged: bool, pools: int) -> Callable[[], None]:
        """So many calls, each on the next pool."""
        launches = [launch for pool in range(pools) for launch in self.launches(kernel, paged, pool)]

        def work() -> None:
            for launch in launches:
                self.bench.device.launch(launch)

        return work

    def seconds(self, kernel: str = "tuned", paged: bool = True) -> float:
        """Of one call, from cold memory: the median over replays of a graph of many."""
        calls = max(len(self._pools), 1 if self.bench.tiny else FEWEST_CALLS)
        return self.bench.clock.time(self.run(kernel, paged, calls)).median / calls

    def result(self, kernel: str, paged: bool) -> np.ndarray:
        self.run(kernel, paged, 1)()
        return np.array(self.bench.device.download(self._out)).astype(np.float32)

    def disagreement(self, paged: bool) -> float:
        """How far the two kernels are apart. Raises Failure where it is too far, or a number is none."""
        ours, other = (self.result(kernel, paged) for kernel in KERNELS)
        apart = float(np.abs(ours - other).max() / np.abs(other).max())
        if not apart <= AGREE:
            raise Failure(f"the kernels' results are {apart:.2g} apart")
        return apart


def sizes(bench: Bench) -> list[tuple[Heads, int, int]]:
    """(heads, batch, context) of every measurement."""
    if bench.tiny:
        return [(heads, batch, 32) for heads in bench.heads for batch in (1, 2)]
    return list(product(bench.heads, (1, 8, 32, 128), (1024, 4096, 16384)))


def tuned_seconds(bench: Bench, heads: Heads, batch: int, context: int) -> float:
    """Of the kernel that the engine takes; measured once a run."""
    key = ("decode", heads, batch, context)
    if key not in bench.known:
        bench.known[key] = Step(bench, heads, batch, context).seconds()
    return bench.known[key]


def decode(bench: Bench) -> Iterator[Case]:
    """The share of the probe that the engine's kernel reaches."""
    for heads, batch, context in sizes(bench):
        yield Case(name(heads, batch, context), partial(_decode, bench, heads, batch, context))


def name(heads: Heads, batch: int, context: int) -> str:
    return f"{heads}, batch {batch}, context {context}"


def _decode(bench: Bench, heads: Heads, batch: int, context: int) -> Figures:
    step = Step(bench, heads, batch, context)
    apart = step.disagreement(paged=True)
    seconds = tuned_seconds(bench, heads, batch, context)
    figures: Figures = {"us": 1e6 * seconds, "GB/s": step.bytes / seconds / 1e9, "% of the probe": 100 * step.bytes / seconds / bench.bandwidth}
    return figures | {"target %": TARGET if (batch, context) == (32, 4096) else None, "apart from v2": apart}


def paging(bench: Bench) -> Iterator[Case]:
    """Block tables against contiguous memory, the two-pass kernel of the paper and the tuned one."""
    for heads, batch, context in sizes(bench):
        if bench.tiny or (batch > 1 and heads.query != 8):
            yield Case(name(heads, batch, context), partial(_paging, bench, heads, batch, context))


def _paging(bench: Bench, heads: Heads, batch: int, context: int) -> Figures:
    step = Step(bench, heads, batch, context)
    figures: Figures = {}
    for kernel in KERNELS:
        paged, contiguous = (step.seconds(kernel, paged) for paged in (True, False))
        figures |= {f"{kernel} paged us": 1e6 * paged, f"{kernel} contiguous us": 1e6 * contiguous, f"{kernel} penalty %": 100 * (paged / contiguous - 1)}
    return figures | {"contiguous apart": step.disagreement(paged=False)}


def setups(bench: Bench) -> Iterator[Case]:
    """The tuned kernel with other numbers of stages, and of blocks that share a multiprocessor: is the choice the best?"""
    batch, context = (2, 32) if bench.tiny else (32, 4096)
    for heads in bench.heads[-2:]:
        for stages, blocks in [(2, 2)] if bench.tiny else product((2, 3), (1, 2, 3, 4)):
            yield Case(f"{name(heads, batch, context)}: {stages} stages, {blocks} blocks", partial(_setup, bench, heads, batch, context, stages, blocks))


def _setup(bench: Bench, heads: Heads, batch: int, context: int, stages: int, blocks: int) -> Figures:
    step = Step(bench, heads, batch, context, stages, blocks)
    seconds = step.seconds()
    chosen = kernel_attention._decode_shape(bench.device.capability, heads.head_dim) == (stages, blocks)
    return {"us": 1e6 * seconds, "% of the probe": 100 * step.bytes / seconds / bench.bandwidth, "the engine's": "yes" if chosen else ""}
