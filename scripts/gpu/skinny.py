"""Products of few rows: our own kernel, which only reads the weights, against cuBLAS. Where they cross is SKINNY_ROWS."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

import kernels_cu
from cupaged.backends import kernels
from cupaged.backends.device import Array
from cupaged.backends.kernel_specs import SKINNY_MATMUL
from gpu.bench import BF16, Bench
from gpu.cases import Case, Figures

MODELS = {
    "Llama 8B": {"qkv": (6144, 4096), "output": (4096, 4096), "gate and up": (28672, 4096), "down": (4096, 14336)},
    "SmolLM2-135M": {"qkv": (960, 576), "output": (576, 576), "gate and up": (3072, 576), "down": (576, 1536)},
}
"""Matrices of a layer as (out, in)."""

TINY_MODELS = {"tiny": {"qkv": (40, 32), "down": (24, 64)}}
FEWEST_CALLS = 10


def most_rows() -> int:
    """That the kernel takes at once; more are several launches."""
    found = re.search(r"MOST_ROWS = (\d+)", kernels_cu.source(SKINNY_MATMUL.source))
    assert found, "the kernel has no MOST_ROWS"
    return int(found[1])


def skinny(bench: Bench) -> Iterator[Case]:
    verdict: dict[str, dict[int, bool]] = {}
    for model, matrices in (TINY_MODELS if bench.tiny else MODELS).items():
        for rows in (1, 5) if bench.tiny else range(1, 17):
            yield Case(f"a layer of {model}, {rows} rows", partial(_layer, bench, matrices, rows, verdict.setdefault(model, {})))
        yield Case(f"{model}: our kernel up to", partial(_verdict, verdict[model]))


def _layer(bench: Bench, matrices: dict[str, tuple[int, int]], rows: int, faster: dict[int, bool]) -> Figures:
    ours = cublas = 0.0
    for outputs, inputs in matrices.values():
        copies = bench.copies(BF16.itemsize * outputs * inputs)
        weights = [weight for (weight,) in bench.numbers((outputs, inputs), copies=copies)]
        ((x,),) = bench.numbers((rows, inputs))
        out = bench.device.empty((rows, outputs), BF16)
        ours += _seconds(bench, weights, partial(_own_product, bench, x, out, bench.device.empty((0,), np.float32)))
        cublas += _seconds(bench, weights, partial(_cublas_product, bench, x, out))
    read = BF16.itemsize * sum(outputs * inputs for outputs, inputs in matrices.values())
    faster[rows] = ours <= cublas
    return {
        "ours us": 1e6 * ours, "cuBLAS us": 1e6 * cublas, "ours % of the probe": 100 * read / ours / bench.bandwidth,
        "cuBLAS % of the probe": 100 * read / cublas / bench.bandwidth, "faster": "ours" if faster[rows] else "cuBLAS",
    }  # fmt: skip


def _seconds(bench: Bench, weights: list[Array], multiply: Callable[[Array], None]) -> float:
    calls = max(len(weights), 1 if bench.tiny else FEWEST_CALLS)

    def work() -> None:
        for i in range(calls):
            multiply(weights[i % len(weights)])

    return bench.clock.time(work).median / calls


def _own_product(bench: Bench, x: Array, out: Array, bias: Array, weight: Array) -> None:
    most = most_rows()
    for start in range(0, len(x), most):
        bench.device.launch(SKINNY_MATMUL.bind(x=x[start : start + most], weight=weight, bias=bias, out=out[start : start + most], add=0))


def _cublas_product(bench: Bench, x: Array, out: Array, weight: Array) -> None:
    bench.device.gemm(x, weight, out)


def _verdict(faster: dict[int, bool]) -> Figures:
    best = 0
    while faster.get(best + 1):
        best += 1
    return {"faster": f"{best} rows; SKINNY_ROWS is {kernels.SKINNY_ROWS}"}
