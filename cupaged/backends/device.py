"""Device: what KernelBackend needs of a machine that runs CUDA C. EmuDevice is one on the CPU; a GPU is another.

A device owns memory and runs Launches and matrix products in the order in which they are asked for; only swaps go a way of
their own. Its arrays have `shape`, `dtype`, `flags.c_contiguous`, `reshape` and slicing by rows, as NumPy's and CuPy's do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cupaged.backends.download import Download
from cupaged.backends.launch import Launch

Array = Any


class Mailbox(Protocol):
    """Flat device arrays at fixed addresses, whose content comes from the host step by step.

    A graph that was captured while it read them reads what was posted last.
    """

    @property
    def arrays(self) -> Mapping[str, Array]: ...

    def post(self, content: Mapping[str, npt.NDArray[Any]]) -> None:
        """Put each flat host array, of the same type, at the beginning of the device array of its name; in one transfer.
        The host arrays may change afterwards."""
        ...


class Mark(Protocol):
    """A point in the device's work."""

    @property
    def done(self) -> bool:
        """Whether all work before it is."""
        ...


class Graph(Protocol):
    """Work that was captured once, as a CUDA graph is: launches and products with the arrays and numbers of that time."""

    def replay(self) -> None:
        """Ask for all of it again, in order."""
        ...


class Device(Protocol):
    """See the module's docstring. Errors of a kernel are BackendErrors, raised at the launch or at a later download."""

    name: str
    capability: tuple[int, int]
    """The architecture whose kernels it runs: (9, 0) is sm_90."""
    asynchronous: bool
    """Whether it works while the host goes on."""
    multiprocessors: int
    """How many blocks of a kernel that takes a whole multiprocessor run at once."""

    @property
    def kind(self) -> str | None:
        """What measurements of its speed are kept under; None where they mean nothing."""
        ...

    def memory(self) -> tuple[int, int] | None:
        """Bytes of its own memory: free, and all; None where it is the host's."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An uninitialised array in the device's memory."""
        ...

    def empty_host(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An uninitialised array in host memory, which the device can copy from and to by itself."""
        ...

    def mailbox(self, sizes: Mapping[str, tuple[int, npt.DTypeLike]]) -> Mailbox:
        """A mailbox of arrays by (number of elements, type)."""
        ...

    def upload(self, array: npt.NDArray[Any]) -> Array:
        """A device array with the content of a host array, which must not change until the device has got there."""
        ...

    def fill(self, target: Array, content: npt.NDArray[Any]) -> None:
        """Copy a host array of the same shape and type over a contiguous (part of a) device array, or over columns of a matrix.
        The host array may change afterwards."""
        ...

    def download(self, array: Array) -> npt.NDArray[Any]:
        """A host array with the content of a device array; waits for everything asked for before."""
        ...

    def download_later(self, array: Array) -> Download:
        """The same without waiting; what is asked for later may overwrite the device array."""
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

    def swap(self, source: tuple[Array, Array], target: tuple[Array, Array], pairs: npt.NDArray[np.int32], after: Mark) -> Mark:
        """Copy whole blocks between (key, value) arrays [layers, blocks, ...] of the device and of `empty_host`, in every layer;
        pairs int32 [n, 2] (block of `source`, block of `target`), targets distinct.

        Swaps are done in their order, once `after` is done, beside all other work. The mark is behind this one.
        """
        ...

    def mark(self) -> Mark:
        """Behind all that was asked for until now, swaps excepted."""
        ...

    def wait_for(self, mark: Mark) -> None:
        """Nothing that is asked for from now on, swaps excepted, begins before the mark's work is done. The host goes on."""
        ...

    def seconds(self, work: Callable[[], None]) -> float:
        """How long it takes for what `work` asks for; waits for it. Raises BackendError in a captured region."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """What `work` launches and multiplies, without running it. Raises BackendError where it allocates or copies: a
        graph keeps addresses, and nothing else would keep them valid."""
        ...
