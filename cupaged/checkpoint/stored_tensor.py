"""Tensor sources over a byte range of a file: StoredTensor reads it as it lies, PairedRows undoes GGUF's row order.

Files are read with plain reads, not mapped: a mapping's pages would count as this process's memory beside the weights.
Every read opens the file anew, so that a checkpoint holds no handle and may be read from several threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cupaged.checkpoint.codecs import F32, Codec
from cupaged.errors import CheckpointError, UnsupportedModelError
from cupaged.tensor_source import TensorSource

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

    def _decode(self, first_block: int, out: F32) -> None:
        """Decode blocks from `first_block` on into `out`, as many as it has rows."""
        step = max(1, _CHUNK_VALUES // self.codec.block_values)
        raw = np.empty((min(step, len(out)), self.codec.block_bytes), np.uint8)
        try:
            with open(self.path, "rb", buffering=0) as file, np.errstate(all="ignore"):
                file.seek(self.offset + first_block * self.codec.block_bytes)
                for at in range(0, len(out), step):
                    part = raw[: len(out) - at]
                    if file.readinto(part.data.cast("B")) != part.nbytes:
                        raise CheckpointError(f"{self.path} ends inside tensor {self.name}: it was cut short")
                    self.codec.decode(part, out[at : at + len(part)])
        except OSError as error:
            raise CheckpointError(f"cannot read tensor {self.name} from {self.path}: {error.strerror or error}") from None


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
        """Rows start..stop in Hugging Face's order as float32; head by head, so that the copy stays small."""
        rows = range(*slice(start, stop).indices(self.shape[0]))
        out = np.empty((len(rows), *self.shape[1:]), np.float32)
        at = rows.start
        while at < rows.stop:
            head, first = divmod(at, self.head_dim)
            last = min(self.head_dim, first + rows.stop - at)
            pairs = self.stored.read(head * self.head_dim, (head + 1) * self.head_dim)
            halves = pairs.reshape(self.head_dim // 2, 2, *self.shape[1:]).swapaxes(0, 1).reshape(pairs.shape)
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
        raise UnsupportedModelError(f"tensor {self.name} is stored as {self.storage}, which is not supported")
