"""EmuDevice: the kernels on the CPU, through the SIMT emulator; arrays are NumPy's, in guarded memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

import kernels_cu
from cupaged.backends import emu
from cupaged.backends.launch import Launch, Variant

Array = npt.NDArray[Any]

LAZY_BYTES = 64 << 20
"""From here on arrays of the fast mode are not poisoned: a pool takes the memory that is used of it, and no time."""


class EmuDevice:
    """Implements device.Device. See cupaged.backends.emu for `mode`, `schedule` and `seed`.

    Raises BackendError where no C++ compiler is found, KernelError for a kernel that breaks a rule.
    """

    name = "emu"
    capability = (8, 0)
    multiprocessors = 2

    def __init__(self, mode: emu.Mode = "fast", schedule: emu.Schedule = "forward", seed: int = 0) -> None:
        emu.find_compiler()  # not only at the first launch
        self._mode, self._schedule, self._seed = mode, schedule, seed
        self._kernels: dict[Variant, emu.Kernel] = {}

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        if self._mode == "fast" and math.prod(shape) * np.dtype(dtype).itemsize > LAZY_BYTES:
            return np.empty(shape, dtype)
        return emu.empty(shape, dtype)

    def empty_host(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        return self.empty(shape, dtype)

    def upload(self, array: Array) -> Array:
        return emu.array(array)

    def fill(self, target: Array, content: Array) -> None:
        target[...] = content
        emu.wrote(target)

    def download(self, array: Array) -> Array:
        return array

    def peek(self, array: Array) -> Array | None:
        return array

    def launch(self, launch: Launch) -> None:
        if not launch.is_empty:
            kernel = self._kernel(launch.variant)
            kernel.max_dynamic_shared_size_bytes = launch.shared_bytes
            kernel(launch.grid, launch.block, launch.arguments, shared_mem=launch.shared_bytes)

    def gemm(self, x: Array, weight: Array, out: Array, *, add: bool = False) -> None:
        wide = np.matmul(x.astype(np.float32, copy=False), weight.astype(np.float32, copy=False).T)
        out[...] = (wide + out if add else wide).astype(out.dtype, copy=False)

    def _kernel(self, variant: Variant) -> emu.Kernel:
        if variant not in self._kernels:
            module = emu.Module(
                kernels_cu.source(variant.source), variant.options, name=variant.source, mode=self._mode, schedule=self._schedule, seed=self._seed
            )
            self._kernels[variant] = module.get_function(variant.kernel)
        return self._kernels[variant]
