"""The whole engine through the emulated kernels in 16 bits, on the emulated tensor cores, however its work is cut up.

A small Llama with the attention shape of SmolLM2 (head_dim 64, three query heads to a key/value head). Its weights are
numbers that both 16-bit types hold, so only activations and the cache are rounded; the reference computes in float32.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cupaged import LLM, SamplingParams
from cupaged.backends.emu_device import EmuDevice
from cupaged.backends.launch import Launch
from cupaged.outputs import RequestOutput
from tests.support.kernels import skip_without_compiler

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS, VOCABULARY = 96, 3, 1, 64, 112, 2, 96
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0, prompt_logprobs=0)
PROMPTS = [np.random.default_rng(s).integers(1, VOCABULARY, n).tolist() for s, n in enumerate((1, 17, 30, 62))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    skip_without_compiler()
    folder = tmp_path_factory.mktemp("llama64")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "vocab_size": VOCABULARY, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights(), folder / "model.safetensors")
    return str(folder)


def weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(11)

    def matrix(*shape: int) -> np.ndarray:
        return np.round(random.standard_normal(shape) * 128 / shape[-1] ** 0.5).astype(np.float32) / 128  # 8 bits

    tensors = {name: 4 * matrix(VOCABULARY, HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    for i in range(LAYERS):
        block = f"model.layers.{i}."
        for name, rows, columns in (
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN), ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN), ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
            ("mlp.gate_proj", INTERMEDIATE, HIDDEN), ("mlp.up_proj", INTERMEDIATE, HIDDEN), ("mlp.down_proj", HIDDEN, INTERMEDIATE),
        ):  # fmt: skip
            tensors[f"{block}{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{block}{name}.weight"] = np.ones(HIDDEN, np.float32)
    return tensors


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the kernels that ran."""
    names: set[str] = set()
    honest = EmuDevice.launch

    def launch(self: EmuDevice, work: Launch) -> None:
        names.add(work.variant.kernel)
        honest(self, work)

    monkeypatch.setattr(EmuDevice, "launch", launch)
    return names


def generate(model: str, **options: Any) -> list[RequestOutput]:
    return LLM(model, **{"num_blocks": 60, "max_num_seqs": 4, "max_model_len": 100, **options}).generate(PROMPTS, PARAMS)


def logprobs(outputs: list[RequestOutput]) -> np.ndarray:
    """Of every prompt token: they are given, so no earlier choice moves them."""
    return np.array([position[t].logprob for o, p in zip(outputs, PROMPTS, strict=True) for position, t in zip(o.prompt_logprobs[1:], p[1:], strict=True)])


@pytest.fixture(scope="module")
def exact(model: str) -> list[RequestOutput]:
    return generate(model, device="reference")


WAYS: dict[str, dict[str, Any]] = {
    "float16": {"dtype": "float16"},
    "float16 chunked": {"dtype": "float16", "max_num_batched_tokens": 20, "block_size": 32, "num_blocks": 30},
    "float16 swapped": {"dtype": "float16", "num_blocks": 8, "preemption": "swap"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16 in blocks of 8": {"dtype": "float16", "block_size": 8, "num_blocks": 99},
    "fp8 cache": {"dtype": "float16", "kv_cache_dtype": "fp8"},
}
TOLERANCE = {"float16": 0.02, "bfloat16": 0.2, "fp8": 0.8}


@pytest.mark.parametrize("way", WAYS)
def test_the_engine_in_16_bits_stays_by_the_reference(model: str, exact: list[RequestOutput], way: str, launched: set[str]) -> None:
    outputs = generate(model, device="emu", **WAYS[way])
    error = np.abs(logprobs(outputs) - logprobs(exact)).max()
    assert 1e-5 < error < TOLERANCE[way.split()[0]]  # and it is not float32 that ran
    assert any(output.metrics.num_preemptions for output in outputs) == ("swapped" in way)
    tensor_cores = {"paged_decode", "merge_items", "paged_prefill"}
    if "fp8" in way:
        assert {"attention_partition", "plain_prefill"} <= launched
        assert not tensor_cores & launched
    elif "blocks of 8" in way:  # a tile of decode would lie in two blocks
        assert {"attention_partition", "paged_prefill"} <= launched
        assert "paged_decode" not in launched
    else:
        assert tensor_cores <= launched


def test_a_cached_prefix_is_computed_once_and_samples_part_by_copies(model: str, launched: set[str]) -> None:
    llm = LLM(model, device="emu", dtype="float16", num_blocks=60, max_model_len=100)
    first, again = (llm.generate([PROMPTS[3]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, n=1))[0] for _ in range(2))
    assert again.num_cached_tokens >= 48
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    many = llm.generate([PROMPTS[2]], SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True, n=3))[0]
    assert len({tuple(answer.token_ids) for answer in many.outputs}) > 1
    assert "copy_blocks" in launched
