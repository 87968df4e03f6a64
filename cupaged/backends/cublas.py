"""Matrix products by cuBLAS through ctypes: what CuPy offers of it cannot be captured in a graph and owns no workspace.

One handle, one stream, one workspace, for ever: cublasSetStream puts cuBLAS back to a workspace of its own, so the stream
is set once and the workspace after it; then a product allocates nothing, and a graph may hold it.
"""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path
from typing import Any

from cupaged.backends.cuda_folders import cuda_files
from cupaged.errors import BackendError, InvariantError

DATA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
"""cudaDataType (library_types.h): CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF."""

_TRANSPOSED, _PLAIN, _COMPUTE_32F, _DEFAULT_ALGORITHM = 1, 0, 68, -1  # cublas_api.h
_STATUS = {
    1: "not initialised", 3: "allocation failed", 7: "invalid value", 8: "the GPU is too old", 11: "mapping error", 13: "execution failed",
    14: "internal error", 15: "not supported",
}  # fmt: skip
_ARGUMENTS = {
    "cublasCreate_v2": (ctypes.POINTER(ctypes.c_void_p),),
    "cublasDestroy_v2": (ctypes.c_void_p,),
    "cublasSetStream_v2": (ctypes.c_void_p, ctypes.c_void_p),
    "cublasSetWorkspace_v2": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    "cublasGetVersion_v2": (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)),
    "cublasGemmEx": (
        ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_float),
        ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_float),
        ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int,
    ),
}  # fmt: skip


def load_library(cuda_major: int) -> ctypes.CDLL:
    """cuBLAS of CUDA 12 or 13: from its wheel, else from a toolkit, else wherever the loader looks. Raises BackendError."""
    name = f"libcublas.so.{cuda_major}"
    for path in (*cuda_files("cublas", "lib", name), Path(name)):  # the last: wherever the loader looks
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # not there, or not for this machine: the next one
            continue
    raise BackendError(f"cuBLAS ({name}) is not found: pip install 'cupaged[cuda{cuda_major}]', or set CUDA_PATH to a CUDA {cuda_major} toolkit")


class Cublas:
    """Products on one stream. `library` is load_library's; stream and workspace are addresses, the workspace in bytes too."""

    def __init__(self, library: Any, stream: int, workspace: int, workspace_bytes: int) -> None:
        self._library = library
        for name, types in _ARGUMENTS.items():
            getattr(library, name).argtypes = types
        handle = ctypes.c_void_p()
        self._check("cublasCreate_v2", ctypes.byref(handle))
        self._handle = handle
        weakref.finalize(self, library.cublasDestroy_v2, handle).atexit = False  # by then the driver may be gone
        self._check("cublasSetStream_v2", handle, stream)
        self._check("cublasSetWorkspace_v2", handle, workspace, workspace_bytes)

    @property
    def version(self) -> int:
        """120901 is 12.9.1."""
        number = ctypes.c_int()
        self._check("cublasGetVersion_v2", self._handle, ctypes.byref(number))
        return number.value

    def gemm(self, x: Any, weight: Any, out: Any, *, add: bool) -> None:
        """out = x @ weight.T, or out += it, sums in float32. x [rows, in], weight [out, in] of one type; out [rows, out] of
        that type or float32; all contiguous CuPy arrays. Raises InvariantError for other shapes or types.

        cuBLAS counts along columns first, so it sees the three as [in, rows], [in, out] and [out, rows]: the product is
        weight, transposed, times x.
        """
        (rows, width), outputs = x.shape, weight.shape[0]
        if weight.shape[1] != width or out.shape != (rows, outputs) or not (x.flags.c_contiguous and weight.flags.c_contiguous and out.flags.c_contiguous):
            raise InvariantError(f"a product of {x.shape} and {weight.shape} into {out.shape}, all contiguous")
        if x.dtype != weight.dtype or out.dtype.name not in (x.dtype.name, "float32"):
            raise InvariantError(f"a product of {x.dtype} and {weight.dtype} into {out.dtype}: the first two must be one type, the third that or float32")
        of_input, of_output = DATA_TYPES[x.dtype.name], DATA_TYPES[out.dtype.name]
        self._check(
            "cublasGemmEx",
            self._handle, _TRANSPOSED, _PLAIN, outputs, rows, width, ctypes.byref(ctypes.c_float(1)),
            weight.data.ptr, of_input, width, x.data.ptr, of_input, width, ctypes.byref(ctypes.c_float(1 if add else 0)),
            out.data.ptr, of_output, outputs, _COMPUTE_32F, _DEFAULT_ALGORITHM,
        )  # fmt: skip

    def _check(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise BackendError(f"cuBLAS: {name} failed: {_STATUS.get(status, 'status')} ({status})")
