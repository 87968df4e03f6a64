"""The GGUF versions of some of the families: the same numbers under llama.cpp's names and layout.

What llama.cpp's converter does to a checkpoint, in short: tensors get short names; in architecture `llama` (and in no
other) the rows of every query and key head are interleaved, so that the two halves of a rotary pair lie side by side;
llama3's scaling becomes one factor a pair in `rope_freqs.weight`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

# Family -> type of its matrices; vectors are F32, as always. Each type holds the folder's numbers exactly.
GGUF_FAMILIES = {
    "llama3": GGMLQuantizationType.F16,
    "llama_bias": GGMLQuantizationType.F32,
    "qwen2": GGMLQuantizationType.Q8_0,
    "qwen3": GGMLQuantizationType.BF16,
}

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def q8_0_exact(matrix: np.ndarray) -> np.ndarray:
    """The nearest matrix that Q8_0 stores without loss."""
    return dequantize(quantize(matrix, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0).reshape(matrix.shape)


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{suffix}"


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows (half, pair) of each head -> (pair, half)."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def rope_factors(spec: dict[str, Any], head_dim: int) -> np.ndarray:
    """llama3's scaling as a divisor for each pair of dimensions."""
    scaling = spec["rope_scaling"]
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    turns = scaling["original_max_position_embeddings"] * spec["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def write_gguf(path: Path, name: str, spec: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    matrix_type = GGUF_FAMILIES[name]
    heads, kv_heads = spec["num_attention_heads"], spec["num_key_value_heads"]
    head_dim = spec.get("head_dim", spec["hidden_size"] // heads)
    arch = spec["model_type"]
    writer = GGUFWriter(path, arch)
    writer.add_name(name)
    writer.add_vocab_size(spec["vocab_size"])
    writer.add_block_count(spec["num_hidden_layers"])
    writer.add_context_length(spec["max_position_embeddings"])
    writer.add_embedding_length(spec["hidden_size"])
    writer.add_feed_forward_length(spec["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(spec["rms_norm_eps"])
    writer.add_rope_freq_base(spec.get("rope_theta") or spec["rope_parameters"]["rope_theta"])
    if arch != "qwen2":  # whose head size is always hidden / heads, and left out
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if arch == "llama":
        writer.add_rope_dimension_count(head_dim)
        if spec.get("rope_scaling"):
            writer.add_tensor("rope_freqs.weight", rope_factors(spec, head_dim))
    for key, value in tensors.items():
        if key == "lm_head.weight" and spec["tie_word_embeddings"]:
            continue
        if arch == "llama" and ".q_proj." in key:
            value = interleave(value, heads)
        if arch == "llama" and ".k_proj." in key:
            value = interleave(value, kv_heads)
        if value.ndim == 2 and matrix_type != GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(key), quantize(value, matrix_type), raw_dtype=matrix_type)
        else:
            writer.add_tensor(gguf_name(key), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
