"""config.json and generation_config.json: every family's fields, their defaults in transformers, and refusals by name."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cupaged.checkpoint import GenerationDefaults
from cupaged.checkpoint.hf_config import generation_defaults, model_config
from cupaged.config import ModelConfig, RopeConfig
from cupaged.errors import CheckpointError, UnsupportedModelError
from tests.checkpoint_builders import CONFIG

PATH = Path("some/config.json")
BASE = ModelConfig("llama", 40, 32, 64, 2, 4, 2, 16, 128, bos_token_id=1, eos_token_ids=(2,))


def read(generation: dict[str, Any] | None = None, /, **changes: Any) -> ModelConfig:
    """CONFIG with fields replaced, or removed where the value is Ellipsis."""
    values = {key: value for key, value in (CONFIG | changes).items() if value is not ...}
    return model_config(PATH, values, generation or {})


def family(name: str) -> dict[str, Any]:
    return {"architectures": [f"{name.capitalize()}ForCausalLM"], "model_type": name}


# ---- shapes and defaults


def test_every_given_field_is_taken() -> None:
    assert read() == BASE


def test_a_llama_1_config_lacks_what_came_later() -> None:
    old = read(num_key_value_heads=..., head_dim=..., max_position_embeddings=..., rms_norm_eps=..., tie_word_embeddings=...)
    assert old == replace(BASE, num_kv_heads=4, head_dim=8, max_position=2048, rms_norm_eps=1e-6)
    assert old.rope == RopeConfig(theta=10000.0)


@pytest.mark.parametrize(
    ("name", "kv_heads", "head_dim", "max_position", "bos", "eos"),
    [
        ("llama", 64, 4, 2048, 1, (2,)),
        ("mistral", 8, 4, 131072, 1, (2,)),
        ("qwen2", 32, 4, 32768, None, ()),
        ("qwen3", 32, 128, 32768, None, ()),
    ],
)
def test_absent_fields_have_the_familys_defaults(
    name: str, kv_heads: int, head_dim: int, max_position: int, bos: int | None, eos: tuple[int, ...]
) -> None:
    absent = dict.fromkeys(("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"), ...)
    config = read(**family(name), **absent, hidden_size=256, num_attention_heads=64)
    assert (config.num_kv_heads, config.head_dim, config.max_position) == (kv_heads, head_dim, max_position)
    assert (config.rms_norm_eps, config.bos_token_id, config.eos_token_ids) == (1e-6, bos, eos)


def test_null_key_value_heads_are_as_many_as_heads() -> None:
    assert read(**family("mistral"), num_key_value_heads=None).num_kv_heads == 4


def test_model_type_stands_in_for_architectures() -> None:
    assert read(architectures=..., model_type="qwen2").architecture == "qwen2"
    assert read(architectures=[], model_type="llama").architecture == "llama"
    assert read(model_type=...).architecture == "llama"


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("llama", {}, (False, False, False, False)),
        ("llama", {"attention_bias": True}, (True, True, False, False)),
        ("llama", {"mlp_bias": True}, (False, False, True, False)),
        ("mistral", {}, (False, False, False, False)),
        ("qwen2", {}, (True, False, False, False)),
        ("qwen3", {}, (False, False, False, True)),
        ("qwen3", {"attention_bias": True}, (True, True, False, True)),
    ],
)
def test_biases_and_head_norms(name: str, given: dict[str, Any], expected: tuple[bool, ...]) -> None:
    config = read(**family(name), **given)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm) == expected


# ---- sliding windows


@pytest.mark.parametrize(
    ("name", "given", "windows"),
    [
        ("llama", {"sliding_window": 24}, ()),
        ("mistral", {"sliding_window": 24}, (24, 24, 24)),
        ("mistral", {"sliding_window": None}, ()),
        ("mistral", {}, (4096,) * 3),
        ("qwen2", {"sliding_window": 24}, ()),
        ("qwen2", {"sliding_window": 24, "use_sliding_window": False, "max_window_layers": 0}, ()),
        ("qwen2", {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 1}, (0, 24, 24)),
        ("qwen2", {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 0}, (24, 24, 24)),
        ("qwen2", {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 3}, (0, 0, 0)),
        ("qwen2", {"sliding_window": 24, "use_sliding_window": True}, (0, 0, 0)),  # max_window_layers is 28
        ("qwen2", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, ()),
        (
            "qwen3",
            {
                "sliding_window": 24,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (24, 0, 24),
        ),
    ],
)
def test_sliding_windows(name: str, given: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert read(**family(name), **given, num_hidden_layers=3).layer_windows == windows


def test_layer_types_that_make_no_sense() -> None:
    sliding = family("qwen2") | {"use_sliding_window": True}
    with pytest.raises(CheckpointError, match="layer_types"):
        read(**sliding, layer_types=["full_attention"])
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        read(**sliding, layer_types=["linear_attention", "full_attention"])


# ---- rotary embeddings


LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, RopeConfig()),
        ({"rope_theta": 500000.0}, RopeConfig(theta=5e5)),
        ({"rope_theta": 500000}, RopeConfig(theta=5e5)),
        ({"rope_scaling": None}, RopeConfig()),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, RopeConfig(scaling="linear", factor=4.0, original_max_position=128)),
        ({"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 4}}, RopeConfig(scaling="linear", factor=4.0, original_max_position=128)),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, RopeConfig(scaling="dynamic", factor=2.0, original_max_position=128)),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}},
            RopeConfig(scaling="dynamic", factor=2.0, original_max_position=128),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            RopeConfig(5e5, "llama3", 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
        ),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, RopeConfig(5e5, "llama3", 32.0, 8192)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeConfig(theta=1e6)),
        ({"rope_theta": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeConfig(theta=1e6)),
        ({"rope_scaling": YARN}, RopeConfig(scaling="yarn", factor=4.0, original_max_position=64)),
        (
            {"rope_scaling": YARN | {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5, "truncate": False}},
            RopeConfig(
                scaling="yarn", factor=4.0, original_max_position=64, beta_fast=16, beta_slow=2, attention_factor=1.5, truncate=False
            ),
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, RopeConfig(scaling="yarn", factor=4.0, original_max_position=128)),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 32}},
            RopeConfig(scaling="yarn", factor=4.0, original_max_position=32),
        ),
        ({"original_max_position_embeddings": 32, "rope_scaling": YARN}, RopeConfig(scaling="yarn", factor=4.0, original_max_position=32)),
    ],
)
def test_rope(given: dict[str, Any], expected: RopeConfig) -> None:
    assert read(**given).rope == expected


def test_yarns_mscale_makes_the_attention_factor() -> None:
    # two published mscales cancel to 1; unequal ones give their ratio (0.1 m ln(factor) + 1 each)
    equal = read(rope_scaling=YARN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}).rope
    assert equal.attention_factor == 1.0
    unequal = read(rope_scaling=YARN | {"factor": 40, "mscale": 0.707, "mscale_all_dim": 1.0}).rope
    assert unequal.attention_factor == pytest.approx((0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1))
    given = read(rope_scaling=YARN | {"attention_factor": 1.25, "mscale": 0.707, "mscale_all_dim": 1.0}).rope
    assert given.attention_factor == 1.25
    assert read(rope_scaling=YARN | {"mscale": 0.707}).rope.attention_factor is None


def test_yarn_stretches_the_longest_sequence() -> None:
    assert read(rope_scaling=YARN).max_position == 256  # 64 x 4, though the file still says 128
    assert read(rope_scaling=YARN, max_position_embeddings=1024).max_position == 1024
    assert read(rope_scaling={"type": "linear", "factor": 4.0}).max_position == 128


# ---- refusals


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification"]),
        ({"architectures": [["x"]]}, ["x"]),
        ({"architectures": ..., "model_type": "gemma3"}, ["gemma3"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["awq", "GGUF"]),
        ({"num_local_experts": 8}, ["num_local_experts"]),
        ({"hidden_act": "gelu"}, ["gelu", "silu"]),
        ({"partial_rotary_factor": 0.5}, ["part of a head"]),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["part of a head"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["layer type"]),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, ["longrope", "yarn"]),
        ({"rope_scaling": {"rope_type": ["x"]}}, ["RoPE scaling"]),
        ({"num_attention_heads": 3}, ["3 query heads", "2 key/value heads"]),
        ({"head_dim": 15}, ["head_dim", "15"]),
        ({"num_attention_heads": 0, "num_key_value_heads": 0}, ["num_heads"]),
        ({"architectures": ..., "model_type": "mistral", "num_hidden_layers": 2**62, "sliding_window": 8}, ["layers"]),
        ({"architectures": ..., "model_type": "mistral", "sliding_window": 2**31}, ["sliding window"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "beta_slow": 1e308}}, ["beta_slow"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 1e-308}}, ["beta_fast"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e308}}, ["factor"]),
    ],
)
def test_what_is_not_computed_is_refused_by_name(given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        read(**given)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hidden_size": ...}, "lacks hidden_size"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers must be a number, not 'two'"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"hidden_size": 32.5}, "hidden_size must be a whole number"),
        ({"hidden_size": 1e308}, "hidden_size must be a whole number of at most 64 bits"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "has no factor"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "factor must be a number"),
        ({"architectures": ..., "model_type": ...}, "names no model"),
        ({"architectures": ..., "model_type": {}}, "names no model"),
    ],
)
def test_missing_and_mistyped_fields_are_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read(**given)
    assert words in str(error.value)
    assert "config.json" in str(error.value)


# ---- token ids and generation_config.json


@pytest.mark.parametrize(
    ("config", "generation", "bos", "eos"),
    [
        ({}, {}, 1, (2,)),
        ({"bos_token_id": 5, "eos_token_id": [6, 7, 6]}, {}, 5, (6, 7)),
        ({"bos_token_id": 5, "eos_token_id": 6}, {"bos_token_id": 8, "eos_token_id": [9, 10]}, 8, (9, 10)),
        ({"bos_token_id": 5, "eos_token_id": 6}, {"eos_token_id": 9}, 5, (9,)),
        ({"bos_token_id": 5, "eos_token_id": 6}, {"bos_token_id": None, "eos_token_id": None}, 5, (6,)),
        ({"bos_token_id": None, "eos_token_id": None}, {}, None, ()),
        ({"bos_token_id": None, "eos_token_id": None}, {"eos_token_id": 0}, None, (0,)),
    ],
)
def test_special_tokens(config: dict[str, Any], generation: dict[str, Any], bos: int | None, eos: tuple[int, ...]) -> None:
    result = read(generation, **config)
    assert (result.bos_token_id, result.eos_token_ids) == (bos, eos)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, GenerationDefaults()),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1},
            GenerationDefaults(0.6, 20, 0.95, 0.1, 1.1),
        ),
        ({"temperature": 0.6, "top_p": None}, GenerationDefaults(temperature=0.6)),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}, GenerationDefaults(repetition_penalty=1.1)),
    ],
)
def test_generation_defaults(values: dict[str, Any], expected: GenerationDefaults) -> None:
    assert generation_defaults(Path("generation_config.json"), values) == expected


def test_a_mistyped_recommendation_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: temperature must be a number"):
        generation_defaults(Path("generation_config.json"), {"temperature": "hot"})
