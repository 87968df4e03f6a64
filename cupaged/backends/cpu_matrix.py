"""Matrices of a model as the CPU multiplies by them: read from a checkpoint, and packed in the formats of cpu_formats.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from cupaged.backends.cpu_formats import GROUP, Format, choose, pack
from cupaged.backends.cpu_program import aligned
from cupaged.tensor_source import TensorSource

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Some columns of a matrix in one format: uint8 [groups, blocks, block_bytes], and where they begin."""

    kind: Format
    weight: npt.NDArray[np.uint8]
    first: int
    columns: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """[inputs, columns]; parts that are stored differently are packed one by one. bias float32 [columns], or None."""

    inputs: int
    columns: int
    parts: tuple[Packed, ...]
    bias: F32 | None


def stacked(dtype: str, parts: Sequence[TensorSource], bias: Sequence[TensorSource] | None = None) -> PackedMatrix:
    """Matrices [rows, inputs] one under the other; neighbours that are stored alike are packed together."""
    packed: list[Packed] = []
    first = 0
    for _, alike in groupby(parts, key=lambda part: part.storage):
        run = list(alike)
        kind, columns = choose(dtype, run), sum(part.shape[0] for part in run)
        weight = aligned(kind.packed_shape(columns, run[0].shape[1]), np.uint8)
        pack(run, kind, weight)
        packed.append(Packed(kind, weight, first, columns))
        first += columns
    return PackedMatrix(parts[0].shape[1], first, tuple(packed), None if bias is None else vector(bias))


def gate_up(dtype: str, gate: TensorSource, up: TensorSource, bias: Sequence[TensorSource] | None = None) -> PackedMatrix:
    """Groups of the gate and of up in turn, so that a product reads memory from front to back. The bias holds one half, then the other."""
    kind = choose(dtype, [gate, up])
    rows, inputs = gate.shape
    weight = aligned(kind.packed_shape(2 * -(-rows // GROUP) * GROUP, inputs), np.uint8)
    pack([gate], kind, weight[0::2])
    pack([up], kind, weight[1::2])
    return PackedMatrix(inputs, rows, (Packed(kind, weight, 0, rows),), None if bias is None else vector(bias))


def vector(sources: Sequence[TensorSource]) -> F32:
    """Vectors one after the other."""
    return np.concatenate([source.read() for source in sources])
