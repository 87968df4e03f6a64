"""Weights: what reaches the backend, what is refused before anything is loaded, and what loading costs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest

from cupaged.backends.base import Backend
from cupaged.checkpoint import open_checkpoint
from cupaged.checkpoint.base import Checkpoint
from cupaged.checkpoint.stored_tensor import UnreadableTensor
from cupaged.config import ModelConfig
from cupaged.errors import CheckpointError
from cupaged.model.weights import LlamaWeights, expected_shapes, load_weights
from cupaged.tensor_source import TensorSource
from tests.checkpoint_builders import CONFIG, Tensors, random_tensors, write_folder, write_gguf

LLAMA = ModelConfig("llama", 40, 32, 64, 2, 4, 2, 16, 128)
FAMILIES = {
    "llama": LLAMA,
    "tied": replace(LLAMA, tie_word_embeddings=True),
    "biases": replace(LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True),
    "qwen2": replace(LLAMA, architecture="qwen2", qkv_bias=True),
    "qwen3": replace(LLAMA, architecture="qwen3", qk_norm=True),
}


class ArraySource:
    """A tensor in memory."""

    storage = "F32"

    def __init__(self, name: str, array: np.ndarray[Any, Any]) -> None:
        self.name, self.shape, self._array = name, array.shape, array

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray[Any, Any]:
        return self._array[start:stop]

    def read_blocks(self, start: int = 0, stop: int | None = None) -> np.ndarray[Any, Any]:
        return self.read(start, stop).view(np.uint8)


class RecordingBackend:
    """The loading half of a backend: keeps what it was given as plain arrays."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def load_matrix(self, parts: Sequence[TensorSource], bias: Sequence[TensorSource] | None = None) -> Any:
        return self._stack(parts), None if bias is None else self._stack(bias)

    def load_gate_up(self, gate: TensorSource, up: TensorSource, bias: Sequence[TensorSource] | None = None) -> Any:
        return self.load_matrix([gate, up], bias)

    def load_vector(self, source: TensorSource) -> Any:
        return self._stack([source])

    def load_embedding(self, source: TensorSource, *, tied: bool) -> Any:
        return self._stack([source]), tied

    def _stack(self, parts: Sequence[TensorSource]) -> np.ndarray[Any, Any]:
        self.loaded += [part.name for part in parts]
        return np.concatenate([part.read() for part in parts])


def checkpoint(config: ModelConfig, tensors: Tensors, **others: TensorSource) -> Checkpoint:
    sources: dict[str, TensorSource] = {name: ArraySource(name, array) for name, array in tensors.items()}
    return Checkpoint(Path("some/model"), config, sources | others)


def load(source: Checkpoint, backend: RecordingBackend, progress: Callable[[int, int], None] | None = None) -> LlamaWeights:
    return load_weights(source, cast("Backend", backend), progress)


