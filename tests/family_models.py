"""The small random models of tests/families: running them, comparing with the stored references, and planting bugs.

A planted bug is a copy of the model that a correct engine computes just as a faulty engine would compute the original:
rows reordered as if rotary pairs were interleaved, a window one too long, a bias of zeros, ...
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from cupaged.checkpoint import open_checkpoint
from cupaged.llm import LLM
from cupaged.outputs import RequestOutput
from cupaged.params import SamplingParams

F32 = npt.NDArray[np.float32]
Config = dict[str, Any]
Tensors = dict[str, F32]
Bug = Callable[[Config, Tensors], None]
"""Edits a model's configuration and tensors in place."""

ROOT = Path(__file__).parent / "families"
FAMILIES = sorted(path.parent.name for path in ROOT.glob("*/references.json"))
SAFE_MARGIN = 1e-3
"""Two logits closer than this may legitimately change places."""


def references(family: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((ROOT / family / "references.json").read_text("utf-8"))
    return document


def config_of(family: str) -> Config:
    config: Config = json.loads((ROOT / family / "config.json").read_text("utf-8"))
    return config


def run(path: Path, family: str, *, max_tokens: int | None = None, **options: Any) -> list[RequestOutput]:
    """Greedy answers to the family's prompts, all at once, with logprobs of everything."""
    document = references(family)
    options = {"device": "reference", "num_blocks": 400, "max_num_seqs": 4, "max_model_len": document["max_model_len"], **options}
    count = max_tokens or len(document["references"][0]["tokens"])
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=20, prompt_logprobs=0)
    outputs = LLM(str(path), **options).generate([r["prompt"] for r in document["references"]], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [count] * len(outputs)
    return outputs


def worst_error(outputs: list[RequestOutput], family: str) -> float:
    """The largest deviation of any logprob from the reference's; infinite where a token differs without a near tie."""
    worst = 0.0
    for output, expected in zip(outputs, references(family)["references"], strict=True):
        assert output.prompt_logprobs is not None
        prompt_pairs = zip(output.prompt_logprobs[1:], expected["prompt"][1:], expected["prompt_logprobs"], strict=True)
        found = [(candidates[token].logprob, logprob) for candidates, token, logprob in prompt_pairs if candidates]
        assert len(found) == len(expected["prompt"]) - 1
        found += _continuation(output, expected)
        found += _first_candidates(output, expected["last_prompt_logits"])
        worst = max(worst, *(abs(got - want) for got, want in found))
    return worst


def _continuation(output: RequestOutput, expected: dict[str, Any]) -> list[tuple[float, float]]:
    """(logprob, reference) of the produced tokens, up to the first near tie."""
    answer = output.outputs[0]
    assert answer.logprobs is not None
    pairs = []
    steps = zip(answer.token_ids, answer.logprobs, strict=True)
    for (token, candidates), want, logprob, margin in zip(steps, *_cut(expected, len(answer.token_ids)), strict=True):
        if margin < SAFE_MARGIN:
            break
        pairs.append((candidates[token].logprob if token == want else math.inf, logprob))
    return pairs


def _cut(expected: dict[str, Any], count: int) -> list[list[Any]]:
    return [expected[key][:count] for key in ("tokens", "logprobs", "margins")]


def _first_candidates(output: RequestOutput, logits: list[float]) -> list[tuple[float, float]]:
    """(logprob, reference) of the likeliest tokens after the prompt."""
    answer = output.outputs[0]
    assert answer.logprobs is not None
    log_total = math.log(sum(math.exp(x) for x in logits))
    return [(candidate.logprob, logits[token] - log_total) for token, candidate in answer.logprobs[0].items()]


def plant(family: str, bug: Bug, folder: Path) -> Path:
    """A copy of the model with the bug in it, tensors in float32."""
    config = config_of(family)
    tensors = {name: source.read() for name, source in open_checkpoint(ROOT / family).tensors.items()}
    bug(config, tensors)
    config.pop("dtype", None)
    config["torch_dtype"] = "float32"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


# ---- bugs of any family


def head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _reorder_pairs(order: npt.NDArray[np.intp]) -> Bug:
    """Every query and key head's dimensions in another order; values and outputs stay."""

    def bug(config: Config, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if ".q_proj." in name or ".k_proj." in name or ".q_norm." in name or ".k_norm." in name:
                heads = tensor.reshape(-1, head_dim(config), *tensor.shape[1:])
                tensors[name] = heads[:, order].reshape(tensor.shape)

    return bug


def interleaved_pairs(config: Config, tensors: Tensors) -> None:
    """Rotary pairs (2i, 2i + 1) instead of (i, i + D/2)."""
    dims = np.arange(head_dim(config))
    _reorder_pairs(np.concatenate([dims[::2], dims[1::2]]))(config, tensors)


def backward_rotation(config: Config, tensors: Tensors) -> None:
    """The sine with the wrong sign."""
    half = head_dim(config) // 2
    _reorder_pairs(np.roll(np.arange(2 * half), half))(config, tensors)


def other_theta(config: Config, tensors: Tensors) -> None:
    """Another base; where the config gives none, another than the default 10000."""
    rope = config.get("rope_parameters", config)
    rope["rope_theta"] = rope.get("rope_theta", 10000.0) * 3


def other_epsilon(config: Config, tensors: Tensors) -> None:
    config["rms_norm_eps"] = 1e-6


def neutral_norms(config: Config, tensors: Tensors) -> None:
    for name in tensors:
        if "norm" in name:
            tensors[name] = np.ones_like(tensors[name])


def swapped_gate_and_up(config: Config, tensors: Tensors) -> None:
    for name in [name for name in tensors if "gate_proj" in name]:
        other = name.replace("gate_proj", "up_proj")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def heads_modulo(config: Config, tensors: Tensors) -> None:
    """Query head h reads key head h % K instead of h // (H / K)."""
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    order = np.argsort([h % kv_heads for h in range(heads)], kind="stable")
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            tensors[name] = tensor.reshape(heads, head_dim(config), *tensor.shape[1:])[order].reshape(tensor.shape)
        if name.endswith(".o_proj.weight"):
            tensors[name] = tensor.reshape(len(tensor), heads, head_dim(config))[:, order].reshape(tensor.shape)


# ---- bugs of some families


def config_change(**changes: Any) -> Bug:
    """A key set to another value; None removes it."""

    def bug(config: Config, tensors: Tensors) -> None:
        config.update(changes)
        for key in [key for key, value in changes.items() if value is None]:
            del config[key]

    return bug


def scaling_change(**changes: Any) -> Bug:
    def bug(config: Config, tensors: Tensors) -> None:
        config["rope_scaling"].update(changes)

    return bug


def zeros(suffix: str) -> Bug:
    """Tensors of that name dropped, as far as the sums go."""

    def bug(config: Config, tensors: Tensors) -> None:
        names = [name for name in tensors if name.endswith(suffix)]
        assert names, f"no tensor is called *{suffix}"
        for name in names:
            tensors[name] = np.zeros_like(tensors[name])

    return bug


def ones(suffix: str) -> Bug:
    def bug(config: Config, tensors: Tensors) -> None:
        names = [name for name in tensors if name.endswith(suffix)]
        assert names, f"no tensor is called *{suffix}"
        for name in names:
            tensors[name] = np.ones_like(tensors[name])

    return bug


def head_from_embedding(config: Config, tensors: Tensors) -> None:
    """An untied model computed as if its head were tied."""
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
