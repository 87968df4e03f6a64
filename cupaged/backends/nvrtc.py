"""Compile a kernel for a GPU that is not there, and read what the assembler says of it: registers, spills, shared memory.

NVRTC turns CUDA C into machine code without a driver; CuPy's wheel carries the binding, and the CUDA wheels
(nvidia-cuda-nvrtc-cu12, nvidia-cuda-runtime-cu12, or a toolkit) the compiler and the headers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import kernels_cu
from cupaged.backends.cuda_folders import cuda_files
from cupaged.backends.launch import KernelSpec, Variant
from cupaged.backends.occupancy import MULTIPROCESSORS
from cupaged.errors import BackendError

try:
    from cupy_backends.cuda.libs import nvrtc
except ImportError:  # no CuPy, or a CUDA installation that cannot be loaded
    nvrtc = None

ARCHITECTURES = tuple(MULTIPROCESSORS)
"""Ampere (A100; RTX 30), Ada (RTX 40, L4), Hopper (H100, H200)."""

_REPORT = re.compile(
    r"Function properties for (?P<kernel>\w+)\n\D*(?P<local>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores,"
    r" (?P<loads>\d+) bytes spill loads\n[^\n]*Used (?P<registers>\d+) registers(?P<rest>[^\n]*)"
)


@dataclass(frozen=True, slots=True)
class Resources:
    """What one thread (registers; bytes of local memory, and of these the spilled) and one block (static shared bytes) take."""

    registers: int
    local_bytes: int
    spilled_bytes: int
    shared_bytes: int


def complaints(spec: KernelSpec, used: Resources) -> list[str]:
    """What is slow by construction: local memory (spilled registers among it), or more registers than declared."""
    found = []
    if used.local_bytes or used.spilled_bytes:
        found.append(f"{used.local_bytes} bytes of local memory, {used.spilled_bytes} spilled")
    if used.registers > spec.registers:
        found.append(f"{used.registers} registers, {spec.registers} declared")
    return found


def missing() -> str | None:
    """Why kernels cannot be compiled here, in a line; None where they can."""
    if nvrtc is None:
        return "no CuPy: pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12"
    try:
        nvrtc.getVersion()
    except Exception as error:  # CuPy loads the library on first use, and raises what its loader raises
        return f"NVRTC cannot be loaded ({' '.join(str(error).split())}): pip install nvidia-cuda-nvrtc-cu12"
    if include_folder() is None:
        return "no CUDA headers (cuda_fp16.h): pip install nvidia-cuda-runtime-cu12"
    return None


def compile_variant(variant: Variant, architecture: str) -> Resources:
    """Compile for an architecture, such as "sm_90". Raises BackendError with the compiler's log."""
    program = nvrtc.createProgram(kernels_cu.source(variant.source), variant.source, (), ())
    options = (f"-arch={architecture}", "-std=c++17", "-ftz=true", f"-I{include_folder()}", "--ptxas-options=-v", *variant.options)
    try:
        nvrtc.compileProgram(program, options)
        log = nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        raise BackendError(f"{variant.source} does not compile for {architecture}:\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    return _resources(log, variant.kernel)


def _resources(log: str, kernel: str) -> Resources:
    for report in _REPORT.finditer(log):
        if report["kernel"] == kernel:
            shared = re.search(r"(\d+) bytes smem", report["rest"])
            spilled = int(report["stores"]) + int(report["loads"])
            return Resources(int(report["registers"]), int(report["local"]), spilled, int(shared[1]) if shared else 0)
    raise BackendError(f"the assembler says nothing of {kernel}:\n{log}")


def include_folder() -> Path | None:
    """Where cuda_fp16.h lies."""
    return next((file.parent for file in cuda_files("cuda_runtime", "include", "cuda_fp16.h") if file.exists()), None)
