"""Write a small random model of every family, and what transformers computes with it, under tests/families/.

    python scripts/make_family_models.py [NAME ...]

Needs torch, transformers and gguf. For each family: a folder in Hugging Face's layout and references.json beside the
weights: for prompts of several lengths the greedy continuation in float32, its logprobs and margins, the logprobs of
the prompt's own tokens and the logits after the prompt. Weights are drawn wide enough that attention, rotation, biases
and norms all decide the outcome; seeds whose greedy choice is ever close to a tie are passed over.

The configs are written by hand in the forms that real checkpoints have, old and new, and transformers reads them back.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from family_gguf import GGUF_FAMILIES, q8_0_exact, write_gguf
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FAMILIES = Path(__file__).resolve().parent.parent / "tests" / "families"
PROMPT_LENGTHS = (1, 7, 40, 100)
NEW_TOKENS = 24
MIN_MARGIN = 3e-3
DYNAMIC_LENGTH = 160

COMMON = {
    "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 256, "rms_norm_eps": 1e-2,
    "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = {**COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "head_dim": 16}
MISTRAL = {**COMMON, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "head_dim": 16}
QWEN2 = {**COMMON, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "rms_norm_eps": 5e-3}
QWEN3 = {
    **{key: value for key, value in COMMON.items() if key != "rope_theta"}, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
    "rms_norm_eps": 5e-3, "attention_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip

SPECS: dict[str, dict[str, Any]] = {
    # As the oldest checkpoints: no head_dim, no rope_theta, no KV heads, and a stored table of frequencies.
    "llama1": {**{k: v for k, v in LLAMA.items() if k not in ("head_dim", "rope_theta", "num_key_value_heads")}, "num_attention_heads": 2},
    "llama_gqa7": {**LLAMA, "num_attention_heads": 14, "hidden_size": 28, "rope_scaling": None},
    "llama_tied": {**LLAMA, "num_attention_heads": 6, "hidden_size": 48, "rope_theta": 1e5, "tie_word_embeddings": True, "num_hidden_layers": 3},
    "llama3": {**LLAMA, "head_dim": 32, "rope_theta": 5e5, "eos_token_id": [2, 3], "rope_scaling": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    "llama_linear": {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama_dynamic": {**LLAMA, "max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "llama_yarn": {**LLAMA, "head_dim": 32, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 4.0, "beta_slow": 1.0}},
    "llama_bias": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "mistral": {**MISTRAL, "sliding_window": 32},
    "qwen2": {**QWEN2, "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0},
    "qwen2_window": {**QWEN2, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    # In the newest form: rope_parameters, dtype and layer_types.
    "qwen3": {**QWEN3, "head_dim": 32, "use_sliding_window": False, "sliding_window": None,
              "layer_types": ["full_attention"] * 2},
    "qwen3_window": {**QWEN3, "head_dim": 16, "use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1,
                     "layer_types": ["full_attention", "sliding_attention"]},
}  # fmt: skip

STORAGE = {"llama3": torch.float16, "llama_linear": torch.float16, "llama_bias": torch.float32, "qwen2": torch.float32}
SHARDED = ("llama3", "qwen2_window")


def random_tensor(name: str, shape: tuple[int, ...], tied: bool, rng: np.random.Generator) -> np.ndarray:
    """A gain above 1 in queries and keys makes attention choosy; norms, their epsilon and biases are far from neutral.

    A tied table is small beside what the layers add, or the model would only repeat its last token.
    """
    if name.endswith(".bias"):
        return rng.normal(0, 0.5, shape)
    if len(shape) == 1:
        return rng.uniform(0.5, 1.5, shape)
    if "embed_tokens" in name:
        return rng.normal(0, 0.2 if tied else 0.5, shape)
    gain = 1.6 if "q_proj" in name or "k_proj" in name else 1.2
    return rng.normal(0, gain / np.sqrt(shape[1]), shape)


def write_folder(name: str, seed: int) -> Path:
    folder = FAMILIES / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    storage = STORAGE.get(name, torch.bfloat16)
    dtype_key = "dtype" if "rope_parameters" in SPECS[name] else "torch_dtype"
    config = {**SPECS[name], dtype_key: str(storage).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")

    empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    rng = np.random.default_rng(seed)
    tensors = {}
    for key, value in empty.state_dict().items():
        if key == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        drawn = random_tensor(key, tuple(value.shape), config["tie_word_embeddings"], rng).astype(np.float32)
        if name == "qwen2" and drawn.ndim == 2:
            drawn = q8_0_exact(drawn)  # so that the same model in Q8_0 is the same numbers
        tensors[key] = torch.from_numpy(drawn).to(storage)
    if name == "llama1":
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((8,), 7.0)  # old files carry it; nobody reads it
    save(folder, tensors, sharded=name in SHARDED)
    return folder


def save(folder: Path, tensors: dict[str, torch.Tensor], *, sharded: bool) -> None:
    if not sharded:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for part, chosen in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        file = f"model-{part:05}-of-00002.safetensors"
        save_file({key: tensors[key] for key in chosen}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(chosen, file))
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def load(folder: Path) -> Any:
    """The model in float32. Dynamic NTK gets the theta of DYNAMIC_LENGTH once and for all."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    if folder.name != "llama_dynamic":
        return model
    full = torch.randint(4, 128, (1, DYNAMIC_LENGTH), generator=torch.Generator().manual_seed(0))
    expected = model(full, use_cache=False).logits
    config = AutoConfig.from_pretrained(folder)
    inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=DYNAMIC_LENGTH)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    fixed = AutoModelForCausalLM.from_pretrained(folder, config=config, **options).eval()
    fixed.model.rotary_emb.inv_freq = inv_freq
    torch.testing.assert_close(fixed(full, use_cache=False).logits, expected, atol=1e-4, rtol=0)  # at that very length they agree
    return fixed


