"""The GEMM floor: the time of a run's matrix products alone, each at the best speed NumPy reaches here.

A step with T rows multiplies T rows by every matrix of every layer, and the sampled rows by the head. Each product is
timed at exactly that number of rows, in the three forms NumPy offers, over enough copies of the matrices that they come
from memory as they do in a model. No float32 engine on this BLAS can do better; what it needs on top is its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.config import ModelConfig

COPIES = 8
"""Layers' worth of matrices that a product cycles through."""

F32 = npt.NDArray[np.float32]

FORMS: tuple[Callable[[F32, F32], F32], ...] = (
    lambda x, w: x @ w.T,
    lambda x, w: w @ x.T,
    lambda x, w: x @ w.reshape(w.shape[::-1]),  # the speed of a matrix stored [in, out]
)


@dataclass(frozen=True)
class Shapes:
    """Matrices as (out, in): those of one layer, fused as a step multiplies them, and the head."""

    layer: tuple[tuple[int, int], ...]
    head: tuple[int, int]
    num_layers: int

    @classmethod
    def of(cls, config: ModelConfig) -> Shapes:
        hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
        qkv = heads + 2 * config.num_kv_heads * config.head_dim
        layer = ((qkv, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner))
        return cls(layer, (config.vocab_size, hidden), config.num_layers)

    @property
    def weights(self) -> int:
        """Numbers in all of them."""
        return self.num_layers * sum(out * width for out, width in self.layer) + self.head[0] * self.head[1]


@dataclass(frozen=True)
class Costs:
    """Seconds by number of rows: all matrices of one layer, and the head."""

    layer: dict[int, float]
    head: dict[int, float]


def floor_seconds(steps: Iterable[tuple[int, int]], costs: Costs, num_layers: int) -> float:
    """The matrices' time of steps given as (rows, sampled rows)."""
    return sum(num_layers * costs.layer[rows] + (costs.head[sampled] if sampled else 0.0) for rows, sampled in steps)


def gflops(shapes: Shapes, rows: int, seconds: float) -> float:
    """Speed of a layer's products: 2 x rows x out x in operations each."""
    return 2e-9 * rows * sum(out * width for out, width in shapes.layer) / seconds


def measure(shapes: Shapes, rows: Iterable[int], sampled: Iterable[int]) -> Costs:
    generator: Any = np.random.default_rng(0)
    weights = [[generator.standard_normal(shape, np.float32) for shape in shapes.layer] for _ in range(min(COPIES, shapes.num_layers))]
    head = [[generator.standard_normal(shapes.head, np.float32)]] * 3
    return Costs({m: _seconds(weights, m) for m in rows}, {m: _seconds(head, m) for m in sampled})


def _seconds(layers: list[list[F32]], rows: int) -> float:
    """One pass over a layer's matrices, each in its fastest form: the median over the layers."""
    inputs = [np.ones((rows, weight.shape[1]), np.float32) for weight in layers[0]]
    times = [[[_time(form, x, w) for x, w in zip(inputs, layer, strict=True)] for layer in layers] for form in FORMS]
    by_form = [[statistics.median(column) for column in zip(*of_form, strict=True)] for of_form in times]
    return float(sum(min(column) for column in zip(*by_form, strict=True)))


def _time(form: Callable[[F32, F32], F32], x: F32, weight: F32) -> float:
    started = time.perf_counter()
    form(x, weight)
    return time.perf_counter() - started
