"""Device: what KernelBackend needs of a machine that runs CUDA C. EmuDevice is one on the CPU; a GPU is another.

A device owns memory and runs Launches and matrix products in the order in which they are asked for. Its arrays have
`shape`, `dtype`, `flags.c_contiguous`, `reshape` and slicing by rows, as NumPy's and CuPy's do.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt

from cupaged.backends.launch import Launch

Array = Any


class Device(Protocol):
    """See the module's docstring. Errors of a kernel are BackendErrors, raised at the launch or at a later download."""

    name: str
    capability: tuple[int, int]
    """The architecture whose kernels it runs: (9, 0) is sm_90."""
    multiprocessors: int
    """How many blocks of a kernel that takes a whole multiprocessor run at once."""

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An uninitialised array in the device's memory."""
        ...

    def empty_host(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An uninitialised array in host memory that kernels can read and write all the same."""
        ...

    def upload(self, array: npt.NDArray[Any]) -> Array:
        """A device array with the content of a host array, which must not change until the device has got there."""
        ...

    def fill(self, target: Array, content: npt.NDArray[Any]) -> None:
        """Copy a host array of the same shape and type over a contiguous (part of a) device array."""
        ...

    def download(self, array: Array) -> npt.NDArray[Any]:
        """A host array with the content of a device array; waits for everything asked for before."""
        ...

    def peek(self, array: Array) -> npt.NDArray[Any] | None:
        """The array's content where the host can see it for nothing, else None: what is checked before a launch."""
        ...

    def launch(self, launch: Launch) -> None:
        """Run a kernel."""
        ...

    def gemm(self, x: Array, weight: Array, out: Array, *, add: bool = False) -> None:
        """out = x @ weight.T, or out += it, with float32 accumulation; x [rows, in], weight [out, in], out [rows, out], any of float types."""
        ...
