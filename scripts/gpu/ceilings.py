"""What the machine can do at all: reading memory, and multiplying."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from gpu.bench import BF16, BLOCKS, UNROLLS, Bench
from gpu.cases import Case, Figures


def probes(bench: Bench) -> Iterator[Case]:
    """The read-only bandwidth of several grids; the best one is what everything else is measured against."""
    for unroll in UNROLLS:
        for blocks in BLOCKS:
            yield Case(f"{blocks} blocks a multiprocessor, {unroll} loads a thread", partial(_probe, bench, unroll, blocks))
    yield Case("the best", lambda: {"GB/s": bench.bandwidth / 1e9})


def _probe(bench: Bench, unroll: int, blocks: int) -> Figures:
    return {"GB/s": bench.probe(unroll, blocks) / 1e9}


def products(bench: Bench) -> Iterator[Case]:
    """cuBLAS at its best: large square matrices, and a prompt's rows on Llama 8B's widest matrix."""
    sizes = [(64, 64, 64)] if bench.tiny else [(8192, 8192, 8192), (4096, 4096, 28672), (512, 4096, 28672)]
    for rows, inputs, outputs in sizes:
        yield Case(f"{rows} x {inputs} x {outputs}", partial(_product, bench, rows, inputs, outputs))


def _product(bench: Bench, rows: int, inputs: int, outputs: int) -> Figures:
    ((x, weight),) = bench.numbers((rows, inputs), (outputs, inputs))
    out = bench.device.empty((rows, outputs), BF16)
    timing = bench.clock.time(lambda: bench.device.gemm(x, weight, out))
    return {"us": 1e6 * timing.median, "TFLOP/s": 2e-12 * rows * inputs * outputs / timing.median, "best TFLOP/s": 2e-12 * rows * inputs * outputs / timing.best}
