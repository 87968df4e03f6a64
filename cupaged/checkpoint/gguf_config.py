"""GGUF metadata -> ModelConfig and GenerationDefaults.

Keys are those of ggml's docs/gguf.md; `{arch}` is the value of `general.architecture`. What the metadata does not say
(biases, a tied head, the vocabulary's size) is seen from the tensors. Mistral models call themselves `llama` here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cupaged.checkpoint.base import GenerationDefaults
from cupaged.checkpoint.fields import Fields
from cupaged.config import ModelConfig, RopeConfig
from cupaged.errors import CheckpointError, UnsupportedModelError

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
"""Keys that may hold a list with one value per layer."""


def model_config(
    path: Path, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], freq_factors: tuple[float, ...] | None
) -> ModelConfig:
    """The model's shape. `shapes` are the file's tensors by their GGUF names, `freq_factors` its rope_freqs.weight.

    Raises UnsupportedModelError for what the engine does not compute, CheckpointError for missing or broken metadata.
    """
    architecture = _architecture(path, metadata)
    fields = _architecture_fields(path, architecture, metadata)
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise CheckpointError(f"{path} holds no token_embd.weight: not a complete model")
    hidden, heads = fields.required("embedding_length"), fields.required("attention.head_count")
    layers, max_position = fields.required("block_count"), fields.required("context_length")
    head_dim = fields.whole("attention.key_length") or hidden // max(heads, 1)
    window = fields.whole("attention.sliding_window") or 0
    _check_supported(fields, head_dim)
    tokens = Fields(str(path), metadata)
    return ModelConfig(
        architecture=architecture,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden,
        intermediate_size=fields.required("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.whole("attention.head_count_kv") or heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", 1e-5),
        rope=_rope(fields, max_position, freq_factors),
        tie_word_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_down.bias" in shapes,
        qk_norm=architecture == "qwen3",
        layer_windows=(window,) * layers if window else (),
        bos_token_id=tokens.whole("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_token_ids(tokens),
    )


def generation_defaults(path: Path, metadata: Mapping[str, Any]) -> GenerationDefaults:
    """Sampling recommendations, which newer files carry as `general.sampling.*`."""
    fields = Fields(str(path), metadata)
    return GenerationDefaults(
        temperature=fields.number("general.sampling.temp"),
        top_k=fields.whole("general.sampling.top_k"),
        top_p=fields.number("general.sampling.top_p"),
        min_p=fields.number("general.sampling.min_p"),
        repetition_penalty=fields.number("general.sampling.penalty_repeat"),
    )


def _architecture(path: Path, metadata: Mapping[str, Any]) -> str:
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(f"{path} is not a model but a GGUF file of type {kind!r}")
    pieces = Fields(str(path), metadata).whole("split.count") or 1
    if pieces > 1:
        raise UnsupportedModelError(
            f"{path} is one of {pieces} pieces of a split GGUF; join them with llama.cpp's `llama-gguf-split --merge` first"
        )
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path}: architecture {architecture!r} is not supported; supported in GGUF: {', '.join(ARCHITECTURES)}"
        )
    return str(architecture)


def _architecture_fields(path: Path, architecture: str, metadata: Mapping[str, Any]) -> Fields:
    """The values under `{arch}.`, without the prefix; a list with one value per layer counts as that value if all agree."""
    prefix = architecture + "."
    values = {key[len(prefix) :]: value for key, value in metadata.items() if key.startswith(prefix)}
    for key in _PER_LAYER:
        value = values.get(key)
        if isinstance(value, list) and value:
            if any(one != value[0] for one in value):
                raise UnsupportedModelError(f"{path}: {prefix}{key} differs from layer to layer, which is not supported")
            values[key] = value[0]
    return Fields(f"{path}: GGUF metadata {prefix}*", values)


def _check_supported(fields: Fields, head_dim: int) -> None:
    if fields.whole("expert_count"):
        raise UnsupportedModelError(f"{fields.origin}: mixture-of-experts models (expert_count) are not supported")
    if fields.whole("attention.value_length") not in (None, head_dim):
        raise UnsupportedModelError(f"{fields.origin}: values of another length than keys are not supported")
    if fields.whole("rope.dimension_count") not in (None, head_dim):
        raise UnsupportedModelError(f"{fields.origin}: rotary embeddings over part of a head are not supported")


def _eos_token_ids(tokens: Fields) -> tuple[int, ...]:
    """End of text, of turn and of message: each ends an answer."""
    ids = (tokens.whole(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _rope(fields: Fields, max_position: int, freq_factors: tuple[float, ...] | None) -> RopeConfig:
    theta = fields.number("rope.freq_base", 10000.0)
    # files older than rope.scaling.* say rope.scale_linear; a factor of 0 means none
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0)) or 1.0
    scaling = fields.values.get("rope.scaling.type", "linear")
    if scaling == "none" or (scaling == "linear" and factor == 1.0):
        return RopeConfig(theta=theta, freq_factors=freq_factors)
    if freq_factors is not None:
        raise UnsupportedModelError(f"{fields.origin}: rope_freqs.weight together with RoPE scaling {scaling!r} is not supported")
    if scaling == "linear":
        return RopeConfig(theta=theta, scaling="linear", factor=factor)
    if scaling != "yarn":
        raise UnsupportedModelError(f"{fields.origin}: RoPE scaling {scaling!r} is not supported; none, linear and yarn are")
    # a negative ext_factor means yarn's own, 1
    if abs(fields.number("rope.scaling.yarn_ext_factor", 1.0)) != 1.0 or fields.number("rope.scaling.yarn_log_multiplier"):
        raise UnsupportedModelError(f"{fields.origin}: this variant of yarn (ext_factor, log_multiplier) is not supported")
    return RopeConfig(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_max_position=fields.whole("rope.scaling.original_context_length") or max_position,
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=_attention_factor(fields, factor),
    )


def _attention_factor(fields: Fields, factor: float) -> float | None:
    """GGUF's factor multiplies yarn's own, 0.1 ln(factor) + 1 (arXiv 2309.00071, 3.4); RopeConfig's replaces it."""
    extra = fields.number("rope.scaling.yarn_attn_factor", fields.number("rope.scaling.attn_factor", 1.0))
    return None if extra == 1.0 else extra * (0.1 * math.log(factor) + 1.0)
