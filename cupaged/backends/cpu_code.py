"""The CPU kernels as machine code: a file for each operation, mapped when it is first asked for, compiled when it is missing.

Compiling takes Numba and LLVM, which are a hundred megabytes in memory and a third of a second to import. So other processes do
it (cpu_kernels/compiler.py), several at once, and what they leave is enough to compute: the engine imports neither.

The files lie in the user's cache, in a folder whose name is a hash of everything that decides their content: the sources, the
versions of Numba and LLVM, and the processor. Where no folder can be written they are compiled for this process alone.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import importlib.metadata
import logging
import mmap
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cupaged.backends.cpu_cores import usable_cores
from cupaged.errors import BackendError, ConfigError
from cupaged.folders import cache_dir

OPERATIONS = {
    "attention": "attention", "gemm": "gemm",
    "embedding": "rows", "gather_rows": "rows", "head_rms_norm": "rows", "rms_norm": "rows", "rope_and_cache": "cache",
    "adjust_rows": "sampling", "greedy_rows": "sampling", "logprob_rows": "sampling", "sample_rows": "sampling",
    "take_step": "batch",
    "dismiss": "program", "lead": "program", "run": "program", "serve": "program",
}  # fmt: skip
"""All operations, and the modules of cpu_kernels that hold their sources."""

ENTRY = "operation"
"""The function of a file: void(int64 member, int64 operation)."""

MAGIC, HEADER, HEADER_BYTES = b"cupaged1", struct.Struct("<8sqq"), 64
"""How an image begins; the numbers are its size and the place of its function."""

MAPS_IMAGES = sys.platform == "linux" and platform.machine() == "x86_64"
"""Elsewhere LLVM loads objects, which takes its memory."""

REGISTERS_WANTED = os.environ.get("CUPAGED_CPU_REGISTERS", "")
"""Compile for registers of so many float32 numbers, and for so many of them ("4,32"), instead of for this processor's own: so tests see
the code of other processors."""

Function = Callable[[int, int], None]

_loaded: dict[str, int] = {}


def address(operation: str, number: int | None = None) -> int:
    """Where an operation's function is in memory; `number` where it comes in several. Raises what `compile_missing` raises."""
    name = operation if number is None else f"{operation}-{number}"
    if name not in _loaded:
        compile_missing([name])
        _loaded[name] = (map_image if MAPS_IMAGES else load_object)(_find(name) or code_file(folder(), name))
    return _loaded[name]


def loaded(operation: str) -> list[int]:
    """The functions of an operation that were asked for, whatever their number."""
    return [at for name, at in _loaded.items() if name.partition("-")[0] == operation]


def function(operation: str) -> Function:
    """An operation to be called from Python. It runs without the GIL, and no interrupt reaches it."""
    made: Function = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(address(operation))
    return made


# ---- files


@cache
def kept_folder() -> Path | None:
    """The folder in the user's cache, which may not be there yet; None for a user without a home. Raises BackendError without Numba."""
    try:
        return cache_dir() / f"kernels-{_fingerprint()}"
    except ConfigError:
        return None


@cache
def folder() -> Path:
    """Where what is missing is compiled to: that folder, else one for this process alone. Raises BackendError without Numba."""
    place = kept_folder()
    try:
        if place is None:
            raise OSError("this user has no home")
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            return place
    except OSError as error:
        advice = "every start compiles them again; set CUPAGED_CACHE to a folder that can be written"
        logging.getLogger("cupaged").warning("compiled CPU kernels cannot be kept (%s): %s", error, advice)
        own = Path(tempfile.mkdtemp(prefix="cupaged-kernels-"))
        atexit.register(_remove, own, os.getpid())
        _places.append(own)
        return own


_places: list[Path] = []
"""The folder of this process alone, if there is one."""


def _remove(own: Path, process: int) -> None:
    """Not at the end of a forked copy of the process whose folder it is."""
    if process == os.getpid():
        shutil.rmtree(own, ignore_errors=True)


def code_file(folder: Path, name: str) -> Path:
    """The file of an operation, which may be missing; `name` with its number behind a dash where it comes in several."""
    return folder / f"{name}.{'code' if MAPS_IMAGES else 'o'}"


def _find(name: str) -> Path | None:
    """The file of an operation, wherever it is: a cache that cannot be written serves as well."""
    kept = kept_folder()
    places = _places if kept is None else [kept, *_places]
    return next((file for file in (code_file(place, name) for place in places) if os.path.exists(file)), None)


def _fingerprint() -> str:
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for source in sorted([*here.glob("cpu_*.py"), *here.glob("cpu_kernels/*.py")]):
        digest.update(source.read_bytes())
    digest.update(repr((_compiler_versions(), sys.version, _processor(), REGISTERS_WANTED)).encode())
    return digest.hexdigest()[:16]


def _compiler_versions() -> tuple[str, str]:
    try:
        return importlib.metadata.version("numba"), importlib.metadata.version("llvmlite")
    except importlib.metadata.PackageNotFoundError as error:  # Numba is not there for every platform and Python
        raise BackendError(f"there are no CPU kernels without Numba: no package {error.name or error}") from None


