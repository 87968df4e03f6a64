"""Block decoders against the gguf library, bit for bit, on random and on extreme blocks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from cupaged.checkpoint.gguf_blocks import CODECS, TYPE_NAMES

# bytes at which each type keeps float16 scales
SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
# zero of both signs, smallest and largest subnormal, smallest normal, one, largest, infinity, NaN
EXTREME = np.array([0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF, 0x7C00, 0xFE00], np.uint16)


def decode(name: str, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    codec = CODECS[name]
    out = np.full((len(raw), codec.block_values), np.nan, np.float32)
    with np.errstate(all="ignore"):
        codec.decode(raw, out)
    return out


def oracle(name: str, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    if name == "F32":
        return raw.view(np.float32)
    with np.errstate(all="ignore"):
        return dequantize(raw.reshape(-1), GGMLQuantizationType[name]).astype(np.float32).reshape(len(raw), -1)


@pytest.mark.parametrize("name", CODECS)
def test_decoder_equals_the_library_on_random_blocks(name: str) -> None:
    raw = np.random.default_rng(1).integers(0, 256, (500, CODECS[name].block_bytes), dtype=np.uint8)
    np.testing.assert_array_equal(decode(name, raw), oracle(name, raw))


@pytest.mark.parametrize("name", SCALES)
def test_decoder_equals_the_library_on_extreme_scales(name: str) -> None:
    rng = np.random.default_rng(2)
    raw = rng.integers(0, 256, (len(EXTREME) ** 2, CODECS[name].block_bytes), dtype=np.uint8)
    for at, scale in zip(SCALES[name], np.meshgrid(EXTREME, EXTREME), strict=False):
        raw[:, at : at + 2] = scale.reshape(-1, 1).view(np.uint8)
    for fill in (None, 0, 255):  # quants at both ends of their range too
        if fill is not None:
            keep = {b for at in SCALES[name] for b in (at, at + 1)}
            raw[:, [b for b in range(raw.shape[1]) if b not in keep]] = fill
        np.testing.assert_array_equal(decode(name, raw), oracle(name, raw))


def test_block_sizes_and_type_numbers_are_the_librarys() -> None:
    for name, codec in CODECS.items():
        assert GGML_QUANT_SIZES[GGMLQuantizationType[name]] == (codec.block_values, codec.block_bytes)
    for number, name in TYPE_NAMES.items():
        assert GGMLQuantizationType[name] == number
    assert set(CODECS) <= set(TYPE_NAMES.values())


def test_bfloat16_keeps_every_value() -> None:
    raw = np.arange(65536, dtype=np.uint16).reshape(-1, 1).view(np.uint8)
    assert (decode("BF16", raw).view(np.uint32).ravel() == np.arange(65536, dtype=np.uint32) << 16).all()
