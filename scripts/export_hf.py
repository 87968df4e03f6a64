"""Write a checkpoint as a Hugging Face folder of float32 weights, which torch engines can read.

    python scripts/export_hf.py MODEL FOLDER

MODEL is whatever --model takes. Quantised weights are dequantised, so every engine then computes the very same numbers.
config.json and model.safetensors only: no tokenizer. Rotary embeddings with scaling are refused.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from cupaged.checkpoint import open_checkpoint
from cupaged.config import ModelConfig
from cupaged.hub import resolve_model

CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The fields of config.json. Raises ValueError for what it cannot say."""
    if config.rope.scaling != "default":
        raise ValueError(f"rotary scaling {config.rope.scaling!r} is not exported")
    windows = set(config.layer_windows) - {0}
    if windows and (len(windows) > 1 or 0 in config.layer_windows):
        raise ValueError("windows that differ between layers are not exported")
    return {
        "architectures": [CLASSES[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": windows.pop() if windows else None,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "dtype": "float32",
    }


def export(model: str, folder: Path) -> None:
    checkpoint = open_checkpoint(resolve_model(model))
    fields = hf_config(checkpoint.config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=1), encoding="utf-8")
    tensors = {name: source.read() for name, source in checkpoint.tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python scripts/export_hf.py MODEL FOLDER")
    export(sys.argv[1], Path(sys.argv[2]))
