"""Every model family, as a small random model, against what transformers computed with it (tests/families).

Three things: the engine agrees, on every backend, however the work is cut into blocks and steps; the GGUF version of a
model agrees with the folder; and the references are sharp: each bug that such a family invites is far outside the
tolerance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.backends.reference import ReferenceBackend
from cupaged.checkpoint import open_checkpoint
from cupaged.errors import UnsupportedModelError
from tests.family_models import (
    FAMILIES,
    ROOT,
    Bug,
    Config,
    Tensors,
    backward_rotation,
    config_change,
    config_of,
    head_from_embedding,
    heads_modulo,
    interleaved_pairs,
    neutral_norms,
    ones,
    other_epsilon,
    other_theta,
    plant,
    run,
    scaling_change,
    swapped_gate_and_up,
    worst_error,
    zeros,
)
from tests.support.kernels import skip_without_compiler

TOLERANCE = 1e-4
VISIBLE = 100 * TOLERANCE
"""A bug must move some logprob at least so far."""

WAYS: dict[str, dict[str, Any]] = {
    "reference": {"device": "reference"},
    "reference-block7-chunked": {"device": "reference", "block_size": 7, "max_num_batched_tokens": 13},
    "cpu": {"device": "cpu"},
    "cpu-block1-chunked": {"device": "cpu", "block_size": 1, "max_num_batched_tokens": 13},
    "cpu-block7-chunked": {"device": "cpu", "block_size": 7, "max_num_batched_tokens": 50},
    # the prompts just fit, their answers do not
    "cpu-block3-preempted": {"device": "cpu", "block_size": 3, "num_blocks": 56},
    "emu": {"device": "emu"},
    "emu-block7-chunked": {"device": "emu", "block_size": 7, "max_num_batched_tokens": 50},
    "emu-block3-preempted": {"device": "emu", "block_size": 3, "num_blocks": 56},
}
GGUF_FILES = sorted(path.name for path in ROOT.glob("*.gguf"))


def test_all_families_are_there() -> None:
    assert FAMILIES == [
        "llama1", "llama3", "llama_bias", "llama_dynamic", "llama_gqa7", "llama_linear", "llama_tied", "llama_yarn",
        "mistral", "qwen2", "qwen2_window", "qwen3", "qwen3_window",
    ]  # fmt: skip
    assert GGUF_FILES == ["llama3.gguf", "llama_bias.gguf", "qwen2.gguf", "qwen3.gguf"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", WAYS)
def test_family_equals_transformers(family: str, way: str) -> None:
    if way.startswith("emu"):
        skip_without_compiler()
    outputs = run(ROOT / family, family, **WAYS[way])
    assert worst_error(outputs, family) < TOLERANCE
    assert any(output.metrics.num_preemptions for output in outputs) == ("preempted" in way)


@pytest.mark.parametrize("file", GGUF_FILES)
@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_gguf_equals_transformers(file: str, device: str) -> None:
    family = file.removesuffix(".gguf")
    assert worst_error(run(ROOT / file, family, device=device), family) < TOLERANCE


@pytest.mark.parametrize("file", GGUF_FILES)
def test_gguf_holds_the_folders_tensors(file: str) -> None:
    """Same names, and the same numbers in the same row order, whatever the file calls and permutes."""
    folder, gguf = open_checkpoint(ROOT / file.removesuffix(".gguf")), open_checkpoint(ROOT / file)
    assert set(gguf.tensors) == set(folder.tensors)
    for name, source in folder.tensors.items():
        np.testing.assert_array_equal(gguf.tensors[name].read(), source.read(), err_msg=name)


COMMON_BUGS: list[Bug] = [interleaved_pairs, backward_rotation, other_theta, other_epsilon, neutral_norms, swapped_gate_and_up]
NO_SCALING = {"no scaling": config_change(rope_scaling=None)}
QKV_BIASES = {f"no {part} bias": zeros(f"{part}_proj.bias") for part in "qkv"}

FAMILY_BUGS: dict[str, dict[str, Bug]] = {
    "llama1": {"tied head": head_from_embedding},
    "llama3": {
        **NO_SCALING,
        "divides every pair": scaling_change(rope_type="linear"),
        "other original length": scaling_change(original_max_position_embeddings=128),
        "other ramp": scaling_change(high_freq_factor=8.0),
        "tied head": head_from_embedding,
    },
    "llama_bias": {
        **QKV_BIASES,
        **{f"no {part} bias": zeros(f"{part}_proj.bias") for part in ("o", "gate", "up", "down")},
    },
    "llama_dynamic": {"no scaling": config_change(rope_scaling=None, max_position_embeddings=256), "other factor": scaling_change(factor=3.0)},
    "llama_gqa7": {"heads modulo": heads_modulo},
    "llama_linear": NO_SCALING,
    "llama_tied": {"heads modulo": heads_modulo},
    "llama_yarn": {
        **NO_SCALING,
        "divides every pair": scaling_change(rope_type="linear"),
        "no attention factor": scaling_change(attention_factor=1.0),
        "no truncation": scaling_change(truncate=False),
        "default betas": scaling_change(beta_fast=32.0),
    },
    "mistral": {f"window {w}": config_change(sliding_window=w) for w in (None, 31, 33)},
    "qwen2": {
        **QKV_BIASES,
        "heads modulo": heads_modulo,
        "unwanted window": config_change(use_sliding_window=True),
    },
    "qwen2_window": {
        **QKV_BIASES,
        "no window": config_change(use_sliding_window=False),
        "window 23": config_change(sliding_window=23),
        "window 25": config_change(sliding_window=25),
        "one windowed layer too many": config_change(max_window_layers=0),
        "one windowed layer too few": config_change(max_window_layers=2),
    },
    "qwen3": {
        "no query norm weight": ones("q_norm.weight"),
        "no key norm weight": ones("k_norm.weight"),
        "heads modulo": heads_modulo,
    },
    "qwen3_window": {
        "window 47": config_change(sliding_window=47),
        "windows in all layers": config_change(layer_types=["sliding_attention"] * 2, max_window_layers=0),
    },
}  # fmt: skip
BUGS = {(family, bug.__name__): bug for family in FAMILIES for bug in COMMON_BUGS} | {
    (family, name): bug for family, bugs in FAMILY_BUGS.items() for name, bug in bugs.items()
}


@pytest.mark.parametrize("planted", BUGS, ids="-".join)
def test_a_planted_bug_shows(planted: tuple[str, str], tmp_path: Path) -> None:
    family, _ = planted
    folder = plant(family, BUGS[planted], tmp_path / "model")
    assert worst_error(run(folder, family, max_tokens=1), family) > VISIBLE


@pytest.mark.parametrize("family", FAMILIES)
def test_planting_nothing_changes_nothing(family: str, tmp_path: Path) -> None:
    """The planting machinery itself is faithful, so what the bugs show is theirs."""
    folder = plant(family, lambda config, tensors: None, tmp_path / "model")
    assert worst_error(run(folder, family, max_tokens=1), family) < TOLERANCE


def test_heads_that_do_not_share_evenly_are_refused(tmp_path: Path) -> None:
    folder = plant("llama1", config_change(num_attention_heads=3, num_key_value_heads=2), tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match="3 query heads cannot share 2 key/value heads"):
        open_checkpoint(folder)


def test_dynamic_scaling_for_another_length_shows() -> None:
    assert worst_error(run(ROOT / "llama_dynamic", "llama_dynamic", max_tokens=1, max_model_len=200), "llama_dynamic") > VISIBLE


def test_skipped_head_norms_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceBackend, "head_rms_norm", lambda *args: None)
    assert worst_error(run(ROOT / "qwen3", "qwen3", max_tokens=1), "qwen3") > VISIBLE


def test_a_stored_head_of_a_tied_model_is_not_used(tmp_path: Path) -> None:
    def store_another_head(config: Config, tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][::-1]

    assert config_of("llama_tied")["tie_word_embeddings"]
    folder = plant("llama_tied", store_another_head, tmp_path / "model")
    assert worst_error(run(folder, "llama_tied", max_tokens=1), "llama_tied") < TOLERANCE
