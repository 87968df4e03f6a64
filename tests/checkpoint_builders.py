"""Small checkpoints for tests: one random model, written as a safetensors folder or as a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.numpy import save_file

from cupaged.config import ModelConfig

Tensors = dict[str, npt.NDArray[Any]]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def random_tensors(config: ModelConfig, seed: int = 0) -> Tensors:
    """What a model of this config stores, by Hugging Face name; written out here, not taken from the product."""
    rng = np.random.default_rng(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        for name, out, width, bias in (
            ("self_attn.q_proj", q, hidden, config.qkv_bias),
            ("self_attn.k_proj", kv, hidden, config.qkv_bias),
            ("self_attn.v_proj", kv, hidden, config.qkv_bias),
            ("self_attn.o_proj", hidden, q, config.output_bias),
            ("mlp.gate_proj", inner, hidden, config.mlp_bias),
            ("mlp.up_proj", inner, hidden, config.mlp_bias),
            ("mlp.down_proj", hidden, inner, config.mlp_bias),
        ):
            shapes[f"{at}{name}.weight"] = (out, width)
            if bias:
                shapes[f"{at}{name}.bias"] = (out,)
        shapes |= {f"{at}input_layernorm.weight": (hidden,), f"{at}post_attention_layernorm.weight": (hidden,)}
        if config.qk_norm:
            shapes |= {f"{at}self_attn.q_norm.weight": (config.head_dim,), f"{at}self_attn.k_norm.weight": (config.head_dim,)}
    # multiples of 1/8 up to 15: exact in float16 and bfloat16 alike
    return {name: (rng.integers(-120, 120, shape) / 8).astype(np.float32) for name, shape in shapes.items()}


def write_folder(
    path: Path, config: Mapping[str, Any], tensors: Tensors, dtype: Any = np.float32, generation: Mapping[str, Any] | None = None
) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    save_file({name: tensor.astype(dtype) for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def write_shards(path: Path, config: Mapping[str, Any], shards: Mapping[str, Tensors], index: Mapping[str, str]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    for name, tensors in shards.items():
        save_file({key: tensor.astype(ml_dtypes.bfloat16) for key, tensor in tensors.items()}, path / name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": dict(index)}))
    return path


def gguf_name(name: str) -> str:
    for hf, short in (("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")):
        if name.startswith(hf + "."):
            return short + name[len(hf) :]
    _, _, layer, rest = name.split(".", 3)
    stem, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{GGUF_NAMES[stem]}.{kind}"


def interleave(rows: npt.NDArray[Any], head_dim: int) -> npt.NDArray[Any]:
    """Hugging Face rows -> the rows of a GGUF `llama` file: the two of a rotary pair side by side."""
    out = np.empty_like(rows)
    for row in range(len(rows)):
        head, within = divmod(row, head_dim)
        half, pair = divmod(within, head_dim // 2)
        out[head * head_dim + 2 * pair + half] = rows[row]
    return out


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Tensors,
    matrix_type: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    extra: Tensors | None = None,
) -> Path:
    """`metadata` adds to or replaces keys (None removes one); `extra` tensors are stored as they are, under their names."""
    arch = config.architecture
    writer = GGUFWriter(path, arch)
    keys = {
        f"{arch}.block_count": config.num_layers,
        f"{arch}.context_length": config.max_position,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_heads,
        f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.freq_base": float(config.rope.theta),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **(metadata or {}),
    }
    for key, value in keys.items():
        if key == "general.alignment":
            writer.add_custom_alignment(value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            tensor = interleave(tensor, config.head_dim)
        kind = matrix_type if tensor.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), quantize(tensor, kind), raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored(tensor: npt.NDArray[Any], kind: GGMLQuantizationType) -> npt.NDArray[Any]:
    """What a tensor becomes by being stored as `kind`."""
    return dequantize(quantize(tensor, kind), kind).reshape(tensor.shape)
