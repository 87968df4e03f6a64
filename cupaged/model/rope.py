"""Rotary position embedding as two tables, cosine and sine, and the scalings of its frequencies.

Pair i of a head turns by position * inv_freq[i] (RoFormer, arXiv 2104.09864). Every scaling only changes the vector of
inverse frequencies, and yarn also the length of the rotated vectors, so one table a model serves every step: gathered
by position, it never depends on how a sequence was cut into steps. Everything is computed in float64 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from cupaged.config import ModelConfig, RopeConfig
from cupaged.errors import UnsupportedModelError

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def rope_tables(config: ModelConfig, max_model_len: int) -> tuple[F32, F32]:
    """(cos, sin), each float32 [max_model_len, head_dim / 2]; yarn's attention scaling is multiplied into both.

    A scaling whose original context length is not given takes the model's max_position for it, as transformers does.
    Raises UnsupportedModelError for settings that describe no rotation.
    """
    rope = config.rope
    if rope.original_max_position is None:
        rope = replace(rope, original_max_position=config.max_position)
    inv_freq, attention_scale = inverse_frequencies(rope, config.head_dim, max_model_len)
    angles = np.arange(max_model_len, dtype=np.float64)[:, None] * inv_freq
    cos, sin = np.cos(angles) * attention_scale, np.sin(angles) * attention_scale
    return cos.astype(np.float32), sin.astype(np.float32)


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_model_len: int) -> tuple[F64, float]:
    """(radians per position of each pair, float64 [head_dim / 2]; the factor for both cosine and sine).

    `max_model_len` matters to dynamic NTK alone, see `_dynamic`. Raises UnsupportedModelError.
    """
    if rope.freq_factors is None:
        return _SCALINGS[rope.scaling](rope, head_dim, max_model_len)
    if rope.scaling != "default":
        raise UnsupportedModelError(f"RoPE frequency factors cannot be combined with {rope.scaling} scaling")
    if len(rope.freq_factors) != head_dim // 2:
        raise UnsupportedModelError(
            f"{len(rope.freq_factors)} RoPE frequency factors do not fit head_dim {head_dim}: {head_dim // 2} are needed"
        )
    return _unscaled(rope.theta, head_dim) / np.array(rope.freq_factors, np.float64), 1.0


def _unscaled(theta: float, head_dim: int) -> F64:
    """theta ** (-2i / head_dim) for pair i."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    result: F64 = 1.0 / theta**exponents
    return result


def _default(rope: RopeConfig, head_dim: int, max_model_len: int) -> tuple[F64, float]:
    return _unscaled(rope.theta, head_dim), 1.0


def _linear(rope: RopeConfig, head_dim: int, max_model_len: int) -> tuple[F64, float]:
    """Positions divided by the factor (arXiv 2306.15595)."""
    return _unscaled(rope.theta, head_dim) / rope.factor, 1.0


def _dynamic(rope: RopeConfig, head_dim: int, max_model_len: int) -> tuple[F64, float]:
    """NTK-aware theta for one fixed length: the longest sequence the engine takes.

    transformers recomputes theta as a sequence grows past its original context. Keys already in the cache then keep
    their old rotation, so an answer depends on how the text was cut into steps, and blocks cannot be shared between
    sequences of different lengths. Here theta is computed once for max(max_model_len, original context) and equals
    theirs for a sequence of exactly that length.
    """
    original = _original_context(rope)
    if head_dim < 4:
        raise UnsupportedModelError(f"dynamic RoPE scaling needs a head_dim of at least 4, not {head_dim}")
    stretch = rope.factor * max(max_model_len, original) / original - (rope.factor - 1)
    theta = rope.theta * stretch ** (head_dim / (head_dim - 2))
    return _unscaled(theta, head_dim), 1.0


def _llama3(rope: RopeConfig, head_dim: int, max_model_len: int) -> tuple[F64, float]:
    """Llama 3.1: keep the fast pairs, divide the slow ones by the factor, blend in between.

    A pair's speed is the number of its full turns within the original context: at high_freq_factor turns or more it is
    kept, at low_freq_factor or fewer it is divided.
    """
    low, high = rope.low_freq_factor, rope.high_freq_factor
    if not low < high:
        raise UnsupportedModelError(f"llama3 RoPE scaling needs low_freq_factor ({low}) below high_freq_factor ({high})")
    plain = _unscaled(rope.theta, head_dim)
    turns = _original_context(rope) * plain / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return _blend(plain, rope.factor, keep), 1.0


def _yarn(rope: RopeConfig, head_dim: int, max_model_len: int) -> tuple[F64, float]:
    """YaRN (arXiv 2309.00071): a linear ramp over the pairs' indices, and slightly longer rotated vectors.

    The ramp runs from the pair that makes beta_fast turns within the original context (kept) to the one that makes
    beta_slow (divided by the factor).
    """
    original = _original_context(rope)
    if rope.theta == 1.0:
        raise UnsupportedModelError("yarn RoPE scaling needs a rope theta other than 1")

    def pair_with_turns(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a division by zero; the same width as in transformers
    keep = 1.0 - np.clip((np.arange(head_dim // 2) - first) / (last - first), 0.0, 1.0)
    scale = rope.attention_factor
    if scale is None:
        scale = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return _blend(_unscaled(rope.theta, head_dim), rope.factor, keep), scale


def _blend(plain: F64, factor: float, keep: F64) -> F64:
    """`keep` of each frequency unchanged, the rest divided by the factor."""
    result: F64 = plain * keep + plain / factor * (1.0 - keep)
    return result


def _original_context(rope: RopeConfig) -> int:
    if rope.original_max_position is None:
        raise UnsupportedModelError(f"{rope.scaling} RoPE scaling needs original_max_position_embeddings")
    return rope.original_max_position


_SCALINGS: dict[str, Callable[[RopeConfig, int, int], tuple[F64, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
