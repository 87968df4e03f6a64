"""Tensor sources over a byte range of a file: StoredTensor reads it as it lies, PairedRows undoes GGUF's row order.

Files are read with plain reads, not mapped: a mapping's pages would count as this process's memory beside the weights.
Every read opens the file anew, so that a checkpoint holds no handle and may be read from several threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from cupaged.checkpoint.codecs import F32, U8, Codec
from cupaged.errors import CheckpointError, UnsupportedModelError
from cupaged.tensor_source import TensorSource

Number = TypeVar("Number", bound=np.generic)

_CHUNK_VALUES = 1 << 17
"""Values decoded at a time, so that a decoder's temporaries stay in the processor's cache."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of `shape` at bytes `offset` .. `offset + nbytes` of a file, row-major, in blocks along the last axis."""

    name: str
    shape: tuple[int, ...]
    path: Path
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
            return StoredTensor(self.name, (1, *self.shape), self.path, self.offset, self.codec).read()[0, start:stop]
        out = np.empty((len(rows), *self.shape[1:]), np.float32)
        blocks = out.reshape(-1, self.codec.block_values)
        self._decode(rows.start * row_values // self.codec.block_values, blocks)
        return out

    def read_blocks(self, start: int = 0, stop: int | None = None) -> U8:
        """Rows start..stop as they are stored, uint8 [rows, bytes of a row]. Raises as `read` does."""
        rows = range(*slice(start, stop).indices(self.shape[0]))
        raw = np.empty((len(rows), self.nbytes // self.shape[0]), np.uint8)
        with self._opened(rows.start * raw.shape[1]) as file:
            self._fill(file, raw)
        return raw

    def _decode(self, first_block: int, out: F32) -> None:
        """Decode blocks from `first_block` on into `out`, as many as it has rows."""
        step = max(1, _CHUNK_VALUES // self.codec.block_values)
        raw = np.empty((min(step, len(out)), self.codec.block_bytes), np.uint8)
        with self._opened(first_block * self.codec.block_bytes) as file, np.errstate(all="ignore"):
            for at in range(0, len(out), step):
                part = raw[: len(out) - at]
                self._fill(file, part)
                self.codec.decode(part, out[at : at + len(part)])

    @contextmanager
    def _opened(self, at: int) -> Iterator[Any]:
        """The file, positioned at byte `at` of the tensor."""
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(self.offset + at)
                yield file
        except OSError as error:
            raise CheckpointError(f"cannot read tensor {self.name} from {self.path}: {error.strerror or error}") from None

    def _fill(self, file: Any, raw: U8) -> None:
        if raw.size and file.readinto(raw.data.cast("B")) != raw.nbytes:
            raise CheckpointError(f"{self.path} ends inside tensor {self.name}: it was cut short")


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
