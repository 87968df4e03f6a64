"""Folders in Hugging Face layout: one file, shards with an index, and what can be wrong with them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from cupaged.checkpoint import GenerationDefaults, open_checkpoint
from cupaged.checkpoint.mapped_file import MappedFile
from cupaged.checkpoint.safetensors_folder import read_tensors
from cupaged.config import ModelConfig
from cupaged.errors import CheckpointError, CupagedError, UnsupportedModelError
from tests.checkpoint_builders import CONFIG, Tensors, random_tensors, write_folder, write_shards

MODEL = ModelConfig("llama", 40, 32, 64, 2, 4, 2, 16, 128, bos_token_id=1, eos_token_ids=(2,))


@pytest.fixture
def tensors() -> Tensors:
    return random_tensors(MODEL)


def refusal(path: Path, kind: type[CheckpointError] = CheckpointError) -> str:
    with pytest.raises(kind) as error:
        open_checkpoint(path)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("dtype", "storage"), [(np.float32, "F32"), (np.float16, "F16"), (ml_dtypes.bfloat16, "BF16")])
def test_one_file_in_every_float_type(dtype: Any, storage: str, tensors: Tensors, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_folder(tmp_path / "m", CONFIG, tensors, dtype))
    assert checkpoint.config == MODEL
    assert set(checkpoint.tensors) == set(tensors)
    for name, expected in tensors.items():
        source = checkpoint.tensors[name]
        assert (source.name, source.shape, source.storage) == (name, expected.shape, storage)
        np.testing.assert_array_equal(source.read(), expected)
        np.testing.assert_array_equal(source.read(3, 7), expected[3:7])
    assert checkpoint.metadata == {}


def test_files_beside_the_weights(tensors: Tensors, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", CONFIG, tensors, generation={"temperature": 0.5, "eos_token_id": [7, 8]})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.file("config.json") == folder / "config.json"
    assert checkpoint.file("tokenizer.json") is None
    assert checkpoint.generation == GenerationDefaults(temperature=0.5)
    assert checkpoint.config.eos_token_ids == (7, 8)


# ---- shards


def split(tensors: Tensors) -> tuple[dict[str, Tensors], dict[str, str]]:
    names = sorted(tensors)
    index = {name: f"model-0000{1 + (i >= len(names) // 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    return {shard: {n: tensors[n] for n in names if index[n] == shard} for shard in set(index.values())}, index


def test_shards_make_one_model(tensors: Tensors, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_shards(tmp_path / "m", CONFIG, *split(tensors)))
    assert set(checkpoint.tensors) == set(tensors)
    for name, expected in tensors.items():
        np.testing.assert_array_equal(checkpoint.tensors[name].read(), expected)


@pytest.mark.parametrize("stale_in", ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"])
def test_the_index_decides_where_a_tensor_comes_from(stale_in: str, tensors: Tensors, tmp_path: Path) -> None:
    shards, index = split(tensors)
    for name in tensors:  # every tensor of the other shard once more, with other numbers, and one that nobody names
        if index[name] != stale_in:
            shards[stale_in][name] = tensors[name] + 1
    shards[stale_in]["left.over"] = np.zeros(3, np.float32)
    checkpoint = open_checkpoint(write_shards(tmp_path / "m", CONFIG, shards, index))
    assert set(checkpoint.tensors) == set(tensors)
    for name, expected in tensors.items():
        np.testing.assert_array_equal(checkpoint.tensors[name].read(), expected)


def test_an_index_that_does_not_fit_its_shards(tensors: Tensors, tmp_path: Path) -> None:
    shards, index = split(tensors)
    folder = write_shards(tmp_path / "m", CONFIG, shards, index | {"model.norm.weight": "model-00003-of-00002.safetensors"})
    assert "names model-00003-of-00002.safetensors, which is not there" in refusal(folder)
    folder = write_shards(tmp_path / "m", CONFIG, shards, index | {"extra.weight": "model-00001-of-00002.safetensors"})
    message = refusal(folder)
    assert "model-00001-of-00002.safetensors lacks tensor extra.weight" in message
    for broken in ({}, {"weight_map": []}, {"weight_map": {"a": 1}}):
        (folder / "model.safetensors.index.json").write_text(json.dumps(broken))
        assert "weight_map" in refusal(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert "model.safetensors.index.json" in refusal(folder)


# ---- damage


def test_what_a_folder_can_lack(tensors: Tensors, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    assert "has no config.json" in refusal(folder)
    (folder / "some.gguf").write_bytes(b"GGUF")
    assert str(folder / "some.gguf") in refusal(folder)
    (folder / "some.gguf").unlink()
    (folder / "adapter_config.json").write_text("{}")
    assert "adapter" in refusal(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert "no weights" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    assert "convert them to safetensors" in refusal(folder, UnsupportedModelError)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"a": ', "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[1]", "list, not an object"),
        (b"\xff\xfe", "UTF-8"),
        (b"[" * 100000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_broken_json_names_the_file(name: str, content: bytes, words: str, tensors: Tensors, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", CONFIG, tensors, generation={})
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    message = refusal(folder)
    assert str(folder / name) in message
    assert words in message


def test_a_byte_order_mark_is_no_damage(tensors: Tensors, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", CONFIG, tensors)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8-sig")
    assert open_checkpoint(folder).config == MODEL


def test_a_file_cut_anywhere_is_refused_at_open(tensors: Tensors, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", CONFIG, tensors)
    data = (folder / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for length in [*range(0, header, 101), header, header + 1, len(data) // 2, len(data) - 1]:
        (folder / "model.safetensors").write_bytes(data[:length])
        message = refusal(folder)
        assert "model.safetensors" in message
        assert ("cut short: tensor " in message) == (length >= header)


def header_file(path: Path, header: Any, data: bytes = bytes(64)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize(
    "entry",
    [
        {},
        5,
        {"dtype": "F32", "shape": [4], "data_offsets": [0]},
        {"dtype": "F32", "shape": "x", "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]},
        {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]},
        {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]},
        {"dtype": "F16", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 16]},
    ],
)
def test_a_damaged_entry_names_its_tensor(entry: Any, tmp_path: Path) -> None:
    path = header_file(tmp_path / "x.safetensors", {"good": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "bad.one": entry})
    with pytest.raises(CheckpointError, match=r"damaged header.* tensor bad\.one"):
        read_tensors(MappedFile(path))


def test_damaged_bytes_never_raise_anything_else(tensors: Tensors, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", CONFIG, tensors)
    data, rng = (folder / "model.safetensors").read_bytes(), np.random.default_rng(7)
    header, survived = 8 + int.from_bytes(data[:8], "little"), 0
    for _ in range(300):
        broken = bytearray(data)
        broken[rng.integers(header)] = rng.integers(256)
        (folder / "model.safetensors").write_bytes(broken)
        try:
            open_checkpoint(folder)
            survived += 1
        except CupagedError:
            pass
    assert survived < 300


def test_a_type_that_is_not_read_is_an_error_only_when_it_is_read(tmp_path: Path) -> None:
    save_file({"ids": np.arange(5), "double": np.ones((2, 2)), "scalar": np.array(1.0, np.float32)}, tmp_path / "x.safetensors")
    opened = read_tensors(MappedFile(tmp_path / "x.safetensors"))
    assert {name: (t.storage, t.shape) for name, t in opened.items()} == {"ids": ("I64", (5,)), "double": ("F64", (2, 2)), "scalar": ("F32", ())}
    with pytest.raises(UnsupportedModelError, match="double is stored as F64"):
        opened["double"].read()
