"""Write tests/families/rope.json: inverse frequencies as transformers computes them, for every scaling.

    python scripts/make_rope_references.py

Needs torch and transformers, which neither the package nor its tests do. Each case holds RopeConfig's fields, the head
size, the length the frequencies are asked for, and transformers' answer (float32 arithmetic, so good to about 1e-6).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

OUTPUT = Path(__file__).resolve().parent.parent / "tests" / "families" / "rope.json"

# RopeConfig's name -> Hugging Face's; the rest are the same.
HF_NAMES = {"theta": "rope_theta", "scaling": "rope_type", "original_max_position": "original_max_position_embeddings"}

LLAMA3 = {"scaling": "llama3", "theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

CASES: list[dict[str, Any]] = [
    {"rope": {"theta": 1e4}, "head_dim": 64, "length": 2048},
    {"rope": {"theta": 1e6}, "head_dim": 128, "length": 2048},
    {"rope": {"scaling": "linear", "theta": 1e4, "factor": 4.0}, "head_dim": 64, "length": 8192},
    {"rope": {"scaling": "linear", "theta": 5e6, "factor": 2.5}, "head_dim": 32, "length": 8192},
    {"rope": {"scaling": "dynamic", "theta": 1e4, "factor": 2.0, "original_max_position": 2048}, "head_dim": 64, "length": 1024},
    {"rope": {"scaling": "dynamic", "theta": 1e4, "factor": 2.0, "original_max_position": 2048}, "head_dim": 64, "length": 4096},
    {"rope": {"scaling": "dynamic", "theta": 5e5, "factor": 4.0, "original_max_position": 64}, "head_dim": 16, "length": 200},
    {"rope": {**LLAMA3, "factor": 32.0, "original_max_position": 8192}, "head_dim": 64, "length": 131072},
    {"rope": {**LLAMA3, "factor": 8.0, "original_max_position": 8192}, "head_dim": 128, "length": 131072},
    {"rope": {**LLAMA3, "factor": 4.0, "original_max_position": 64, "high_freq_factor": 8.0, "low_freq_factor": 2.0}, "head_dim": 32, "length": 256},
    {"rope": {"scaling": "yarn", "theta": 1e6, "factor": 4.0, "original_max_position": 32768}, "head_dim": 128, "length": 131072},
    {"rope": {"scaling": "yarn", "theta": 1e4, "factor": 16.0, "original_max_position": 4096, "truncate": False}, "head_dim": 64, "length": 65536},
    {"rope": {"scaling": "yarn", "theta": 1e4, "factor": 8.0, "original_max_position": 64, "beta_fast": 4.0, "beta_slow": 0.5}, "head_dim": 32, "length": 512},
    {"rope": {"scaling": "yarn", "theta": 1e4, "factor": 40.0, "original_max_position": 4096, "attention_factor": 0.75}, "head_dim": 64, "length": 8192},
    {"rope": {"scaling": "yarn", "theta": 1e4, "factor": 1.0, "original_max_position": 4096}, "head_dim": 64, "length": 4096},
    # The ramp's ends fall on one pair: a step.
    {"rope": {"scaling": "yarn", "theta": 1e4, "factor": 2.0, "original_max_position": 4, "beta_slow": 4.0}, "head_dim": 32, "length": 8},
]


def reference(case: dict[str, Any]) -> dict[str, Any]:
    parameters = {HF_NAMES.get(key, key): value for key, value in case["rope"].items()}
    parameters.setdefault("rope_type", "default")
    original = case["rope"].get("original_max_position", case["length"])
    if parameters["rope_type"] == "dynamic":  # transformers takes the original length from the model's own
        del parameters["original_max_position_embeddings"]
    config = LlamaConfig(head_dim=case["head_dim"], max_position_embeddings=original, rope_parameters=parameters)
    if parameters["rope_type"] == "default":
        inv_freq, scale = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        inv_freq, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=case["length"])
    return {**case, "inv_freq": [float(f"{x:.9g}") for x in inv_freq.tolist()], "attention_scale": scale}


def main() -> None:
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    document = {"transformers": transformers.__version__, "cases": [reference(case) for case in CASES]}
    OUTPUT.write_text(json.dumps(document) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
