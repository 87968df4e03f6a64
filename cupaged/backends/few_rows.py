"""FewRows: up to how many rows a product is one of our own kernels, and with more cuBLAS's. Measured, where there is a clock.

Our kernels only read the weights, and have the norm before a product and the activation behind it inside; cuBLAS multiplies
faster and is two or three launches. Where they cross depends on the GPU, the matrices and the type. So before the first
forward pass is recorded the model's own products run both ways, one after the other as in a step, so that what a cache
holds of the weights is what it will hold. With graphs it is their replays that are timed.

The answer is kept in the cache folder, for this GPU, cuBLAS, kernels and matrices: later starts only read it, and compute the
same bits.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import kernels_cu
from cupaged.backends import kernel_specs as specs
from cupaged.backends.base import Array, Backend, Matrix
from cupaged.backends.device import Device
from cupaged.errors import ConfigError
from cupaged.folders import cache_dir

SKINNY_ROWS = 4
"""The kernels take no more. What counts as few where nothing can be measured."""

COUNTS = (1, 2, 4)
"""Numbers of rows that are tried: those that graphs have."""

REPEATS = 5
"""The fastest counts: all that can happen to a measurement makes it slower."""

_SPECS = (specs.SKINNY_MATMUL, specs.SKINNY_GATE_UP, specs.RMS_NORM, specs.SILU_MUL, specs.ADD_BIAS)
_EPS = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A matrix [out, in] that was loaded, and what it is for: "plain", "norm" (behind one) or "gate" (that too, and gated)."""

    matrix: Matrix
    shape: tuple[int, int]
    role: str


class FewRows:
    """`most` is up to how many rows our own kernels multiply; 0: never."""

    def __init__(self, device: Device, dtype: np.dtype[Any], *, graphs: bool) -> None:
        self.most = SKINNY_ROWS
        self._device, self._dtype, self._graphs = device, dtype, graphs
        self._products: list[Product] = []

    def loaded(self, matrix: Matrix, shape: tuple[int, int], role: str) -> None:
        """A matrix of the model: it will be among what is timed."""
        if self._device.kind is not None:
            self._products.append(Product(matrix, shape, role))

    def settle(self, ops: Backend) -> None:
        """Decide for the matrices loaded since the last time, if any: what was kept, else what is measured.

        `ops` are the operations of the backend that this belongs to. Raises BackendError in a captured region.
        """
        products, self._products = self._products, []
        if not products:
            return
        key = self._key(products)
        kept = _read(key)
        if kept is not None:
            self.most = kept
            return
        seconds = self.measure(ops, products)
        self.most = few(seconds)
        _write(key, {"seconds": seconds, "few_rows": self.most})

    def measure(self, ops: Backend, products: Iterable[Product]) -> dict[int, tuple[float, float]]:
        """Seconds of all products by number of rows: (ours, cuBLAS's). Goes on to more rows as long as ours are not slower."""
        before, seconds = self.most, dict[int, tuple[float, float]]()
        try:
            work = [self._calls(ops, product) for product in products]
            for rows in COUNTS:
                seconds[rows] = (self._seconds(work, rows, most=SKINNY_ROWS), self._seconds(work, rows, most=0))
                if seconds[rows][0] > seconds[rows][1]:
                    break
        finally:
            self.most = before
        return seconds

    def _seconds(self, work: list[Callable[[int], None]], rows: int, *, most: int) -> float:
        """Of all work with that many rows, if `most` is where few rows end."""
        self.most = most

        def run() -> None:
            for call in work:
                call(rows)

        run()  # compiles the kernels
        timed = self._device.capture(run).replay if self._graphs else run
        timed()  # the first replay sends the graph
        return min(self._device.seconds(timed) for _ in range(REPEATS))

    def _calls(self, ops: Backend, product: Product) -> Callable[[int], None]:
        """The operation that a step does with this matrix, for any few rows."""
        matrix, (outputs, inputs) = product.matrix, product.shape
        x, normed, out = self._ones(inputs), self._ones(inputs), self._ones(outputs)
        if product.role == "plain":
            return lambda rows: ops.linear_add(x[:rows], matrix, out[:rows])
        norm = self._device.upload(np.ones(inputs, np.float32))
        if product.role == "norm":
            return lambda rows: ops.norm_linear(x[:rows], norm, _EPS, matrix, normed[:rows], out[:rows])
        gated = self._ones(outputs // 2)
        return lambda rows: ops.norm_linear_silu_mul(x[:rows], norm, _EPS, matrix, normed[:rows], out[:rows], gated[:rows])

    def _ones(self, width: int) -> Array:
        return self._device.upload(np.ones((SKINNY_ROWS, width), self._dtype))

    def _key(self, products: list[Product]) -> dict[str, Any]:
        """All that the answer depends on."""
        kernels = hashlib.sha256("".join(kernels_cu.source(spec.source) for spec in _SPECS).encode()).hexdigest()
        shapes = Counter((product.role, *product.shape) for product in products)
        return {
            "device": self._device.kind, "dtype": self._dtype.name, "graphs": self._graphs, "kernels": kernels,
            "products": [[*shape, count] for shape, count in sorted(shapes.items())],
        }  # fmt: skip


def few(seconds: dict[int, tuple[float, float]]) -> int:
    """The largest number of rows up to which our kernels are not slower; fewer launches are worth a tie."""
    return max((rows for rows, (ours, theirs) in seconds.items() if ours <= theirs), default=0)


def _path(key: dict[str, Any]) -> Path:
    return cache_dir() / "few_rows" / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}.json"


def _read(key: dict[str, Any]) -> int | None:
    """What was kept; None for nothing, or nothing that makes sense."""
    try:
        most = json.loads(_path(key).read_text(encoding="utf-8"))["few_rows"]
    except (OSError, ConfigError, ValueError, KeyError, TypeError):  # ConfigError: this user has no home
        return None
    return most if most in (0, *COUNTS) else None


def _write(key: dict[str, Any], content: dict[str, Any]) -> None:
    """Whole or not at all: others may start at the same time. Where nothing can be kept, the next start measures again."""
    with suppress(OSError, ConfigError):
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            new = Path(folder) / path.name
            new.write_text(json.dumps(key | content, indent=1), encoding="utf-8")
            os.replace(new, path)
