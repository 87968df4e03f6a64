"""GGUF's tensor types: their numbers, their names, and decoders for the block-quantised ones.

A block holds 32 values (Q4_0 .. Q8_0) or 256 (the K types) that share float16 scales. Layouts are those of ggml's
`ggml-common.h`; in the drawings a number counts bytes and `d`, `m` are float16.

    Q4_0   d qs[16]            value = d * (q - 8)       byte j holds value j (low nibble) and value j + 16 (high)
    Q4_1   d m qs[16]          value = d * q + m         nibbles as above
    Q5_0   d qh[4] qs[16]      value = d * (q - 16)      bit j of qh is the fifth bit of value j
    Q5_1   d m qh[4] qs[16]    value = d * q + m
    Q8_0   d qs[32]            value = d * q             q is int8
    Q4_K   d m sc[12] qs[128]            8 groups of 32: value = (d * scale) * q - (m * min)
    Q5_K   d m sc[12] qh[32] qs[128]     the same with a fifth bit: bit g of qh[j] belongs to value j of group g
    Q6_K   ql[128] qh[64] sc[16] d       16 groups of 16: value = (d * scale) * (q - 32), scale is int8
"""

from __future__ import annotations

import numpy as np

from cupaged.checkpoint.codecs import BF16_CODEC, F16_CODEC, F32, F32_CODEC, U8, Codec


def _half(raw: U8, at: int) -> F32:
    """The float16 at byte `at` of every block, as float32 [n, 1]."""
    return np.ascontiguousarray(raw[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: U8) -> U8:
    """uint8 [n, k] -> [n, 2k]: all low nibbles of a block, then all high ones."""
    n, k = packed.shape
    values = np.empty((n, 2 * k), np.uint8)
    np.bitwise_and(packed, 15, out=values[:, :k])
    np.right_shift(packed, 4, out=values[:, k:])
    return values


def _five_bits(high: U8, packed: U8) -> U8:
    """Nibbles with a fifth bit from the 4 bytes of `high`, lowest bit first: [n, 32], 0..31."""
    values = _nibbles(packed)
    values |= np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4)
    return values


def _decode_q4_0(raw: U8, out: F32) -> None:
    np.subtract(_nibbles(raw[:, 2:]), np.float32(8), out=out)
    out *= _half(raw, 0)


def _decode_q4_1(raw: U8, out: F32) -> None:
    np.multiply(_nibbles(raw[:, 4:]), _half(raw, 0), out=out)
    out += _half(raw, 2)


def _decode_q5_0(raw: U8, out: F32) -> None:
    np.subtract(_five_bits(raw[:, 2:6], raw[:, 6:]), np.float32(16), out=out)
    out *= _half(raw, 0)


def _decode_q5_1(raw: U8, out: F32) -> None:
    np.multiply(_five_bits(raw[:, 4:8], raw[:, 8:]), _half(raw, 0), out=out)
    out += _half(raw, 2)


def _decode_q8_0(raw: U8, out: F32) -> None:
    np.multiply(raw[:, 2:].view(np.int8), _half(raw, 0), out=out)


def _k_scales(packed: U8) -> tuple[U8, U8]:
    """Eight 6-bit scales and eight 6-bit minima out of 12 bytes, each [n, 8].

    Groups 0-3 keep theirs in the low six bits of bytes 0-3 (scales) and 4-7 (minima). Groups 4-7 keep the low four bits
    in the nibbles of bytes 8-11 and the upper two in the top bits of bytes 0-7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=1)
    return scales, minima


def _scale_groups(raw: U8, quants: U8, out: F32) -> None:
    """out = (d * scale) * quants - (dmin * min) over 8 groups of 32; quants [n, 8, 32]."""
    scales, minima = _k_scales(raw[:, 4:16])
    groups = out.reshape(-1, 8, 32)
    np.multiply(quants, (_half(raw, 0) * scales)[:, :, None], out=groups)
    groups -= (_half(raw, 2) * minima)[:, :, None]


def _group_nibbles(packed: U8) -> U8:
    """128 bytes -> [n, 8, 32]: each 32 bytes hold a group in their low nibbles and the next one in the high ones."""
    return _nibbles(packed.reshape(-1, 32)).reshape(-1, 8, 32)


def _decode_q4_k(raw: U8, out: F32) -> None:
    _scale_groups(raw, _group_nibbles(raw[:, 16:]), out)


def _decode_q5_k(raw: U8, out: F32) -> None:
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    fifth = (raw[:, None, 16:48] >> shifts) & np.uint8(1)
    _scale_groups(raw, _group_nibbles(raw[:, 48:]) | fifth << np.uint8(4), out)


def _decode_q6_k(raw: U8, out: F32) -> None:
    # two halves of 128 values: 64 bytes of ql give four runs of 32 nibbles (low of bytes 0-31, low of 32-63, then the
    # high ones), 32 bytes of qh give two more bits to each run
    low = raw[:, 0:128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & np.uint8(15)
    high = raw[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)
    quants = low.reshape(-1, 2, 4, 32) | high << np.uint8(4)
    scales = raw[:, 192:208].view(np.int8) * _half(raw, 208)
    groups = out.reshape(-1, 16, 16)
    np.subtract(quants.reshape(-1, 16, 16), np.float32(32), out=groups)
    groups *= scales[:, :, None]


TYPE_NAMES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""ggml's numbers of tensor types (`enum ggml_type`), those that are not computed included: an error names them."""

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        F32_CODEC,
        F16_CODEC,
        BF16_CODEC,
        Codec("Q4_0", 32, 18, _decode_q4_0),
        Codec("Q4_1", 32, 20, _decode_q4_1),
        Codec("Q5_0", 32, 22, _decode_q5_0),
        Codec("Q5_1", 32, 24, _decode_q5_1),
        Codec("Q8_0", 32, 34, _decode_q8_0),
        Codec("Q4_K", 256, 144, _decode_q4_k),
        Codec("Q5_K", 256, 176, _decode_q5_k),
        Codec("Q6_K", 256, 210, _decode_q6_k),
    )
}
"""The types that can be read, by name."""
