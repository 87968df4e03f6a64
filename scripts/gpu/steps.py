"""The forward pass of a decode step, and the head behind it: how many launches they are, what a graph saves over asking for
them one by one, and what it saves at few rows that norms and the activation are inside of the products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from cupaged.backends.base import Array, AttentionBatch, BatchLimits
from cupaged.backends.few_rows import SKINNY_ROWS
from cupaged.backends.kernels import DeviceMatrix, KernelBackend
from cupaged.config import ModelConfig
from cupaged.model.kv_store import KVStore
from cupaged.model.llama import Buffers, Llama, forward, head
from cupaged.model.rope import rope_tables
from cupaged.model.weights import load_weights
from gpu.bench import Bench
from gpu.cases import Case, Figures
from gpu.random_model import SMOLLM2_135M, TINY, checkpoint, weight_bytes

BLOCK = 16
RUNS = 30


class Apart(KernelBackend):
    """Norms and the activation as launches of their own, whatever the number of rows."""

    def norm_linear(self, x: Array, norm: Array, eps: float, matrix: DeviceMatrix, normed: Array, out: Array) -> None:
        self.rms_norm(x, norm, eps, normed)
        self.linear(normed, matrix, out)

    def norm_linear_silu_mul(self, x: Array, norm: Array, eps: float, matrix: DeviceMatrix, normed: Array, work: Array, out: Array) -> None:
        self.rms_norm(x, norm, eps, normed)
        self.linear_silu_mul(normed, matrix, work, out)


class Forward:
    """A random model's forward pass on one decode step of `batch` sequences, up to the logits."""

    def __init__(
        self, bench: Bench, config: ModelConfig, batch: int, context: int, dtype: str = "bfloat16", kind: type[KernelBackend] = KernelBackend
    ) -> None:
        self.backend = backend = kind(bench.device, dtype, graphs=False)
        weights = load_weights(checkpoint(config, dtype), backend)
        cos, sin = rope_tables(config, context)
        model = Llama(config, weights, backend.upload(cos), backend.upload(sin))
        width = context // BLOCK
        kv = KVStore(backend, config, batch * width, BLOCK)
        for cache in (kv.key, kv.value):
            for i in range(config.num_layers):  # what was never written may be NaN
                backend._device.fill(cache[i], np.zeros(cache[i].shape, dtype))
        limits = BatchLimits(batch, batch, width, config.vocab_size, context, kv.num_blocks, BLOCK, config.num_kv_heads, config.head_dim)
        rows, buffers = backend.new_batch(limits), Buffers.allocate(backend, config, batch)
        tables = np.arange(batch * width, dtype=np.int32).reshape(batch, width)
        last = np.full(batch, context - 1, np.int32)
        step = AttentionBatch(last, tables[:, -1].astype(np.int64) * BLOCK + BLOCK - 1, tables, np.arange(batch + 1, dtype=np.int32), last + 1, batch, context)
        backend.set_batch(rows, np.arange(batch, dtype=np.int32), step)
        logits = backend.empty((batch, config.vocab_size), np.float32)

        def run() -> None:
            forward(backend, model, kv, rows, buffers)
            head(backend, model, buffers.hidden, buffers.normed, logits)

        self.run: Callable[[], None] = run


def count_calls(backend: KernelBackend, work: Callable[[], None]) -> tuple[int, int]:
    """(kernels of our own, products by the library) that the work asks for."""
    device, counts = backend._device, {"launch": 0, "gemm": 0}

    def counted(name: str) -> Callable[..., None]:
        honest: Callable[..., None] = getattr(device, name)

        def call(*arguments: Any, **options: Any) -> None:
            counts[name] += 1
            honest(*arguments, **options)

        return call

    for name in counts:
        setattr(device, name, counted(name))
    try:
        work()
    finally:
        for name in counts:
            delattr(device, name)
    return counts["launch"], counts["gemm"]


def steps(bench: Bench) -> Iterator[Case]:
    config = TINY if bench.tiny else SMOLLM2_135M
    for batch in (1, 5) if bench.tiny else (1, 8, 32):
        yield Case(f"{'tiny' if bench.tiny else 'SmolLM2-135M'}, batch {batch}, context {_context(bench)}", partial(_steps, bench, config, batch))


def _context(bench: Bench) -> int:
    return 16 if bench.tiny else 512


def _steps(bench: Bench, config: ModelConfig, batch: int) -> Figures:
    context = _context(bench)
    pass_ = Forward(bench, config, batch, context)
    launches, products = count_calls(pass_.backend, pass_.run)
    eager = bench.clock.wall(pass_.run, 1 if bench.tiny else RUNS)
    replayed = bench.clock.time(pass_.run).median
    floor = (weight_bytes(config) + batch * context * config.kv_bytes_per_token("bfloat16")) / bench.bandwidth
    figures: Figures = {
        "launches": launches, "cuBLAS products": products, "one by one us": 1e6 * eager, "graph us": 1e6 * replayed,
        "a launch in the graph us": 1e6 * replayed / (launches + products), "floor us": 1e6 * floor, "eager / graph": eager / replayed,
    }  # fmt: skip
    if batch <= SKINNY_ROWS:
        apart = Forward(bench, config, batch, context, kind=Apart)
        figures |= {"launches apart": sum(count_calls(apart.backend, apart.run)), "graph apart us": 1e6 * bench.clock.time(apart.run).median}
    return figures
