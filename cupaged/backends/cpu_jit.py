"""`kernel`: Numba's njit with the settings all CPU kernels share, and with a disk cache that is never stale.

Numba's own cache does not notice an edit in a function that a cached one calls, and wants to write beside the source,
which may be read-only. So compiled kernels live in the user's cache, in a folder whose name is a hash of everything
that decides their code: the kernel sources, Numba's version and the processor. Where no folder can be written they
are compiled in memory, with one warning.

A kernel is a plain serial function that releases the GIL; cpu_threads.Team runs it in several threads. (Numba's own
parallel regions take five times as long to enter and may not be entered by two threads at once.)
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding
import numba

from cupaged.errors import ConfigError
from cupaged.folders import cache_dir

F = TypeVar("F", bound=Callable[..., Any])

# Sums may be reordered and fused, which vectorises them. NaN and infinity keep their meaning.
_FAST_MATH = {"reassoc", "contract", "arcp", "nsz"}
_READY = "ready"


def kernel(function: F) -> F:
    """Compile at the first call, or load from the disk cache."""
    return _jit(function, _FAST_MATH)


def exact_kernel(function: F) -> F:
    """The same for code whose order of operations matters."""
    return _jit(function, {"contract"})


class OperationKernel:
    """A kernel of a program (cpu_program.py), void(int64 team, int64 operation), by its address.

    Compiled, or loaded from the disk cache, when the address is first asked for.
    """

    def __init__(self, function: Callable[[int, int], None]) -> None:
        self._function = function

    @cached_property
    def address(self) -> int:
        with _own_cache_folder():
            self._compiled: Any = numba.cfunc(
                "void(int64, int64)", error_model="numpy", fastmath={"contract"}, cache=FOLDER is not None
            )(self._function)
        address = self._compiled.address
        assert address is not None
        return address


def operation_kernel(function: Callable[[int, int], None]) -> OperationKernel:
    """Compile a function of two addresses for the table of a program. The order of its sums is kept."""
    return OperationKernel(function)


def _jit(function: F, fast_math: set[str]) -> F:
    with _own_cache_folder():
        compiled = numba.njit(nogil=True, error_model="numpy", fastmath=fast_math, cache=FOLDER is not None)(function)
    return cast(F, compiled)


@contextlib.contextmanager
def _own_cache_folder() -> Iterator[None]:
    """The cache folder is a process-wide setting that is read at decoration: the user's own kernels keep theirs."""
    settings: Any = numba.config
    before = settings.CACHE_DIR
    settings.CACHE_DIR = "" if FOLDER is None else str(FOLDER)
    try:
        yield
    finally:
        settings.CACHE_DIR = before


def kernels_are_cached() -> bool:
    """Whether every kernel of this version has been compiled on this machine; else the first use takes a while."""
    return FOLDER is not None and (FOLDER / _READY).exists()


def mark_cached() -> None:
    """Note that all kernels are in the cache now."""
    if FOLDER is None:
        return
    with contextlib.suppress(OSError):  # the disk filled up: the next start compiles what is missing, and says so
        (FOLDER / _READY).touch()


def _fingerprint() -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("cpu_*.py")):
        digest.update(source.read_bytes())
    machine = (numba.__version__, sys.version, llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features().flatten())
    digest.update(repr(machine).encode())
    return digest.hexdigest()[:16]


def _writable_folder() -> Path | None:
    try:
        folder = cache_dir() / f"kernels-{_fingerprint()}"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, ConfigError) as error:  # ConfigError: this user has no home
        logging.getLogger("cupaged").warning("compiled CPU kernels cannot be kept (%s): every start compiles them again; set CUPAGED_CACHE to a folder that can be written", error)
        return None


FOLDER = _writable_folder()
