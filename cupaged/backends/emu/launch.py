"""A launch as the runtime wants it: checked arguments, the memory they cover, and its answer as a KernelError.

The structures mirror those of runtime/state.h and runtime/shadow.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.backends.emu.memory import marks_of
from cupaged.errors import KernelError

# The letters by which runtime/export.h spells element types -> the dtypes that an array of it, or a scalar, may have.
# 16-bit and 8-bit floats also travel as raw bits. "v" (void) and "V" (a struct, a vector) take any.
DTYPES = {
    "?": ("bool",),
    "b": ("int8",),
    "B": ("uint8", "float8_e4m3fn"),
    "8": ("float8_e4m3fn", "uint8"),
    "h": ("int16",),
    "H": ("uint16", "float16", "bfloat16"),
    "e": ("float16", "uint16"),
    "E": ("bfloat16", "uint16"),
    "i": ("int32",),
    "I": ("uint32",),
    "f": ("float32",),
    "d": ("float64",),
    "q": ("int64",),
    "Q": ("uint64",),
}


class LaunchShape(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_bytes", ctypes.c_uint32),
        ("schedule", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("check", ctypes.c_uint32),
    )


class Range(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_size_t),
        ("end", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("written", ctypes.c_void_p),
        ("region", ctypes.c_size_t),
        ("cell", ctypes.c_uint64),
        ("element", ctypes.c_uint32),
        ("granule", ctypes.c_uint32),
        ("writable", ctypes.c_uint32),
        ("races", ctypes.c_uint32),
    )


class Failure(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_char * 32),
        ("what", ctypes.c_char * 512),
        ("array", ctypes.c_char * 64),
        ("file", ctypes.c_char * 256),
        ("address", ctypes.c_void_p),
        ("line", ctypes.c_int32),
        ("block", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32 * 3),
    )


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel: `kind` P (pointer), C (pointer to const) or S (scalar), `type` a letter of DTYPES."""

    name: str
    kind: str
    type: str

    def refusal_of(self, argument: object) -> str | None:
        """What is wrong with an argument, in words that follow the parameter's name; None when it fits."""
        accepted = DTYPES.get(self.type)
        wanted = " or ".join(accepted) if accepted else "any dtype"
        if self.kind == "S":
            if isinstance(argument, np.generic) and (accepted is None or argument.dtype.name in accepted):
                return None
            return f"wants a NumPy scalar of {wanted}, got {_kind_of(argument)}"
        if argument is None:
            return None
        if not isinstance(argument, np.ndarray) or (accepted is not None and argument.dtype.name not in accepted):
            return f"wants an array of {wanted}, got {_kind_of(argument)}"
        if not argument.flags.c_contiguous:
            return f"wants a C-contiguous array, got strides {argument.strides} for shape {argument.shape}"
        if self.kind == "P" and not argument.flags.writeable:
            return "is written by the kernel, got a read-only array"
        return None


def _kind_of(argument: object) -> str:
    if isinstance(argument, np.ndarray):
        return f"an array of {argument.dtype.name}"
    if isinstance(argument, np.generic):
        return f"a scalar of {argument.dtype.name}"
    return f"the Python {type(argument).__name__} {argument!r}"


def pack(parameters: Sequence[Parameter], arguments: Sequence[Any]) -> tuple[ctypes.Array[ctypes.c_void_p], list[Any]]:
    """Pointers to the arguments' values, and what must be kept alive for them."""
    pointers = (ctypes.c_void_p * max(1, len(arguments)))()
    kept: list[Any] = []
    for i, (parameter, argument) in enumerate(zip(parameters, arguments, strict=True)):
        if parameter.kind == "S":
            value: Any = ctypes.create_string_buffer(argument.tobytes(), argument.itemsize)
        else:
            value = ctypes.c_void_p(None if argument is None else argument.ctypes.data)
        kept.append(value)
        pointers[i] = ctypes.addressof(value)
    return pointers, kept


@dataclass
class _Extent:
    name: str
    begin: int
    end: int
    writable: bool
    array: npt.NDArray[Any]


def cover(named: Sequence[tuple[str, npt.NDArray[Any], bool]], track: bool) -> tuple[ctypes.Array[Range], int]:
    """The ranges that a kernel may touch, for (name, array, writable) each, and how many cells watch them for races.

    Arguments that overlap share their cells, whatever their element types are. A region that nobody writes needs none.
    """
    extents = [_Extent(n, a.ctypes.data, a.ctypes.data + a.nbytes, w, a) for n, a, w in named if a.size]
    extents.sort(key=lambda extent: extent.begin)
    ranges, cells, at = (Range * max(1, len(extents)))(), 0, 0
    while at < len(extents):
        last, end = at + 1, extents[at].end
        while last < len(extents) and extents[last].begin < end:
            end = max(end, extents[last].end)
            last += 1
        region = extents[at:last]
        granule = min(min(extent.array.itemsize, 8) for extent in region)
        races = track and any(extent.writable for extent in region)
        for i, extent in enumerate(region, at):
            marks = marks_of(extent.array) if track else None
            ranges[i] = Range(
                extent.begin,
                extent.end,
                extent.name.encode(),
                None if marks is None else marks.ctypes.data,
                region[0].begin,
                cells,
                extent.array.itemsize,
                granule,
                extent.writable,
                races,
            )
        cells += -(-(end - region[0].begin) // granule) if races else 0
        at = last
    return ranges, cells


def error_of(failure: Failure, kernel: str, file: str | None, line: int | None, note: str) -> KernelError:
    """The runtime's answer as an exception, in one line."""
    block, thread = tuple(failure.block), tuple(failure.thread)
    place = f" at {file}:{line}" if file else ""
    return KernelError(
        f"{kernel}: {failure.what.decode(errors='replace')}{place}{note}, block {block} thread {thread}",
        kernel=kernel,
        kind=failure.kind.decode(),
        array=failure.array.decode(errors="replace") or None,
        file=file,
        line=line,
        block=block,
        thread=thread,
    )