def _processor() -> str:
    """What this processor is and can do."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            first = file.read().partition("\n\n")[0]
    except OSError:  # not Linux
        return " ".join((platform.machine(), platform.processor()))
    kept = "vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features"
    return "\n".join(line for line in first.splitlines() if line.partition(":")[0].strip() in kept)


def missing(names: Sequence[str]) -> list[str]:
    """The operations that have no file. Raises BackendError without Numba."""
    return [name for name in names if _find(name) is None]


# ---- compiling

_SECONDS = {"attention": 6.0, "gemm": 4.0, "take_step": 1.5, "sample_rows": 1.5}
"""About how long an operation takes to compile; others half a second."""

_WORKER = "import sys; sys.path[:] = {path!r}; from cupaged.backends.cpu_kernels import compiler; compiler.main(sys.argv[1:])"


class _Worker:
    """A process that compiles some operations."""

    def __init__(self, names: Sequence[str]) -> None:
        if not sys.executable:
            raise BackendError("the CPU kernels cannot be compiled: this Python does not know its own program")
        code = _WORKER.format(path=[os.path.abspath(path) for path in sys.path])
        command = [sys.executable, "-c", code, str(folder()), *names]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        self._lock = threading.Lock()
        self._report: str | None = None

    def is_at_work(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> None:
        """Raises BackendError with the reason if they could not be compiled."""
        with self._lock:
            if self._report is None:
                try:
                    self._report = self._process.communicate()[1]
                except BaseException:
                    self._process.kill()
                    self._process.wait()
                    raise
        if self._process.returncode:
            reason = (self._report.splitlines() or [f"the compiler ended with {self._process.returncode}"])[-1]
            raise BackendError(f"the CPU kernels cannot be compiled: {reason}")


_workers: dict[str, _Worker] = {}
"""Who compiles an operation, until somebody has waited for it."""

_starting = threading.Lock()


def compile_missing(names: Sequence[str]) -> int:
    """Compile the operations that have no file yet; returns how many they were. Raises BackendError if they cannot be compiled."""
    wanted = missing(names)
    prepare(wanted)
    for worker in {id(worker): worker for worker in map(_workers.get, wanted) if worker is not None}.values():
        worker.wait()
    for name in wanted:  # a file that is deleted later is compiled again
        _workers.pop(name, None)
    return len(wanted)


def prepare(names: Sequence[str]) -> None:
    """Begin to compile what is missing, in as many processes as there are cores. Raises BackendError if none can be started."""
    with _starting:
        awaited = {name for name, worker in _workers.items() if worker.is_at_work()}
        wanted = [name for name in missing(names) if name not in awaited]  # again, if who was to do it was interrupted
        for share in _shares(wanted, usable_cores()):
            _workers.update(dict.fromkeys(share, _Worker(share)))


def _shares(names: Sequence[str], parts: int) -> list[list[str]]:
    """Cut work into parts that take about the same time: the longest first, always to whom has least."""
    shares: list[tuple[float, list[str]]] = [(0.0, []) for _ in range(parts)]
    costs = {name: _SECONDS.get(name.partition("-")[0], 0.5) for name in names}
    for name in sorted(names, key=lambda name: -costs[name]):
        least = min(range(parts), key=lambda part: shares[part][0])
        shares[least] = shares[least][0] + costs[name], [*shares[least][1], name]
    return [share for _, share in shares if share]


# ---- loading


def _keep(owner: Any) -> None:
    """Let the code that this object owns stay in memory as long as the process, which is longer than any variable: a daemon
    thread may still be computing while Python takes its modules apart."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


def map_image(path: Path) -> int:
    """Map an image, whose pages all processes share, and return where its function is. Raises BackendError."""
    try:
        with open(path, "rb") as file:
            header = file.read(HEADER.size)
            magic, size, entry = HEADER.unpack(header) if len(header) == HEADER.size else (b"", 0, 0)
            if magic != MAGIC or size != os.fstat(file.fileno()).st_size:
                raise BackendError(f"{path} holds no CPU kernel: delete it")
            image = np.frombuffer(_executable(file.fileno(), path), np.uint8)
    except OSError as error:
        raise BackendError(f"cannot read the CPU kernel {path}: {error.strerror or error}") from None
    _keep(image)
    return int(image.ctypes.data) + int(entry)


def _executable(handle: int, path: Path) -> mmap.mmap:
    readable, private = mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE
    try:
        return mmap.mmap(handle, 0, flags=private, prot=readable)
    except OSError:  # nothing may be run from that file system: from memory of our own, perhaps
        code = path.read_bytes()
    try:
        copy = mmap.mmap(-1, len(code), flags=private | mmap.MAP_ANONYMOUS, prot=readable | mmap.PROT_WRITE)
    except OSError as error:
        raise BackendError(
            f"this system runs no code from {path.parent} ({error}): set CUPAGED_CACHE to a folder from which it does"
        ) from None
    copy[:] = code
    return copy


def load_object(path: Path) -> int:
    """Let LLVM load a relocatable object, and return where its function is."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_path(str(path)))
    engine.finalize_object()
    _keep(engine)
    return int(engine.get_function_address(ENTRY))
