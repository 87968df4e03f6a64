"""EmuDevice: the kernels on the CPU, through the SIMT emulator; arrays are NumPy's, in guarded memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

import kernels_cu
from cupaged.backends import emu
from cupaged.backends.download import Arrived
from cupaged.backends.launch import Launch, Variant
from cupaged.errors import BackendError

Array = npt.NDArray[Any]

LAZY_BYTES = 64 << 20
"""From here on arrays of the fast mode are not poisoned: a pool takes the memory that is used of it, and no time."""


class EmuMailbox:
    """Implements device.Mailbox. Every array has guards of its own, so a read past its end is seen."""

    def __init__(self, device: EmuDevice, sizes: Mapping[str, tuple[int, npt.DTypeLike]]) -> None:
        self._device = device
        self.arrays = {name: emu.empty((size,), dtype) for name, (size, dtype) in sizes.items()}

    def post(self, content: Mapping[str, Array]) -> None:
        self._device.not_in_a_graph("uploads")
        for name, array in self.arrays.items():
            values = content.get(name, array[:0])
            array[: len(values)] = values
            emu.wrote(array[: len(values)])
            emu.forget(array[len(values) :])  # of an earlier step


class Past:
    """Implements device.Mark where everything is done at once."""

    done = True


class EmuGraph:
    """Implements device.Graph: a list of what to do."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def replay(self) -> None:
        for step in self.work:
            step()


class EmuDevice:
    """Implements device.Device. See cupaged.backends.emu for `mode`, `schedule` and `seed`.

    Raises BackendError where no C++ compiler is found, KernelError for a kernel that breaks a rule.
    """

    name = "emu"
    kind: str | None = None
    capability = (8, 0)
    asynchronous = False
    multiprocessors = 2

    def __init__(self, mode: emu.Mode = "fast", schedule: emu.Schedule = "forward", seed: int = 0) -> None:
        emu.find_compiler()  # not only at the first launch
        self._mode, self._schedule, self._seed = mode, schedule, seed
        self._kernels: dict[Variant, emu.Kernel] = {}
        self._capturing: EmuGraph | None = None

    # ---- memory

    def memory(self) -> None:
        return None

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        self.not_in_a_graph("allocates")
        if self._mode == "fast" and math.prod(shape) * np.dtype(dtype).itemsize > LAZY_BYTES:
            return np.empty(shape, dtype)
        return emu.empty(shape, dtype)

    def empty_host(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        return self.empty(shape, dtype)

    def mailbox(self, sizes: Mapping[str, tuple[int, npt.DTypeLike]]) -> EmuMailbox:
        self.not_in_a_graph("allocates")
        return EmuMailbox(self, sizes)

    def upload(self, array: Array) -> Array:
        self.not_in_a_graph("uploads")
        return emu.array(array)

    def fill(self, target: Array, content: Array) -> None:
        self.not_in_a_graph("uploads")
        target[...] = content
        emu.wrote(target)

    def download(self, array: Array) -> Array:
        self.not_in_a_graph("downloads")
        return array

    def download_later(self, array: Array) -> Arrived:
        self.not_in_a_graph("downloads")
        return Arrived(array)

    def peek(self, array: Array) -> Array | None:
        return array

    # ---- work

    def launch(self, launch: Launch) -> None:
        if not launch.is_empty:
            self._do(lambda: self._run(launch))

    def gemm(self, x: Array, weight: Array, out: Array, *, add: bool = False) -> None:
        def multiply() -> None:
            wide = np.matmul(x.astype(np.float32, copy=False), weight.astype(np.float32, copy=False).T)
            out[...] = (wide + out if add else wide).astype(out.dtype, copy=False)

        self._do(multiply)

    def swap(self, source: tuple[Array, Array], target: tuple[Array, Array], pairs: npt.NDArray[np.int32], after: Any) -> Past:
        self.not_in_a_graph("swaps")
        for old, new in zip(source, target, strict=True):
            emu.copy_blocks(old, new, pairs)
        return Past()

    def mark(self) -> Past:
        return Past()

    def wait_for(self, mark: Any) -> None: ...

    def seconds(self, work: Callable[[], None]) -> float:
        self.not_in_a_graph("measures time")
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    def capture(self, work: Callable[[], None]) -> EmuGraph:
        self.not_in_a_graph("captures")
        graph = self._capturing = EmuGraph()
        try:
            work()
        finally:
            self._capturing = None
        return graph

    def _do(self, step: Callable[[], None]) -> None:
        if self._capturing is None:
            step()
        else:
            self._capturing.work.append(step)

    def not_in_a_graph(self, what: str) -> None:
        if self._capturing is not None:
            raise BackendError(f"a captured region {what}: a graph would keep an address that is not its own")

    def _run(self, launch: Launch) -> None:
        kernel = self._kernel(launch.variant)
        kernel.max_dynamic_shared_size_bytes = launch.shared_bytes
        kernel(launch.grid, launch.block, launch.arguments, shared_mem=launch.shared_bytes)

    def _kernel(self, variant: Variant) -> emu.Kernel:
        if variant not in self._kernels:
            module = emu.Module(
                kernels_cu.source(variant.source), variant.options, name=variant.source, mode=self._mode, schedule=self._schedule, seed=self._seed
            )
            self._kernels[variant] = module.get_function(variant.kernel)
        return self._kernels[variant]
