"""Formats: how the CPU engine keeps a weight matrix [N, K] in memory, packed for kernels that make 16 columns at once.

The N rows of a stored matrix are the columns of the product x @ W.T. A packed matrix is

    uint8 [groups][blocks][block_bytes]        groups = ceil(N / 16), blocks = K / block_k

where a group is 16 columns, so that it is read from front to back, and columns that are missing in the last one are
zero. A block of a float format is the 16 numbers of one k. A block of a quantised format is 32 k of 16 columns:

    codes    64 * bits bytes: uint32 [bits][16], lane n belongs to column n
    d        float16 [16]
    m        float16 [16]              only where a code has no zero point
    scale    uint8 [16]                only in the K formats, q6_k: int8 [2][16], one per 16 k
    min      uint8 [16]                only in q4_k and q5_k

A code is an unsigned number q of 4, 5, 6 or 8 bits, and a weight is D * q + M: D = d, or d * scale; M = -D * zero, or m,
or -(m * min). D * q, D * zero and m * min are exact in float32, so a fused multiply-add gives the very number that
GGUF defines. Of the words of a lane

    8 bits   word k / 4 holds it in byte k % 4
    4 bits   word k / 8 holds it in nibble k % 8
    5, 6     the low four bits likewise; byte k % 8 / 2 of a word further on holds the others. With e = k / 8:
             5 bits, word 4: bit e if k is even, bit 4 + e if it is odd
             6 bits, word 4 if k is even, 5 if it is odd: bits 2 * e and 2 * e + 1
             One shift moves the fields of eight k above their nibbles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.backends.cpu_blocks import U8, U16, split
from cupaged.errors import CheckpointError
from cupaged.tensor_source import TensorSource

GROUP = 16
"""Columns that lie side by side."""

TILE_COLUMNS = 2 * GROUP
"""Columns that are computed together."""

BLOCK = 32
"""k of a quantised block."""

_PIECE = 1 << 18
"""Weights that are read and packed at a time: their codes stay in the processor's cache."""

