"""compile_kernels: the CPU's kernels compiled now and kept on disk, so that no later start has to.

A start compiles the kernels that its model and options want. Here every width of keys and values and every format of
weights passes once through the operations of a backend, on arrays of a few numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cupaged.backends.base import AttentionBatch, BatchLimits
from cupaged.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from cupaged.backends.cpu import CpuBackend
    from cupaged.backends.cpu_matrix import PackedMatrix


@dataclass(frozen=True, slots=True)
class KernelSet:
    """Kernels for one thing: how many of them had to be compiled (0: all were there), and the seconds."""

    name: str
    compiled: int
    seconds: float


def kernel_folder() -> Path:
    """Where compiled kernels lie. Raises BackendError without Numba, ConfigError where nothing can be kept."""
    try:
        from cupaged.backends import cpu_jit
    except ImportError as error:  # Numba is not there for every platform and Python
        raise BackendError(f"there are no CPU kernels to compile without Numba ({error})") from error
    if cpu_jit.FOLDER is None:
        raise ConfigError("compiled CPU kernels cannot be kept: set CUPAGED_CACHE to a folder that can be written")
    return cpu_jit.FOLDER


def compile_kernels(formats: Sequence[str] = ()) -> Iterator[KernelSet]:
    """What every model needs, then the given formats of weights, by default all: each set when it is compiled.

    Raises ConfigError for a format that does not exist, before anything is compiled, and what `kernel_folder` raises.
    """
    folder = kernel_folder()
    from cupaged.backends.cpu import CpuBackend
    from cupaged.backends.cpu_formats import BLOCK, FORMATS, GROUP
    from cupaged.backends.cpu_kv_numbers import KINDS
    from cupaged.backends.cpu_matrix import Packed, PackedMatrix
    from cupaged.backends.cpu_warm_up import warm_up

    known = {kind.name: kind for kind in FORMATS}
    for name in formats:
        if name not in known:
            raise ConfigError(f"there is no format {name!r} of weights; there are {', '.join(known)}")

    def zeros(name: str) -> PackedMatrix:
        weight = np.zeros(known[name].packed_shape(GROUP, BLOCK), np.uint8)
        return PackedMatrix(BLOCK, GROUP, (Packed(known[name], weight, 0, GROUP),), None)

    backend = CpuBackend(1)
    work: dict[str, Callable[[], None]] = {"what every model needs": partial(warm_up, backend)}
    for kind in KINDS[1:]:
        work[f"keys and values in {kind.name}"] = partial(warm_up, CpuBackend(1, kv_dtype=kind.name))
    for name in formats or known:
        work[f"weights in {name}"] = partial(_use, backend, zeros(name))
    return (_timed(folder, name, do) for name, do in work.items())


def _use(backend: CpuBackend, matrix: PackedMatrix) -> None:
    """The operations that read a matrix, on one row."""
    limits = BatchLimits(rows=1, sequences=1, table_width=1, vocab_size=1, positions=1, num_blocks=1, block_size=1)
    batch, zero = backend.new_batch(limits), np.zeros(1, np.int32)
    nowhere = AttentionBatch(zero, np.full(1, -1, np.int64), zero[None] - 1, np.zeros(2, np.int32), zero, 0, 0)
    backend.set_batch(batch, zero, nowhere)
    x, y = np.zeros((1, matrix.inputs), np.float32), np.zeros((1, matrix.columns), np.float32)
    backend.embedding(matrix, batch, x)
    backend.linear(x, matrix, y)


def _timed(folder: Path, name: str, do: Callable[[], None]) -> KernelSet:
    before, started = _kept(folder), time.perf_counter()
    do()
    return KernelSet(name, _kept(folder) - before, time.perf_counter() - started)


def _kept(folder: Path) -> int:
    """How many compiled kernels there are."""
    return sum(1 for _ in folder.glob("**/*.nbc"))