@torch.no_grad()
def reference(model: Any, prompt: list[int]) -> dict[str, Any]:
    """Greedy decoding without a KV cache: every step computes the whole sequence."""
    ids, logprobs, margins = list(prompt), [], []
    for step in range(NEW_TOKENS):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].double()
        if step == 0:
            rows = torch.log_softmax(logits, -1)
            prompt_logprobs = [rows[i, token].item() for i, token in enumerate(prompt[1:])]
            prompt_logits = logits[-1].tolist()
        top = torch.topk(logits[-1], 2)
        ids.append(int(top.indices[0]))
        margins.append((top.values[0] - top.values[1]).item())
        logprobs.append(torch.log_softmax(logits[-1], -1).max().item())
    return {
        "prompt": prompt, "tokens": ids[len(prompt) :], "logprobs": rounded(logprobs), "margins": rounded(margins),
        "prompt_logprobs": rounded(prompt_logprobs), "last_prompt_logits": rounded(prompt_logits),
    }  # fmt: skip


def rounded(values: list[float]) -> list[float]:
    return [round(value, 6) for value in values]


def make_family(name: str) -> None:
    for seed in range(50):
        folder = write_folder(name, seed)
        model = load(folder)
        rng = np.random.default_rng(1000 + seed)
        references = [reference(model, rng.integers(4, 128, length).tolist()) for length in PROMPT_LENGTHS]
        margin = min(min(r["margins"]) for r in references)
        if margin > MIN_MARGIN:
            break
    else:
        raise SystemExit(f"{name}: no seed keeps every margin above {MIN_MARGIN}")
    document = {
        "transformers": transformers.__version__, "torch": torch.__version__, "seed": seed,
        "max_model_len": DYNAMIC_LENGTH, "references": references,
    }  # fmt: skip
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes private files
    (folder / "references.json").write_text(json.dumps(document) + "\n", encoding="utf-8")
    if name in GGUF_FAMILIES:
        tensors = {key: value.numpy() for key, value in model.state_dict().items()}
        write_gguf(FAMILIES / f"{name}.gguf", name, SPECS[name], tensors)
    distinct = [len(set(r["tokens"])) for r in references]
    print(f"{name}: seed {seed}, margin {margin:.4f}, distinct tokens {distinct}, mean logprob {np.mean(references[3]['logprobs']):.2f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for family in sys.argv[1:] or SPECS:
        make_family(family)