U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Format:
    """One way to keep a matrix; `index` is its place in FORMATS and stands for it in kernels.

    bits    of a code, or of a float
    zero    the code that means 0; 0: every column has an m
    scales  scales of a column per block beside d: 0, 1 or 2
    stored  the stored type (TensorSource.storage) that is kept in this format as it is
    """

    name: str
    index: int
    bits: int
    stored: str
    zero: int = 0
    scales: int = 0

    @property
    def is_float(self) -> bool:
        return self.bits >= 16

    @property
    def has_min(self) -> bool:
        return not self.is_float and self.zero == 0

    @property
    def block_k(self) -> int:
        """k of a block: K must be a multiple."""
        return 1 if self.is_float else BLOCK

    @property
    def d_at(self) -> int:
        """Bytes of codes, or of a float format's 16 numbers."""
        return GROUP * self.bits * self.block_k // 8

    @property
    def m_at(self) -> int:
        return self.d_at + 2 * GROUP

    @property
    def scale_at(self) -> int:
        return self.m_at + 2 * GROUP * self.has_min

    @property
    def min_at(self) -> int:
        return self.scale_at + GROUP

    @property
    def block_bytes(self) -> int:
        return self.d_at if self.is_float else self.scale_at + GROUP * self.scales * (1 + self.has_min)

    def packed_shape(self, rows: int, width: int) -> tuple[int, int, int]:
        """[groups, blocks, block_bytes] of a matrix [rows, width]."""
        return -(-rows // GROUP), width // self.block_k, self.block_bytes


FLOAT32, FLOAT16, BFLOAT16 = Format("float32", 0, 32, "F32"), Format("float16", 1, 16, "F16"), Format("bfloat16", 2, 16, "BF16")
Q8_0 = Format("q8_0", 3, 8, "Q8_0", zero=128)
FORMATS = (
    FLOAT32,
    FLOAT16,
    BFLOAT16,
    Q8_0,
    Format("q4_0", 4, 4, "Q4_0", zero=8),
    Format("q4_1", 5, 4, "Q4_1"),
    Format("q5_0", 6, 5, "Q5_0", zero=16),
    Format("q5_1", 7, 5, "Q5_1"),
    Format("q4_k", 8, 4, "Q4_K", scales=1),
    Format("q5_k", 9, 5, "Q5_K", scales=1),
    Format("q6_k", 10, 6, "Q6_K", zero=32, scales=2),
)
_FLOATS = {f.name: f for f in FORMATS if f.is_float}
_KEPT = {f.stored: f for f in FORMATS}


def choose(dtype: str, parts: Sequence[TensorSource]) -> Format:
    """The format of a matrix that is made of `parts` [rows, width], one under the other.

    dtype   float32, float16, bfloat16   that width
            auto                         the stored one, if all parts have the same; else float32
            int8                         stored blocks stay; others become q8_0 if their width is a multiple of 32
    """
    if dtype in _FLOATS:
        return _FLOATS[dtype]
    stored = {part.storage for part in parts}
    kept = _KEPT.get(stored.pop(), FLOAT32) if len(stored) == 1 else FLOAT32
    width = parts[0].shape[1]
    if width % kept.block_k:
        kept = FLOAT32
    return Q8_0 if dtype == "int8" and kept.is_float and width % BLOCK == 0 else kept


# ---- packing


def pack(parts: Sequence[TensorSource], kind: Format, out: U8) -> None:
    """Fill uint8 [groups, blocks, block_bytes], each group C-contiguous, with the matrices, one under the other.

    `out` may have more groups than they need. Raises CheckpointError for a number that the format cannot hold.
    """
    width = parts[0].shape[1]
    step = max(1, _PIECE // (GROUP * width)) * GROUP
    done = 0
    for piece in _pieces(parts, kind, step):
        groups = -(-len(next(iter(piece))) // GROUP)
        at = 0
        for plane in piece:
            at = _scatter(plane, out[done : done + groups], at)
        done += groups
    out[done:] = 0


def _pieces(parts: Sequence[TensorSource], kind: Format, step: int) -> Iterator[list[npt.NDArray[Any]]]:
    """The planes (see _scatter) of `step` rows after the other of all parts together."""
    keep = all(part.storage == kind.stored for part in parts) and kind is not FLOAT32
    width = parts[0].shape[1]
    total = sum(part.shape[0] for part in parts)
    for start in range(0, total, step):
        rows, begin = [], 0
        for part in parts:
            first, last = max(0, start - begin), min(part.shape[0], start + step - begin)
            if first < last:
                rows.append(part.read_blocks(first, last) if keep else part.read(first, last))
            begin += part.shape[0]
        raw: Any = rows[0] if len(rows) == 1 else np.concatenate(rows)
        if keep and kind.is_float:
            yield [raw.view(np.uint16)[:, :, None]]
        elif keep:
            yield _planes(kind, width, *split(kind.stored, raw, width))
        elif kind.is_float:
            yield [_narrow(raw, kind, parts[0].name)]
        else:
            yield _planes(kind, width, *_quantise(raw, parts[0].name))


def _scatter(plane: npt.NDArray[Any], groups: U8, at: int) -> int:
    """Put numbers [rows, blocks, n] at byte `at` of the blocks, as [n][16]; returns where they end."""
    rows, blocks, n = plane.shape
    size = plane.itemsize
    target = groups.view(plane.dtype)[:, :, at // size : at // size + n * GROUP].reshape(len(groups), blocks, n, GROUP)
    whole = rows // GROUP
    target[:whole] = plane[: whole * GROUP].reshape(whole, GROUP, blocks, n).transpose(0, 2, 3, 1)
    if rows % GROUP:
        target[whole] = 0
        target[whole, :, :, : rows % GROUP] = plane[whole * GROUP :].transpose(1, 2, 0)
    return int(at + n * GROUP * size)


def _planes(kind: Format, width: int, codes: U8, *scales: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Codes of [rows, width] as words, and the scales, in the order in which they lie in a block."""
    shape = (-1, width // BLOCK)
    return [*_words(codes.reshape(*shape, BLOCK), kind.bits), *(plane.reshape(*shape, plane.size // (codes.size // BLOCK)) for plane in scales)]


def _words(codes: U8, bits: int) -> list[U32]:
    """uint32 [rows, blocks, n] planes of codes [rows, blocks, 32]."""
    if bits == 8:
        return [codes.view(np.uint32)]
    pairs = codes.view(np.uint16)
    low = (pairs | pairs >> 4).astype(np.uint8) if bits == 4 else (pairs & 15 | pairs >> 4 & 240).astype(np.uint8)
    if bits == 4:
        return [low.view(np.uint32)]
    high = (codes >> 4).reshape(*codes.shape[:2], 4, 4, 2)  # [k / 8][byte][odd]
    packed = np.zeros((*codes.shape[:2], bits - 4, 4), np.uint8)
    for eight in range(4):
        for odd in range(2):
            word, shift = _field(bits, eight, odd)
            packed[:, :, word] |= high[:, :, eight, :, odd] << shift
    return [low.view(np.uint32), packed.view(np.uint32)[..., 0]]


def _field(bits: int, eight: int, odd: int) -> tuple[int, int]:
    """Where the upper bits of a code lie: the word, counted from the fourth, and the bit of its byte."""
    return (0, eight + 4 * odd) if bits == 5 else (odd, 2 * eight)


def _narrow(values: F32, kind: Format, name: str) -> npt.NDArray[Any]:
    """float32 [rows, K] as numbers of a float format [rows, K, 1], rounded to nearest, ties to even."""
    if kind is FLOAT32:
        return values[:, :, None]
    if kind is BFLOAT16:
        bits = values.view(np.uint32)
        return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)[:, :, None]
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    _check_range(halves, values, name, "float16")
    return halves.view(np.uint16)[:, :, None]


def _quantise(values: F32, name: str) -> tuple[U8, U16]:
    """float32 [rows, K] to the nearest multiples of a scale, the largest of 32 over 127: codes and d of q8_0."""
    blocks = values.reshape(len(values), -1, BLOCK)
    with np.errstate(over="ignore"):
        d = (np.maximum(blocks.max(axis=2), -blocks.min(axis=2)) * np.float32(1 / 127)).astype(np.float16)
    _check_range(d, values, name, "int8")
    wide = d.astype(np.float32)
    inverse = np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide > 0)
    codes = np.clip(np.rint(blocks * inverse[:, :, None]), -127, 127)
    return (codes + np.float32(128)).astype(np.uint8), d.view(np.uint16)


def _check_range(narrow: npt.NDArray[np.float16], values: F32, name: str, dtype: str) -> None:
    if not np.isfinite(narrow).all() and np.isfinite(values).all():
        raise CheckpointError(f"tensor {name} holds numbers too large for {dtype}: use --dtype bfloat16 or float32")


# ---- unpacking


def unpack(packed: U8, kind: Format, rows: int, width: int) -> F32:
    """The matrix float32 [rows, width] of uint8 [groups, blocks, block_bytes]: what kernels of float32 compute with, to the bit."""
    if kind.is_float:
        numbers = np.ascontiguousarray(packed).view({FLOAT32: np.float32, FLOAT16: np.float16}.get(kind, np.uint16))
        wide = (numbers.astype(np.uint32) << 16).view(np.float32) if kind is BFLOAT16 else numbers.astype(np.float32)
        weights = wide[:, :, None, :]
    else:
        d, m = _d_and_m(packed, kind)
        weights = _unpack_codes(packed, kind) * d + m
    matrix: F32 = np.ascontiguousarray(weights.transpose(0, 3, 1, 2).reshape(-1, width)[:rows])
    return matrix


def column(packed: U8, kind: Format, n: int) -> F32:
    """Row n of the matrix, float32 [width]."""
    width = packed.shape[1] * kind.block_k
    group = unpack(packed[n // GROUP : n // GROUP + 1], kind, GROUP, width)
    row: F32 = group[n % GROUP]
    return row


def _unpack_codes(packed: U8, kind: Format) -> F32:
    """float32 [groups, blocks, 32, 16] of the codes."""
    words = np.ascontiguousarray(packed[:, :, : kind.d_at]).view(np.uint32).reshape(*packed.shape[:2], kind.bits, GROUP)
    codes = np.empty((*packed.shape[:2], BLOCK, GROUP), np.float32)
    for k in range(BLOCK):
        if kind.bits == 8:
            codes[:, :, k] = words[:, :, k // 4] >> 8 * (k % 4) & 255
            continue
        code = words[:, :, k // 8] >> 4 * (k % 8) & 15
        if kind.bits > 4:
            word, bit = _field(kind.bits, k // 8, k % 2)
            code |= (words[:, :, 4 + word] >> 8 * (k % 8 // 2) + bit & (1 << kind.bits - 4) - 1) << 4
        codes[:, :, k] = code
    return codes


def _d_and_m(packed: U8, kind: Format) -> tuple[F32, F32]:
    """D and M, each float32 [groups, blocks, 32 or 1, 16]."""

    def numbers(at: int, count: int, dtype: type[np.generic]) -> F32:
        size = count * GROUP * np.dtype(dtype).itemsize
        raw = np.ascontiguousarray(packed[:, :, at : at + size]).view(dtype)
        return raw.reshape(*packed.shape[:2], count, GROUP).astype(np.float32)

    d = numbers(kind.d_at, 1, np.float16)
    if kind.scales:
        scale = numbers(kind.scale_at, kind.scales, np.uint8 if kind.has_min else np.int8)
        d = d * np.repeat(scale, BLOCK // kind.scales, axis=2)
    if kind.zero:
        return d, d * np.float32(-kind.zero)
    m = numbers(kind.m_at, 1, np.float16)
    return d, -m * numbers(kind.min_at, 1, np.uint8) if kind.scales else m
