"""GgufHeader: the metadata and the tensor directory of a GGUF file, read without touching the tensors.

The format (ggml's docs/gguf.md; versions 2 and 3, little-endian):

    "GGUF"  version u32  tensor_count u64  metadata_count u64
    metadata_count x   key string, type u32, value
    tensor_count x     name string, dimensions u32, sizes u64 each (fastest first), type u32, offset u64
    padding to general.alignment (32 unless given), then the tensors; offsets count from here

A string is a u64 length and UTF-8 bytes; an array is an element type u32, a count u64 and the elements.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cupaged.errors import CheckpointError, UnsupportedModelError

MAGIC = b"GGUF"

# metadata value types: number -> little-endian NumPy dtype
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING = 8
_ARRAY = 9
_MAX_DIMENSIONS = 4
_MAX_NESTING = 8


@dataclass(frozen=True)
class TensorEntry:
    """A line of the directory. `shape` is row-major (slowest first); `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """`metadata` values are Python numbers, bools, strings and lists of them."""

    version: int
    metadata: dict[str, Any]
    tensors: tuple[TensorEntry, ...]


def read_header(path: Path) -> GgufHeader:
    """Read a GGUF file's header. Raises CheckpointError if it is damaged, UnsupportedModelError for another version."""
    try:
        if path.stat().st_size == 0:  # which cannot be mapped
            raise CheckpointError(f"{path} is empty")
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None


class _Reader:
    """A position in the mapped file that moves on with every value read."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0

    def header(self) -> GgufHeader:
        version = self._check_version()
        tensor_count, metadata_count = self._number("<u8"), self._number("<u8")
        metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = self._string()
            metadata[key] = self._value(self._number("<u4"), key)
        entries = [self._entry() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self._path}: general.alignment is {alignment!r}, not a positive number")
        start = -(-self._at // alignment) * alignment
        return GgufHeader(version, metadata, tuple(TensorEntry(name, shape, kind, start + at) for name, shape, kind, at in entries))

    def _check_version(self) -> int:
        if self._bytes(4) != MAGIC:
            raise CheckpointError(f"{self._path} is not a GGUF file")
        stored = self._bytes(4)
        version = int.from_bytes(stored, "little")
        if version in (2, 3):
            return version
        if int.from_bytes(stored, "big") in (1, 2, 3):
            raise UnsupportedModelError(f"{self._path} is a big-endian GGUF file; only little-endian ones can be read")
        raise UnsupportedModelError(f"{self._path} is GGUF version {version}; versions 2 and 3 can be read")

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._number("<u4")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise CheckpointError(f"{self._path}: tensor {name} has {dimensions} dimensions")
        sizes = [self._number("<u8") for _ in range(dimensions)]
        return name, tuple(reversed(sizes)), self._number("<u4"), self._number("<u8")

    # ---- values

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > self._size:
            raise self._truncated()
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def _number(self, dtype: str) -> Any:
        return self._numbers(dtype, 1)[0]

    def _numbers(self, dtype: str, count: int) -> list[Any]:
        values: list[Any] = np.frombuffer(self._bytes(count * np.dtype(dtype).itemsize), dtype).tolist()
        return values

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """A run of strings; the hot loop of a header, which holds a hundred thousand of them or more."""
        data, at, size = self._data, self._at, self._size
        length_at = struct.Struct("<Q").unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_at(data, at)[0]
                if at > size:
                    raise self._truncated()
                strings.append(data[start:at].decode())
        except struct.error:
            raise self._truncated() from None
        except UnicodeDecodeError:
            raise CheckpointError(f"{self._path}: the GGUF header holds a string that is not UTF-8") from None
        self._at = at
        return strings

    def _value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY and depth < _MAX_NESTING:
            return self._array(key, depth + 1)
        raise CheckpointError(f"{self._path}: metadata {key!r} has an unknown type, {kind}")

    def _array(self, key: str, depth: int) -> list[Any]:
        kind, count = self._number("<u4"), self._number("<u8")
        if kind in _NUMBERS:
            return self._numbers(_NUMBERS[kind], count)
        if kind == _STRING:
            return self._strings(count)
        return [self._value(kind, key, depth) for _ in range(count)]

    def _truncated(self) -> CheckpointError:
        return CheckpointError(f"{self._path} ends inside its header: the file was cut short or is damaged")
