"""compile_kernels: the CPU's kernels compiled now and kept on disk, so that no later start has to.

A start compiles the kernels that its model and options want; here every width of keys and values and every format of
weights has its turn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cupaged.backends import cpu_code
from cupaged.backends.cpu import kernels_of, kernels_over
from cupaged.backends.cpu_formats import FORMATS
from cupaged.backends.cpu_kv_numbers import FLOAT32, KINDS
from cupaged.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KernelSet:
    """Kernels for one thing: how many of them had to be compiled (0: all were there), and the seconds."""

    name: str
    compiled: int
    seconds: float


def kernel_folder() -> Path:
    """Where compiled kernels lie. Raises BackendError without Numba, ConfigError where nothing can be kept."""
    folder = cpu_code.folder()
    if folder != cpu_code.kept_folder():
        raise ConfigError("compiled CPU kernels cannot be kept: set CUPAGED_CACHE to a folder that can be written")
    return folder


def compile_kernels(formats: Sequence[str] = ()) -> Iterator[KernelSet]:
    """What every model needs, then the given formats of weights, by default all: each set when it is compiled.

    Raises ConfigError for a format that does not exist, before anything is compiled, and what `kernel_folder` raises.
    """
    kernel_folder()
    known = {kind.name: kind for kind in FORMATS}
    for name in formats:
        if name not in known:
            raise ConfigError(f"there is no format {name!r} of weights; there are {', '.join(known)}")
    work = {"what every model needs": kernels_of(FLOAT32)}
    work |= {f"keys and values in {kind.name}": kernels_of(kind) for kind in KINDS if kind is not FLOAT32}
    work |= {f"weights in {name}": kernels_over(known[name]) for name in formats or known}
    return _compiled(list(work.items()))


def _compiled(work: list[tuple[str, list[str]]]) -> Iterator[KernelSet]:
    """Each set when it is there. The one after it is on its way meanwhile, so that no core waits for another."""
    wanted: list[list[str]] = []
    for _, kernels in work:
        wanted.append([name for name in cpu_code.missing(kernels) if not any(name in before for before in wanted)])
    for i, (name, _) in enumerate(work):
        started = time.perf_counter()
        for kernels in wanted[i : i + 2]:
            cpu_code.prepare(kernels)
        cpu_code.compile_missing(wanted[i])
        yield KernelSet(name, len(wanted[i]), time.perf_counter() - started)
