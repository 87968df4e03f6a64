"""config.json and generation_config.json -> ModelConfig and GenerationDefaults.

Fields mean what they mean in transformers, and one that is absent has the default of the architecture's class there:
a Llama 1 config names neither its key/value heads nor its theta. Fields that do not change the result (dropout,
initialisation, pretraining_tp, which only cuts products into slices) are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupaged.checkpoint.base import GenerationDefaults
from cupaged.checkpoint.fields import Fields
from cupaged.checkpoint.hf_rope import rope_config
from cupaged.config import MAX_LAYERS, ModelConfig
from cupaged.errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True)
class _Defaults:
    """What an absent field means. None: derived from other fields, or no token."""

    max_position: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    sliding_window: int = 4096
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_DEFAULTS = {
    "llama": _Defaults(2048, bos_token_id=1, eos_token_ids=(2,)),
    "mistral": _Defaults(131072, num_kv_heads=8, bos_token_id=1, eos_token_ids=(2,)),
    "qwen2": _Defaults(32768, num_kv_heads=32),
    "qwen3": _Defaults(32768, num_kv_heads=32, head_dim=128),
}


def model_config(path: Path, values: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """The model's shape from config.json (`values`, read from `path`); generation_config.json's token ids come first.

    Raises CheckpointError for missing or broken fields, UnsupportedModelError for a model that is not computed.
    """
    fields = Fields(str(path), values)
    architecture = _architecture(fields)
    _check_supported(fields)
    defaults = _DEFAULTS[architecture]
    hidden, heads = fields.required("hidden_size"), fields.required("num_attention_heads")
    num_layers = fields.required("num_hidden_layers")
    head_dim = fields.whole("head_dim") or defaults.head_dim or hidden // max(heads, 1)
    kv_heads = fields.whole("num_key_value_heads")
    if kv_heads is None:  # null says "as many as heads", which for some is not what absence says
        kv_heads = heads if "num_key_value_heads" in values else defaults.num_kv_heads or heads
    attention_bias = bool(fields.flag("attention_bias")) and architecture in ("llama", "qwen3")
    max_position = fields.whole("max_position_embeddings") or defaults.max_position
    rope, max_position = rope_config(fields, max_position)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.required("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.required("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        tie_word_embeddings=bool(fields.flag("tie_word_embeddings")),
        qkv_bias=attention_bias or architecture == "qwen2",
        output_bias=attention_bias,
        mlp_bias=bool(fields.flag("mlp_bias")) and architecture == "llama",
        qk_norm=architecture == "qwen3",
        layer_windows=_layer_windows(fields, architecture, defaults, num_layers),
        **_special_tokens(fields, Fields("generation_config.json", generation), defaults),
    )


def generation_defaults(path: Path, values: Mapping[str, Any]) -> GenerationDefaults:
    """What generation_config.json recommends for sampling.

    An explicit do_sample = false means that the authors decode greedily and the temperature beside it is a leftover;
    an absent one means that they left the choice open, so that what they do give is a recommendation.
    """
    fields = Fields(str(path), values)
    penalty = fields.number("repetition_penalty")
    if fields.flag("do_sample") is False:
        return GenerationDefaults(repetition_penalty=penalty)
    return GenerationDefaults(
        temperature=fields.number("temperature"),
        top_k=fields.whole("top_k"),
        top_p=fields.number("top_p"),
        min_p=fields.number("min_p"),
        repetition_penalty=penalty,
    )


def _architecture(fields: Fields) -> str:
    """From `architectures` or, in configs that lack it, `model_type`."""
    names = fields.values.get("architectures") or []
    model_type = fields.values.get("model_type")
    if names:
        name = names[0] if isinstance(names, list) else names
        architecture = _ARCHITECTURES.get(name) if isinstance(name, str) else None
    elif isinstance(model_type, str):
        name, architecture = model_type, model_type if model_type in _DEFAULTS else None
    else:
        raise CheckpointError(f"{fields.origin} names no model: architectures and model_type are missing")
    if architecture is None:
        raise UnsupportedModelError(
            f"{fields.origin}: architecture {name!r} is not supported; supported: {', '.join(_ARCHITECTURES)}"
        )
    return architecture


def _check_supported(fields: Fields) -> None:
    quantization = fields.values.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(
            f"{fields.origin}: weights quantised with {method!r} are not supported; use a GGUF file or the original weights"
        )
    for name in ("num_local_experts", "num_experts"):
        if (fields.whole(name) or 0) > 1:
            raise UnsupportedModelError(f"{fields.origin}: mixture-of-experts models ({name}) are not supported")
    activation = fields.values.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"{fields.origin}: hidden_act {activation!r} is not supported; silu is")


def _layer_windows(fields: Fields, architecture: str, defaults: _Defaults, num_layers: int) -> tuple[int, ...]:
    """Sliding windows: in every layer for Mistral; for Qwen where use_sliding_window and the layer's type say so."""
    if architecture == "llama":
        return ()
    if num_layers > MAX_LAYERS:
        return ()  # refused for that
    given = fields.whole("sliding_window")
    window = given or 0 if "sliding_window" in fields.values else defaults.sliding_window
    if architecture == "mistral":
        return (window,) * num_layers if window else ()
    if not fields.flag("use_sliding_window") or not window:
        return ()
    kinds = fields.values.get("layer_types")
    if kinds is None:
        first = fields.whole("max_window_layers")
        first = 28 if first is None else first
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise CheckpointError(f"{fields.origin}: layer_types must name one type for each of {num_layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"{fields.origin}: layer type {kind!r} is not supported")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _special_tokens(config: Fields, generation: Fields, defaults: _Defaults) -> dict[str, Any]:
    bos, eos = defaults.bos_token_id, defaults.eos_token_ids
    for fields in (config, generation):  # the later one wins; null in config.json says that there is none
        if "bos_token_id" in fields.values:
            given = fields.whole("bos_token_id")
            bos = given if given is not None or fields is config else bos
        if "eos_token_id" in fields.values:
            ids = fields.token_ids("eos_token_id")
            eos = ids if ids is not None else () if fields is config else eos
    return {"bos_token_id": bos, "eos_token_ids": eos}
