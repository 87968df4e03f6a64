"""Blocks: a GGUF file's quantised matrices taken apart into codes and scales, which cpu_formats.py packs.

The layouts are those of ggml's `ggml-common.h`, drawn in checkpoint/gguf_blocks.py, which turns the same blocks into
numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]

Planes = tuple[npt.NDArray[Any], ...]
"""Codes uint8, then d, m (the bits of float16), scales, minima: those that a type has; the first two axes are [rows, stored blocks]."""


def split(storage: str, raw: U8, width: int) -> Planes:
    """Take rows uint8 [rows, row_bytes] of `width` values apart."""
    values, function = _TYPES[storage]
    return function(raw.reshape(len(raw), width // values, -1))


def _nibbles(packed: U8) -> U8:
    """uint8 [..., n] -> [..., 2n]: all low nibbles, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _half(block: U8, at: int) -> U16:
    """The float16 at byte `at` of every block."""
    return np.ascontiguousarray(block[..., at : at + 2]).view(np.uint16)


def _split_4(block: U8) -> Planes:
    """Q4_0, Q4_1: d [m] qs[16]"""
    scales = block.shape[-1] - 16
    return (_nibbles(block[..., scales:]), *(_half(block, at) for at in range(0, scales, 2)))


def _split_5(block: U8) -> Planes:
    """Q5_0, Q5_1: d [m] qh[4] qs[16]"""
    scales = block.shape[-1] - 20
    high = np.unpackbits(block[..., scales : scales + 4], axis=-1, bitorder="little")
    return (_nibbles(block[..., scales + 4 :]) | high << 4, *(_half(block, at) for at in range(0, scales, 2)))


def _split_8(block: U8) -> Planes:
    """Q8_0: d qs[32]"""
    return block[..., 2:] ^ 128, _half(block, 0)


def _split_k(block: U8) -> Planes:
    """Q4_K, Q5_K: d m sc[12] [qh[32]] qs[128]. Of the six bits of a group's scale and minimum, groups 4-7 keep two in sc[0:8]."""
    first, second, third = block[..., 4:8], block[..., 8:12], block[..., 12:16]
    scale = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    minimum = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    lead = block.shape[:-1]
    codes = _nibbles(block[..., -128:].reshape(*lead, 4, 32)).reshape(*lead, 8, 32)
    if block.shape[-1] == 176:
        codes |= (block[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    return codes, np.repeat(_half(block, 0), 8, axis=-1), np.repeat(_half(block, 2), 8, axis=-1), scale, minimum


def _split_6(block: U8) -> Planes:
    """Q6_K: ql[128] qh[64] sc[16] d, in two halves of 128 values (four runs of 32)."""
    lead = block.shape[:-1]
    low = _nibbles(block[..., :128].reshape(*lead, 2, 64)).reshape(*lead, 2, 4, 32)
    high = block[..., 128:192].reshape(*lead, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return low | high << 4, np.repeat(_half(block, 208), 8, axis=-1), block[..., 192:208]


_TYPES: dict[str, tuple[int, Callable[[U8], Planes]]] = {
    "Q8_0": (32, _split_8),
    "Q4_0": (32, _split_4),
    "Q4_1": (32, _split_4),
    "Q5_0": (32, _split_5),
    "Q5_1": (32, _split_5),
    "Q4_K": (256, _split_k),
    "Q5_K": (256, _split_k),
    "Q6_K": (256, _split_6),
}
"""Values of a stored block, and the function that takes blocks uint8 [rows, n, bytes] apart."""
