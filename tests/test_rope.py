"""Rotary frequencies against transformers' own (tests/families/rope.json), and the tables made from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.config import ROPE_SCALINGS, ModelConfig, RopeConfig
from cupaged.errors import UnsupportedModelError
from cupaged.model.rope import inverse_frequencies, rope_tables

REFERENCES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "families" / "rope.json").read_text("utf-8"))["cases"]
LLAMA3 = RopeConfig(theta=5e5, scaling="llama3", factor=32.0, original_max_position=8192)


def model(rope: RopeConfig, *, head_dim: int = 64, max_position: int = 2048) -> ModelConfig:
    return ModelConfig("llama", 16, 64, 64, 1, 1, 1, head_dim, max_position, rope=rope)


@pytest.mark.parametrize("case", REFERENCES, ids=lambda case: f"{case['rope'].get('scaling', 'default')}-{case['head_dim']}-{case['length']}")
def test_inverse_frequencies_equal_transformers(case: dict[str, Any]) -> None:
    inv_freq, scale = inverse_frequencies(RopeConfig(**case["rope"]), case["head_dim"], case["length"])
    assert inv_freq.dtype == np.float64
    np.testing.assert_allclose(inv_freq, case["inv_freq"], rtol=2e-6)
    assert scale == pytest.approx(case["attention_scale"], rel=1e-12)


def test_every_scaling_has_a_reference() -> None:
    assert {case["rope"].get("scaling", "default") for case in REFERENCES} == set(ROPE_SCALINGS)


def test_llama3_keeps_blends_and_divides_the_pairs_of_llama_3_2() -> None:
    """head_dim 64, theta 5e5, factor 32, turns 1 to 4, original 8192: 0-14 kept, 15-17 blended, 18-31 divided."""
    plain, _ = inverse_frequencies(replace(LLAMA3, scaling="default"), 64, 8192)
    scaled, scale = inverse_frequencies(LLAMA3, 64, 8192)
    ratio = plain / scaled
    assert scale == 1.0
    np.testing.assert_array_equal(scaled[:15], plain[:15])
    assert np.all((ratio[15:18] > 1.001) & (ratio[15:18] < 31.9))
    np.testing.assert_allclose(ratio[18:], 32.0, rtol=1e-12)


def test_dynamic_base_is_fixed_by_the_longest_sequence() -> None:
    """The table's first rows must not depend on how long a sequence happens to be, only on max_model_len."""
    rope = RopeConfig(scaling="dynamic", factor=2.0)
    short, long = rope_tables(model(rope), 2048), rope_tables(model(rope), 4096)
    plain = rope_tables(model(RopeConfig()), 4096)
    np.testing.assert_array_equal(short[0], plain[0][:2048])  # within the original context nothing is stretched
    assert np.abs(long[0][:2048] - short[0]).max() > 0.1
    # theta * (factor * 4096 / 2048 - (factor - 1)) ** (64 / 62), by hand
    stretched = rope_tables(model(RopeConfig(theta=1e4 * 3.0 ** (64 / 62))), 4096)
    np.testing.assert_allclose(long[0], stretched[0], atol=1e-6)


def test_tables_hold_cosine_and_sine_of_position_times_frequency() -> None:
    cos, sin = rope_tables(model(RopeConfig(theta=5e5), head_dim=32), 5000)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (5000, 16)
    for position, pair in [(0, 0), (1, 0), (4999, 0), (4999, 15), (1234, 7)]:
        angle = position * 5e5 ** (-2 * pair / 32)
        assert cos[position, pair] == pytest.approx(np.cos(angle), abs=1e-7)
        assert sin[position, pair] == pytest.approx(np.sin(angle), abs=1e-7)


def test_far_positions_keep_float64_accuracy() -> None:
    """A float32 angle of 130,000 is off by 0.004; the tables are exact to float32 rounding."""
    cos, sin = rope_tables(model(RopeConfig(), head_dim=2), 131072)
    assert cos[130_001, 0] == pytest.approx(np.cos(130_001.0), abs=1e-7)
    np.testing.assert_allclose(cos.astype(np.float64) ** 2 + sin.astype(np.float64) ** 2, 1.0, atol=3e-7)


def test_yarn_lengthens_both_tables() -> None:
    rope = RopeConfig(scaling="yarn", factor=4.0, original_max_position=64)
    cos, sin = rope_tables(model(rope), 256)
    length = 0.1 * np.log(4.0) + 1.0
    np.testing.assert_allclose(np.hypot(cos, sin), length, rtol=1e-6)


def test_original_context_defaults_to_the_models() -> None:
    for scaling in ("dynamic", "llama3", "yarn"):
        absent = model(RopeConfig(scaling=scaling, factor=4.0), max_position=512)
        given = model(RopeConfig(scaling=scaling, factor=4.0, original_max_position=512), max_position=99)
        np.testing.assert_array_equal(rope_tables(absent, 1024)[0], rope_tables(given, 1024)[0])


def test_frequency_factors_divide_the_default_frequencies() -> None:
    """A GGUF file carries llama3 scaling as one factor a pair (`rope_freqs.weight`)."""
    plain, _ = inverse_frequencies(replace(LLAMA3, scaling="default"), 64, 8192)
    scaled, _ = inverse_frequencies(LLAMA3, 64, 8192)
    factors = tuple(float(f) for f in plain / scaled)
    by_factors, scale = inverse_frequencies(RopeConfig(theta=5e5, freq_factors=factors), 64, 8192)
    assert scale == 1.0
    np.testing.assert_allclose(by_factors, scaled, rtol=1e-12)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (RopeConfig(freq_factors=(1.0,) * 31), "31 RoPE frequency factors do not fit head_dim 64: 32 are needed"),
        (RopeConfig(scaling="linear", factor=2.0, freq_factors=(1.0,) * 32), "cannot be combined with linear"),
        (RopeConfig(scaling="llama3", low_freq_factor=4.0, original_max_position=64), "low_freq_factor .* below high_freq_factor"),
        (RopeConfig(scaling="yarn"), "yarn RoPE scaling needs original_max_position_embeddings"),
        (RopeConfig(scaling="yarn", theta=1.0, original_max_position=64), "theta other than 1"),
    ],
)
def test_settings_that_describe_no_rotation_are_refused(rope: RopeConfig, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        inverse_frequencies(rope, 64, 128)


def test_dynamic_scaling_of_a_single_pair_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="head_dim of at least 4"):
        inverse_frequencies(RopeConfig(scaling="dynamic", original_max_position=64), 2, 128)
