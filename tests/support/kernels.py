"""What tests of the CUDA kernels need of the machine, and which switch makes its absence a failure."""

from __future__ import annotations

import pytest

from cupaged.backends import nvrtc, open_backend
from cupaged.backends.emu import find_compiler
from cupaged.errors import BackendError, ConfigError

required: set[str] = set()
"""Of compiler, nvrtc and gpu those whose --require- switch was given."""


def skip_without_compiler() -> None:
    """The emulator compiles kernels with the machine's C++ compiler."""
    try:
        find_compiler()
    except BackendError as error:
        _go_without("compiler", str(error))


def skip_without_nvrtc() -> None:
    """CUDA's compiler, which needs no GPU."""
    reason = nvrtc.missing()
    if reason is not None:
        _go_without("nvrtc", reason)


def skip_without_gpu() -> None:
    """A GPU that CuPy can use: every test marked `gpu` begins with this."""
    try:
        import cupy
    except ImportError as error:
        _go_without("gpu", f"no GPU: CuPy cannot be imported ({error})")
        return
    if not cupy.cuda.is_available():
        _go_without("gpu", "no GPU: CuPy finds none")


def skip_without_gpu_device() -> None:
    """A device of ours that runs kernels on the GPU."""
    try:
        open_backend("cuda")
    except (BackendError, ConfigError) as error:
        _go_without("gpu", str(error))


def _go_without(what: str, reason: str) -> None:
    if what in required:
        pytest.fail(reason)
    pytest.skip(reason)
