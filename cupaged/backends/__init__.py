"""Backends: the devices a model can run on. `open_backend` chooses one; nothing else does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from cupaged.errors import ConfigError

if TYPE_CHECKING:
    from cupaged.backends.base import Backend


def open_backend(
    device: str, threads: int | None = None, announce: Callable[[str], None] | None = None, dtype: str = "auto", kv_dtype: str = "auto",
    *, graphs: bool = True,
) -> Backend:  # fmt: skip
    """The backend of an EngineConfig's `device`: auto and cpu are the fast CPU, reference the plain definition, emu
    the CUDA kernels on the SIMT emulator.

    `threads` is for the CPU backend; None: the cores this process may use. `announce` is told, in a line for the user,
    of something that takes long: kernels that have to be compiled. `dtype` and `kv_dtype` are an EngineConfig's;
    `graphs`: emu captures decode steps and replays them. Raises ConfigError for another device, BackendError where emu
    finds no C++ compiler.
    """
    if device in ("auto", "cpu"):
        return _open_cpu(threads, announce, dtype, kv_dtype)
    if device == "reference":
        from cupaged.backends.reference import ReferenceBackend

        return ReferenceBackend()
    if device == "emu":
        from cupaged.backends.emu_device import EmuDevice
        from cupaged.backends.kernels import KernelBackend

        return KernelBackend(EmuDevice(), *kernel_dtypes(dtype, kv_dtype), graphs=graphs)
    raise ConfigError(f"device {device!r} is not built in this version; use auto, cpu, reference or emu")


def kernel_dtypes(dtype: str, kv_dtype: str) -> tuple[str, str]:
    """The NumPy types of weights and of keys and values that the CUDA kernels compute with, of an EngineConfig's names."""
    weights = "float32" if dtype == "auto" else dtype
    return weights, {"auto": weights, "fp8": "float8_e4m3fn"}.get(kv_dtype, kv_dtype)


def _open_cpu(threads: int | None, announce: Callable[[str], None] | None, dtype: str, kv_dtype: str) -> Backend:
    try:
        from cupaged.backends import cpu_jit
        from cupaged.backends.cpu import CpuBackend
        from cupaged.backends.cpu_warm_up import warm_up
    except ImportError as error:  # Numba is not there for every platform and Python
        from cupaged.backends.reference import ReferenceBackend

        logging.getLogger("cupaged").warning("the CPU kernels cannot be compiled (%s): computing in plain NumPy, which is very slow", error)
        return ReferenceBackend()

    if announce is not None and not cpu_jit.kernels_are_cached():
        announce("compiling the CPU kernels, once on this machine (10 to 30 s)")
    backend = CpuBackend(threads, dtype, kv_dtype)
    warm_up(backend)
    return backend
