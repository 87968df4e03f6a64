"""The rotary part of config.json -> RopeConfig.

Newer files keep everything in `rope_parameters`, older ones `rope_theta` beside `rope_scaling`, whose type is called
`type` in the oldest. Both spell the scalings alike.
"""

from __future__ import annotations

import math

from cupaged.checkpoint.fields import Fields
from cupaged.config import ROPE_SCALINGS, RopeConfig
from cupaged.errors import CheckpointError, UnsupportedModelError


def rope_config(config: Fields, max_position: int) -> tuple[RopeConfig, int]:
    """(RopeConfig, the longest sequence it serves). Yarn stretches the original context, which some files repeat as
    max_position_embeddings. Raises CheckpointError or UnsupportedModelError.
    """
    rope = _parameters(config)
    for fields in (rope, config):
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModelError(f"{config.origin}: rotary embeddings over part of a head are not supported")
    theta = rope.number("rope_theta") or config.number("rope_theta") or 10000.0
    scaling = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if scaling == "default":
        return RopeConfig(theta=theta), max_position
    if scaling not in ROPE_SCALINGS:
        raise UnsupportedModelError(
            f"{config.origin}: RoPE scaling {scaling!r} is not supported; supported: {', '.join(ROPE_SCALINGS)}"
        )
    original = config.whole("original_max_position_embeddings") or rope.whole("original_max_position_embeddings")
    if original is None or scaling == "dynamic":  # dynamic NTK counts from the model's own length, as transformers does
        original = max_position
    factor = rope.number("factor")
    if factor is None and scaling == "yarn":
        factor = max_position / original
    if factor is None:
        raise CheckpointError(f"{config.origin}: RoPE scaling {scaling!r} has no factor")
    result = RopeConfig(
        theta=theta,
        scaling=scaling,
        factor=factor,
        original_max_position=original,
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=_attention_factor(rope, factor) if scaling == "yarn" else None,
        truncate=rope.flag("truncate") is not False,
    )
    return result, max(max_position, int(original * factor)) if scaling == "yarn" else max_position


def _parameters(config: Fields) -> Fields:
    """The object that holds the scaling; an empty one where there is none."""
    for name in ("rope_scaling", "rope_parameters"):
        value = config.values.get(name)
        if not value:
            continue
        if not isinstance(value, dict):
            raise CheckpointError(f"{config.origin}: {name} must be an object, not {value!r}")
        if any(isinstance(inner, dict) for inner in value.values()):
            raise UnsupportedModelError(f"{config.origin}: rotary embeddings that differ by layer type are not supported")
        return Fields(f"{config.origin}: {name}", value)
    return Fields(config.origin, {})


def _attention_factor(rope: Fields, factor: float) -> float | None:
    """Yarn's factor for cosine and sine: given, or from mscale / mscale_all_dim; None: yarn's own of `factor`."""
    given = rope.number("attention_factor")
    mscale, mscale_all_dim = rope.number("mscale"), rope.number("mscale_all_dim")
    if given is not None or not mscale or not mscale_all_dim or factor <= 1:
        return given
    return (0.1 * mscale * math.log(factor) + 1.0) / (0.1 * mscale_all_dim * math.log(factor) + 1.0)