def refusal(config: ModelConfig, tensors: Tensors, **others: TensorSource) -> str:
    backend = RecordingBackend()
    with pytest.raises(CheckpointError) as error:
        load(checkpoint(config, tensors, **others), backend)
    assert backend.loaded == []
    assert "some/model" in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- what is loaded


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_reaches_its_place_once(family: str) -> None:
    config, backend = FAMILIES[family], RecordingBackend()
    tensors = random_tensors(config)
    weights = load(checkpoint(config, tensors), backend)
    assert sorted(backend.loaded) == sorted(tensors)
    assert len(weights.layers) == config.num_layers

    def same(found: Any, *names: str) -> None:
        np.testing.assert_array_equal(found, np.concatenate([tensors[name] for name in names]))

    def matrix(found: Any, bias: bool, *stems: str) -> None:
        same(found[0], *(f"{stem}.weight" for stem in stems))
        if bias:
            same(found[1], *(f"{stem}.bias" for stem in stems))
        else:
            assert found[1] is None

    table, tied = weights.embedding
    same(table, "model.embed_tokens.weight")
    same(weights.final_norm, "model.norm.weight")
    assert tied is config.tie_word_embeddings
    if tied:
        assert weights.lm_head is weights.embedding
    else:
        matrix(weights.lm_head, False, "lm_head")
    for i, layer in enumerate(weights.layers):
        at = f"model.layers.{i}."
        same(layer.input_norm, f"{at}input_layernorm.weight")
        same(layer.post_norm, f"{at}post_attention_layernorm.weight")
        matrix(layer.qkv, config.qkv_bias, f"{at}self_attn.q_proj", f"{at}self_attn.k_proj", f"{at}self_attn.v_proj")
        matrix(layer.output, config.output_bias, f"{at}self_attn.o_proj")
        matrix(layer.gate_up, config.mlp_bias, f"{at}mlp.gate_proj", f"{at}mlp.up_proj")
        matrix(layer.down, config.mlp_bias, f"{at}mlp.down_proj")
        if config.qk_norm:
            same(layer.q_norm, f"{at}self_attn.q_norm.weight")
            same(layer.k_norm, f"{at}self_attn.k_norm.weight")
        else:
            assert layer.q_norm is None
            assert layer.k_norm is None


def test_progress_counts_every_value() -> None:
    tensors, seen = random_tensors(FAMILIES["biases"]), list[tuple[int, int]]()
    load(checkpoint(FAMILIES["biases"], tensors), RecordingBackend(), lambda *now: seen.append(now))
    total = sum(tensor.size for tensor in tensors.values())
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    assert {of for _, of in seen} == {total}


def test_a_head_stored_beside_tied_embeddings_is_ignored() -> None:
    config, backend = FAMILIES["tied"], RecordingBackend()
    tensors = random_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    weights = load(checkpoint(config, tensors), backend)
    assert weights.lm_head is weights.embedding
    assert "lm_head.weight" not in backend.loaded


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "rotary_emb.inv_freq",
        "model.layers.1.attn.masked_bias",
        "model.layers.1.attn.bias",
        "blk.0.attn_rot_embd.weight",
    ],
)
def test_harmless_extras_are_ignored_whatever_their_type(name: str) -> None:
    backend = RecordingBackend()
    extra = UnreadableTensor(name, (7,), "I64")
    load(checkpoint(LLAMA, random_tensors(LLAMA), **{name: extra}), backend)
    assert name not in backend.loaded


# ---- what is refused


def test_missing_tensors_are_named_and_counted() -> None:
    tensors = random_tensors(LLAMA)
    del tensors["lm_head.weight"]
    assert refusal(LLAMA, tensors).endswith("missing lm_head.weight")
    for name in [name for name in tensors if name.startswith("model.layers.1.")]:
        del tensors[name]
    message = refusal(LLAMA, tensors)
    assert "missing model.layers.1." in message
    assert message.endswith(" and 6 more")  # nine of layer 1 and the head, four of them named


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.k_proj.weight", (64, 32)),
        ("model.layers.0.mlp.down_proj.weight", (64, 32)),
        ("model.norm.weight", (32, 1)),
        ("model.embed_tokens.weight", (41, 32)),
        ("model.layers.1.input_layernorm.weight", ()),
    ],
)
def test_a_wrong_shape_is_named_with_the_right_one(name: str, shape: tuple[int, ...]) -> None:
    tensors = random_tensors(LLAMA)
    right = list(tensors[name].shape)
    tensors[name] = np.zeros(shape, np.float32)
    assert refusal(LLAMA, tensors).endswith(f"{name} has shape {list(shape)}, not {right}")


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight", "visual.patch", "lm_head.bias"])
def test_an_unknown_tensor_is_named(name: str) -> None:
    message = refusal(LLAMA, random_tensors(LLAMA) | {name: np.zeros(3, np.float32)})
    assert message.endswith(f"unknown {name}")


def test_a_wrong_type_is_named() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    message = refusal(LLAMA, random_tensors(LLAMA), **{name: UnreadableTensor(name, (64, 32), "F8_E4M3")})
    assert message.endswith(f"{name} is stored as F8_E4M3, which is not supported")


