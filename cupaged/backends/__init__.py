"""Backends: the devices a model can run on. `open_backend` chooses one; nothing else does."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from cupaged.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from cupaged.backends.base import Backend
    from cupaged.backends.device import Device


def find_device(announce: Callable[[str], None] | None = None) -> str:
    """What `auto` stands for: "cuda" if a kernel ran on the first GPU and was right, else "cpu".

    A GPU that is there and will not do is announced with the reason.
    """
    if importlib.util.find_spec("cupy") is None:
        return "cpu"
    try:
        _try_cuda()
    except BackendError as error:
        if announce is not None:
            announce(f"computing on the CPU: {error}")
        return "cpu"
    return "cuda"


def _try_cuda() -> None:
    """Run a kernel on the first GPU: that one is counted proves nothing. Raises BackendError."""
    from cupaged.backends.cupy_device import CupyDevice
    from cupaged.backends.kernel_specs import ADD_BIAS

    device = CupyDevice()
    out = device.upload(np.ones((2, 3), np.float32))
    device.launch(ADD_BIAS.bind(out=out, bias=device.upload(np.arange(3, dtype=np.float32))))
    if device.download(out).tolist() != [[1.0, 2.0, 3.0]] * 2:
        raise BackendError("the GPU computes wrong numbers")


def open_backend(
    device: str, threads: int | None = None, announce: Callable[[str], None] | None = None, dtype: str = "auto", kv_dtype: str = "auto",
    *, pin: bool = False, graphs: bool = True,
) -> Backend:  # fmt: skip
    """The backend of a device: cuda or cuda:1 a GPU, auto and cpu the fast CPU, reference the plain definition, emu the CUDA
    kernels on the SIMT emulator.

    `threads` and `pin` are for the CPU backend (cpu_threads.Crew); None: the cores this process may use. `announce` is told, in a line for the user,
    of something that takes long: kernels that have to be compiled. `dtype` and `kv_dtype` are an EngineConfig's;
    `graphs`: cuda and emu capture decode steps and replay them. Raises ConfigError for another device, or where
    threads cannot be pinned, BackendError where a GPU cannot be used, or emu finds no C++ compiler.
    """
    kind, _, index = device.partition(":")
    if kind in ("auto", "cpu"):
        return _open_cpu(threads, announce, dtype, kv_dtype, pin)
    if kind == "reference":
        from cupaged.backends.reference import ReferenceBackend

        return ReferenceBackend()
    if kind not in ("emu", "cuda"):
        raise ConfigError(f"there is no device {device!r}; use auto, cuda, cpu, reference or emu")
    from cupaged.backends.kernels import KernelBackend

    return KernelBackend(_kernel_device(kind, int(index or 0)), *kernel_dtypes(dtype, kv_dtype), graphs=graphs)


def _kernel_device(kind: str, index: int) -> Device:
    if kind == "emu":
        from cupaged.backends.emu_device import EmuDevice

        return EmuDevice()
    from cupaged.backends.cupy_device import CupyDevice

    return CupyDevice(index)


def kernel_dtypes(dtype: str, kv_dtype: str) -> tuple[str, str]:
    """The NumPy types of weights and of keys and values that the CUDA kernels compute with, of an EngineConfig's names."""
    weights = "float32" if dtype == "auto" else dtype
    return weights, {"auto": weights, "fp8": "float8_e4m3fn"}.get(kv_dtype, kv_dtype)


def _open_cpu(threads: int | None, announce: Callable[[str], None] | None, dtype: str, kv_dtype: str, pin: bool) -> Backend:
    from cupaged.backends import cpu_code
    from cupaged.backends.cpu import CpuBackend

    try:
        if announce is not None and cpu_code.missing(["attention"]):
            announce("compiling the CPU kernels, once on this machine (10 to 20 s)")
        return CpuBackend(threads, dtype, kv_dtype, pin=pin)
    except BackendError as error:  # no Numba for this platform and Python, or no right to run what it made
        from cupaged.backends.reference import ReferenceBackend

        logging.getLogger("cupaged").warning("%s: computing in plain NumPy, which is very slow", error)
        return ReferenceBackend()
