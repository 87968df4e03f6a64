"""Both: a device's backend beside the plain NumPy definition of every operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import ml_dtypes  # noqa: F401  # gives NumPy bfloat16 and float8_e4m3fn
import numpy as np

from cupaged.backends.base import Backend
from cupaged.backends.device import Array, Device
from cupaged.backends.kernels import KernelBackend
from cupaged.backends.reference import ReferenceBackend
from gpu.cases import Failure

TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2}
"""How far a result may be off, as a share of the largest number."""


class Stored:
    """A TensorSource over an array."""

    name, storage = "tensor", "F32"

    def __init__(self, array: np.ndarray) -> None:
        self._array, self.shape = array, array.shape

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self._array[start:stop].copy()

    def read_blocks(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self.read(start, stop).view(np.uint8)


def rounded(seed: int, dtype: str, *shape: int) -> np.ndarray:
    """float32 numbers that the type holds."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype).astype(np.float32)


class Both:
    """The device's backend in a type, and the definition beside it."""

    def __init__(self, device: Device, dtype: str, kv_dtype: str | None = None) -> None:
        self.device, self.dtype, self.kv_dtype = device, dtype, kv_dtype or dtype
        self.reference = ReferenceBackend()

    @cached_property
    def backend(self) -> KernelBackend:
        return KernelBackend(self.device, self.dtype, self.kv_dtype, graphs=False)

    def upload(self, numbers: np.ndarray) -> Array:
        return self.backend.upload(np.ascontiguousarray(numbers.astype(self.dtype)))

    def compare(self, shape: tuple[int, ...], run: Callable[[Backend, Callable[[np.ndarray], Array], Array], None], start: np.ndarray | None = None) -> float:
        """`run(backend, upload, out)` on both; how far the device's result is off. Raises Failure where it is too far."""
        expected = np.full(shape, np.nan, np.float32) if start is None else start.copy()
        ours = self.upload(expected)
        run(self.backend, self.upload, ours)
        run(self.reference, lambda numbers: numbers, expected)
        return self.close(self.backend.download(ours), expected)

    def close(self, ours: np.ndarray, expected: np.ndarray, tolerance: float | None = None) -> float:
        allowed = TOLERANCES[self.dtype] if tolerance is None else tolerance
        wide = ours.astype(np.float32)
        apart = float(np.abs(wide - expected).max(initial=0) / np.abs(expected).max(initial=1e-30))
        if not (np.isfinite(wide).all() and apart <= allowed):
            raise Failure(f"{apart:.2g} off, {allowed} is allowed" if np.isfinite(wide).all() else "there are numbers that are none")
        return apart