def test_all_kinds_of_faults_come_in_one_line() -> None:
    tensors = random_tensors(LLAMA)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((3, 3), np.float32)
    tensors["other"] = np.zeros(3, np.float32)
    message = refusal(LLAMA, tensors)
    assert all(part in message for part in ("missing model.norm.weight", "up_proj.weight has shape [3, 3]", "unknown other"))


# ---- from files


def test_a_folder_and_a_gguf_file_of_one_model_load_alike(tmp_path: Path) -> None:
    config = replace(LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True)
    tensors = random_tensors(config)
    folder = write_folder(tmp_path / "m", CONFIG | {"attention_bias": True, "mlp_bias": True}, tensors, np.float16)
    file = write_gguf(tmp_path / "m.gguf", config, tensors)
    first, second = (load(open_checkpoint(path), RecordingBackend()) for path in (folder, file))
    for one, other in zip(first.layers, second.layers, strict=True):
        for field in ("qkv", "output", "gate_up", "down"):
            for a, b in zip(getattr(one, field), getattr(other, field), strict=True):
                np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(first.lm_head[0], second.lm_head[0])


@pytest.mark.skipif(not hasattr(psutil.Process, "num_fds"), reason="this system does not count handles")
def test_no_file_is_held_after_loading_or_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handles = psutil.Process().num_fds
    checkpoint, free = open_checkpoint(write_folder(tmp_path / "m", CONFIG, random_tensors(LLAMA))), handles()
    load(checkpoint, RecordingBackend())
    assert handles() == free

    def full(*_: object) -> None:
        checkpoint.tensors["model.norm.weight"].read()
        raise MemoryError

    monkeypatch.setattr(RecordingBackend, "load_matrix", full)
    with pytest.raises(MemoryError):
        load(checkpoint, RecordingBackend())
    assert handles() == free


# ---- cost

MEASURE = """
import json, sys, threading, time
from pathlib import Path
import psutil
from cupaged.backends import open_backend
from cupaged.checkpoint import open_checkpoint
from cupaged.model.weights import load_weights

backend, memory = open_backend("cpu"), psutil.Process().memory_info
peak, running = 0, True

def watch():
    global peak
    while running:
        peak = max(peak, memory().rss)
        time.sleep(0.005)

before = memory().rss
watcher = threading.Thread(target=watch)
watcher.start()
start = time.process_time()
weights = load_weights(open_checkpoint(Path(sys.argv[1])), backend)
seconds = time.process_time() - start
running = False
watcher.join()
print(json.dumps({"cpu": seconds, "growth": max(peak, memory().rss) - before}))
"""


def measure(path: Path) -> dict[str, float]:
    """CPU seconds and growth of resident bytes of loading a model in a process of its own."""
    run = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    result: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return result


def test_smollm2_loads_in_two_seconds_and_little_more_than_its_weights(smollm2_path: Path) -> None:
    loaded = 4 * sum(math.prod(source.shape) for source in open_checkpoint(smollm2_path).tensors.values())
    runs = [measure(smollm2_path) for _ in range(2)]
    assert max(run["growth"] for run in runs) <= 1.25 * loaded
    assert min(run["cpu"] for run in runs) < 2.0  # loading is one thread: its CPU time is its time on an idle machine


def test_a_large_folder_adds_no_file_pages_to_memory(tmp_path: Path) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 4, "vocab_size": 32000, "num_attention_heads": 32}
    config = ModelConfig("llama", 32000, 512, 4096, 4, 32, 2, 16, 128)
    folder = write_folder(tmp_path / "m", CONFIG | wide, {n: np.zeros(shape, np.float32) for n, shape in expected_shapes(config).items()})
    loaded = (folder / "model.safetensors").stat().st_size
    assert measure(folder)["growth"] <= 1.25 * loaded  # all float32: the file's pages would make it twice
