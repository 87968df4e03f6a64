"""Products of few rows, with the norms before them and the activation behind: our own kernels, which only read the weights,
against cuBLAS. Where they cross an engine finds at its start, on its own matrices; here it is asked for the same layer.

ours     one launch a product: norms and activation are inside
apart    our product, norms and activation as launches of their own
cuBLAS   its product, norms and activation as launches of their own: what a step of more rows does
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

import kernels_cu
from cupaged.backends.device import Array
from cupaged.backends.few_rows import FewRows, few
from cupaged.backends.few_rows import Product as Loaded
from cupaged.backends.kernel_specs import RMS_NORM, SILU_MUL, SKINNY_GATE_UP, SKINNY_MATMUL
from cupaged.backends.kernels import DeviceMatrix, KernelBackend
from gpu.bench import BF16, Bench
from gpu.cases import Case, Figures

MODELS = {
    "Llama 8B": {"qkv": (6144, 4096), "output": (4096, 4096), "gate and up": (28672, 4096), "down": (4096, 14336)},
    "SmolLM2-135M": {"qkv": (960, 576), "output": (576, 576), "gate and up": (3072, 576), "down": (576, 1536)},
}
"""Matrices of a layer as (out, in)."""

TINY_MODELS = {"tiny": {"qkv": (40, 32), "gate and up": (48, 32), "down": (24, 64)}}
NORMED, GATED = ("qkv", "gate and up"), ("gate and up",)
"""Matrices with a norm before them; with an activation behind them."""

FEWEST_CALLS = 10
EPS = 1e-5


def most_rows() -> int:
    """That our kernels take at once; more are several launches."""
    found = re.search(r"MOST_ROWS = (\d+)", kernels_cu.source(SKINNY_MATMUL.source))
    assert found, "the kernel has no MOST_ROWS"
    return int(found[1])


class Product:
    """One of a layer's products of so many rows, in each of the three ways."""

    def __init__(self, bench: Bench, name: str, shape: tuple[int, int], rows: int) -> None:
        outputs, inputs = shape
        device = self._device = bench.device
        self._has_norm, self._has_gate = name in NORMED, name in GATED
        ((self._x,),) = bench.numbers((rows, inputs))
        self._norm, self._nothing = device.upload(np.ones(inputs, np.float32)), device.empty((0,), np.float32)
        self._normed, self._out = device.empty((rows, inputs), BF16), device.empty((rows, outputs), BF16)
        self._activated = device.empty((rows, outputs // 2), BF16)
        self._pieces = [slice(start, start + most_rows()) for start in range(0, rows, most_rows())]

    def ours(self, weight: Array) -> None:
        if not self._has_gate:
            self._multiply(self._x, weight, normed=int(self._has_norm))
            return
        for rows in self._pieces:
            self._device.launch(
                SKINNY_GATE_UP.bind(x=self._x[rows], norm=self._norm, eps=EPS, weight=weight, bias=self._nothing, out=self._activated[rows])
            )

    def apart(self, weight: Array) -> None:
        self._around(lambda x: self._multiply(x, weight, normed=0))

    def cublas(self, weight: Array) -> None:
        self._around(lambda x: self._device.gemm(x, weight, self._out))

    def _around(self, multiply: Callable[[Array], None]) -> None:
        if self._has_norm:
            self._device.launch(RMS_NORM.bind(x=self._x, weight=self._norm, eps=EPS, out=self._normed))
        multiply(self._normed if self._has_norm else self._x)
        if self._has_gate:
            self._device.launch(SILU_MUL.bind(gate_up=self._out, out=self._activated))

    def _multiply(self, x: Array, weight: Array, *, normed: int) -> None:
        norm = self._norm if normed else self._nothing
        for rows in self._pieces:
            self._device.launch(
                SKINNY_MATMUL.bind(x=x[rows], norm=norm, eps=EPS, weight=weight, bias=self._nothing, out=self._out[rows], add=0, normed=normed)
            )


def skinny(bench: Bench) -> Iterator[Case]:
    verdict: dict[str, dict[int, bool]] = {}
    for model, matrices in (TINY_MODELS if bench.tiny else MODELS).items():
        for rows in (1, 5) if bench.tiny else range(1, 17):
            yield Case(f"a layer of {model}, {rows} rows", partial(_layer, bench, matrices, rows, verdict.setdefault(model, {})))
        yield Case(f"{model}: our kernels up to", partial(_verdict, bench, matrices, verdict[model]))


def _layer(bench: Bench, matrices: dict[str, tuple[int, int]], rows: int, faster: dict[int, bool]) -> Figures:
    ours = apart = cublas = 0.0
    for name, (outputs, inputs) in matrices.items():
        copies = bench.copies(BF16.itemsize * outputs * inputs)
        weights = [weight for (weight,) in bench.numbers((outputs, inputs), copies=copies)]
        product = Product(bench, name, (outputs, inputs), rows)
        ours += _seconds(bench, weights, product.ours)
        apart += _seconds(bench, weights, product.apart)
        cublas += _seconds(bench, weights, product.cublas)
    read = BF16.itemsize * sum(outputs * inputs for outputs, inputs in matrices.values())
    faster[rows] = ours <= cublas
    return {
        "ours us": 1e6 * ours, "apart us": 1e6 * apart, "cuBLAS us": 1e6 * cublas, "ours % of the probe": 100 * read / ours / bench.bandwidth,
        "cuBLAS % of the probe": 100 * read / cublas / bench.bandwidth, "faster": "ours" if faster[rows] else "cuBLAS",
    }  # fmt: skip


def _seconds(bench: Bench, weights: list[Array], multiply: Callable[[Array], None]) -> float:
    calls = max(len(weights), 1 if bench.tiny else FEWEST_CALLS)

    def work() -> None:
        for i in range(calls):
            multiply(weights[i % len(weights)])

    return bench.clock.time(work).median / calls


def _verdict(bench: Bench, matrices: dict[str, tuple[int, int]], faster: dict[int, bool]) -> Figures:
    best = 0
    while faster.get(best + 1):
        best += 1
    return {"faster": f"{best} rows; an engine chooses {_chosen(bench, matrices)} of at most {most_rows()}"}


def _chosen(bench: Bench, matrices: dict[str, tuple[int, int]]) -> int:
    """Up to how many rows an engine would take our kernels for a model of such layers."""
    copies = bench.copies(BF16.itemsize * sum(outputs * inputs for outputs, inputs in matrices.values()))
    nothing, backend = bench.device.empty((0,), np.float32), KernelBackend(bench.device, BF16)
    products = [
        Loaded(DeviceMatrix(weight, nothing), shape, "gate" if name in GATED else "norm" if name in NORMED else "plain")
        for layer in bench.numbers(*matrices.values(), copies=copies)
        for (name, shape), weight in zip(matrices.items(), layer, strict=True)
    ]
    return few(FewRows(bench.device, BF16, graphs=True).measure(backend, products))
