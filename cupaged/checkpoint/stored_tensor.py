"""Tensor sources over a byte range of a mapped file: StoredTensor reads it as it lies, PairedRows undoes GGUF's row order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from cupaged.checkpoint.codecs import F32, U8, Codec
from cupaged.checkpoint.mapped_file import MappedFile
from cupaged.errors import UnsupportedModelError
from cupaged.tensor_source import TensorSource

Number = TypeVar("Number", bound=np.generic)

_CHUNK_VALUES = 1 << 17
"""Values decoded at a time, so that a decoder's temporaries stay in the processor's cache."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of `shape` at bytes `offset` .. `offset + nbytes` of a file, row-major, in blocks along the last axis."""

    name: str
    shape: tuple[int, ...]
    file: MappedFile
    offset: int
    codec: Codec

    @property
    def storage(self) -> str:
        return self.codec.name

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return math.prod(self.shape) // self.codec.block_values * self.codec.block_bytes

    def read(self, start: int = 0, stop: int | None = None) -> F32:
        """Rows start..stop as float32. Raises CheckpointError if the file cannot be read or has become shorter."""
        rows = range(*slice(start, stop).indices(self.shape[0]))
        row_values = math.prod(self.shape[1:])
        if row_values % self.codec.block_values:  # a quantised vector: a block spans several rows
            return StoredTensor(self.name, (1, *self.shape), self.file, self.offset, self.codec).read()[0, start:stop]
        out = np.empty((len(rows), *self.shape[1:]), np.float32)
        blocks = out.reshape(-1, self.codec.block_values)
        self._decode(rows.start * row_values // self.codec.block_values, blocks)
        return out

    def read_blocks(self, start: int = 0, stop: int | None = None) -> U8:
        """Rows start..stop as they are stored, uint8 [rows, bytes of a row]: a read-only view of the mapped file, which it
        keeps mapped. Raises as `read` does."""
        rows = range(*slice(start, stop).indices(self.shape[0]))
        row_bytes = self.nbytes // self.shape[0]
        return self._bytes(rows.start * row_bytes, len(rows) * row_bytes).reshape(len(rows), row_bytes)

    def _decode(self, first_block: int, out: F32) -> None:
        """Decode blocks from `first_block` on into `out`, as many as it has rows."""
        step, size = max(1, _CHUNK_VALUES // self.codec.block_values), self.codec.block_bytes
        with np.errstate(all="ignore"):
            for at in range(0, len(out), step):
                part = out[at : at + step]
                raw = self._bytes((first_block + at) * size, len(part) * size)
                self.codec.decode(raw.reshape(len(part), size), part)

    def _bytes(self, at: int, count: int) -> U8:
        """So many of the tensor's bytes, from byte `at` on."""
        return self.file.read(self.offset + at, self.offset + at + count, self.name)


@dataclass(frozen=True)
class PairedRows:
    """A GGUF `llama` query or key tensor in Hugging Face's row order.

    Such a file interleaves the two halves of a head, so that a rotary pair lies in neighbouring rows:

        file row   h * D + 2 * i + half     <->     Hugging Face row   h * D + half * D / 2 + i
    """

    stored: TensorSource
    head_dim: int

    @property
    def name(self) -> str:
        return self.stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def storage(self) -> str:
        return self.stored.storage

    def read(self, start: int = 0, stop: int | None = None) -> F32:
        """Rows start..stop in Hugging Face's order as float32."""
        return self._reordered(self.stored.read, start, stop)

    def read_blocks(self, start: int = 0, stop: int | None = None) -> U8:
        """The same rows as they are stored, uint8 [rows, bytes of a row]."""
        return self._reordered(self.stored.read_blocks, start, stop)

    def _reordered(self, read: Callable[[int, int], npt.NDArray[Number]], start: int, stop: int | None) -> npt.NDArray[Number]:
        """Rows start..stop of what `read` gives in the file's order; head by head, so that the copy stays small."""
        rows = range(*slice(start, stop).indices(self.shape[0]))
        none = read(0, 0)
        out = np.empty((len(rows), *none.shape[1:]), none.dtype)
        at = rows.start
        while at < rows.stop:
            head, first = divmod(at, self.head_dim)
            last = min(self.head_dim, first + rows.stop - at)
            pairs = read(head * self.head_dim, (head + 1) * self.head_dim)
            halves = pairs.reshape(self.head_dim // 2, 2, *pairs.shape[1:]).swapaxes(0, 1).reshape(pairs.shape)
            out[at - rows.start : at - rows.start + last - first] = halves[first:last]
            at += last - first
        return out


@dataclass(frozen=True)
class UnreadableTensor:
    """A tensor of a type that is not decoded. It may still be one that nobody needs, so only reading it is an error."""

    name: str
    shape: tuple[int, ...]
    storage: str

    def read(self, start: int = 0, stop: int | None = None) -> F32:
        """Raises UnsupportedModelError."""
        raise self._error()

    def read_blocks(self, start: int = 0, stop: int | None = None) -> U8:
        """Raises UnsupportedModelError."""
        raise self._error()

    def _error(self) -> UnsupportedModelError:
        return UnsupportedModelError(f"tensor {self.name} is stored as {self.storage}, which is not supported")
