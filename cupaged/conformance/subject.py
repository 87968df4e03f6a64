"""Subject: a backend under check, and what its types let one expect of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupaged.backends import kernel_dtypes, open_backend
from cupaged.backends.base import Array, Backend
from cupaged.backends.emu import Mode
from cupaged.backends.emu_device import EmuDevice
from cupaged.backends.kernels import KernelBackend
from cupaged.conformance.case import expect, expect_close

Numbers = npt.NDArray[Any]

RIM = 7.25
"""What stands around a result, a number that every type holds."""

TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2, "int8": 5e-2, "fp8": 6.5e-2}
"""How far a number that is kept in a type may be off, as a share of the largest one of its array."""

@dataclass(frozen=True, eq=False)
class Subject:
    """dtype: what the backend keeps weights in; kv_dtype: keys and values. Names of EngineConfig's."""

    backend: Backend
    dtype: str = "float32"
    kv_dtype: str = "float32"

    @property
    def activations(self) -> np.dtype[Any]:
        return self.backend.activations

    @property
    def tolerance(self) -> float:
        """Of what is computed from inputs that the types hold."""
        return max(TOLERANCES[self.activations.name], TOLERANCES["int8"] if self.kv_dtype == "int8" else 0)

    @property
    def kv_tolerance(self) -> float:
        """Of a number that was written to the cache."""
        return max(TOLERANCES[self.kv_dtype], self.tolerance)

    def random(self, seed: int, *shape: int) -> Numbers:
        """float32 numbers that weights and activations hold exactly."""
        return rounded(random(seed, *shape), self.dtype)

    def upload(self, numbers: Numbers) -> Array:
        """Activations on the device."""
        return self.backend.upload(np.ascontiguousarray(numbers.astype(self.activations)))

    def download(self, array: Array) -> Numbers:
        return self.backend.download(array)

    def output(self, *shape: int) -> Output:
        return Output(self, np.full(shape, np.nan, np.float32))

    def in_place(self, numbers: Numbers) -> Output:
        """An output that holds something already."""
        return Output(self, numbers)


class Output:
    """An array to write in full, with a rim of rows around it that must not change."""

    def __init__(self, subject: Subject, content: Numbers) -> None:
        rim = np.full((2, *content.shape[1:]), RIM, np.float32)
        self._subject = subject
        self._whole = subject.upload(np.concatenate([rim, content, rim]))
        self.array: Array = self._whole[2:-2]

    def numbers(self) -> Numbers:
        """What was written, in float32."""
        whole = self._subject.download(self._whole).astype(np.float32)
        expect((whole[:2] == RIM).all() and (whole[-2:] == RIM).all(), "rows before or behind the result were written")
        return whole[2:-2]

    def check(self, expected: Numbers, tolerance: float | None = None) -> None:
        expect_close(self.numbers(), expected, self._subject.tolerance if tolerance is None else tolerance)


def open_subject(
    device: str, dtype: str = "float32", kv_dtype: str = "float32", *, threads: int | None = 1, mode: Mode = "fast", announce: Callable[[str], None] | None = None
) -> Subject:  # fmt: skip
    """The backend of an EngineConfig's device in these types. `mode` is the emulator's, `announce` as open_backend's.

    Raises ConfigError and BackendError as open_backend does.
    """
    if device == "emu" and mode != "fast":
        backend: Backend = KernelBackend(EmuDevice(mode), *kernel_dtypes(dtype, kv_dtype))
    else:
        backend = open_backend(device, threads, announce, dtype, kv_dtype)
    return Subject(backend, dtype, kv_dtype)


def random(seed: int, *shape: int) -> Numbers:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def rounded(numbers: Numbers, dtype: str) -> Numbers:
    """The nearest numbers that a type holds, in float32; int8 (whose scale is the backend's) leaves them as they are."""
    types = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "fp8": ml_dtypes.float8_e4m3fn}
    return numbers.astype(types.get(dtype, np.float32)).astype(np.float32)


def float64(numbers: Numbers) -> npt.NDArray[np.float64]:
    return numbers.astype(np.float64)
