"""Codecs: how a stored type's bytes become float32. The plain float types are here; gguf_blocks.py adds the quantised ones.

A stored tensor is a run of equal blocks. A codec says how many values and how many bytes one block has and decodes many
of them at once; a plain float is a block of one value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Codec:
    """`decode(raw, out)` reads uint8 [n, block_bytes], contiguous, and fills float32 [n, block_values], contiguous."""

    name: str
    block_values: int
    block_bytes: int
    decode: Callable[[U8, F32], None]


def _decode_f32(raw: U8, out: F32) -> None:
    out[:] = raw.view("<f4")


def _decode_f16(raw: U8, out: F32) -> None:
    out[:] = raw.view("<f2")


def _decode_bf16(raw: U8, out: F32) -> None:
    # bfloat16 is the upper half of a float32: widening is a shift, exact for every value, NaNs included
    np.left_shift(raw.view("<u2"), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)


F32_CODEC = Codec("F32", 1, 4, _decode_f32)
F16_CODEC = Codec("F16", 1, 2, _decode_f16)
BF16_CODEC = Codec("BF16", 1, 2, _decode_bf16)
