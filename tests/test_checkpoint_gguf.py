"""GGUF files: header, names, row order, configuration, and every kind of damage as one clear line."""

from __future__ import annotations

import struct
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupaged.checkpoint import GenerationDefaults, open_checkpoint
from cupaged.checkpoint.codecs import Codec
from cupaged.checkpoint.gguf_blocks import CODECS
from cupaged.checkpoint.gguf_header import read_header
from cupaged.checkpoint.mapped_file import MappedFile
from cupaged.checkpoint.stored_tensor import PairedRows, StoredTensor
from cupaged.config import ModelConfig, RopeConfig
from cupaged.errors import CheckpointError, CupagedError, UnsupportedModelError
from tests.checkpoint_builders import random_tensors, stored, write_gguf

LLAMA = ModelConfig("llama", 40, 32, 64, 2, 4, 2, 16, 128, bos_token_id=1, eos_token_ids=(2,))
FAMILIES = {
    "llama": LLAMA,
    "llama with biases": replace(LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True),
    "llama tied": replace(LLAMA, tie_word_embeddings=True),
    "qwen2": replace(LLAMA, architecture="qwen2", qkv_bias=True),
    "qwen3": replace(LLAMA, architecture="qwen3", qk_norm=True),
    "window": replace(LLAMA, layer_windows=(24, 24)),
}


def sections(path: Path) -> tuple[int, int]:
    """(first byte of the tensors, size of the file)."""
    return min(tensor.offset for tensor in read_header(path).tensors), path.stat().st_size


# ---- models


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_comes_back_under_its_names_in_its_row_order(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]
    tensors = random_tensors(config)
    keys = {f"{config.architecture}.attention.sliding_window": 24} if config.layer_windows else {}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", config, tensors, metadata=keys))
    assert checkpoint.config == replace(config, rms_norm_eps=checkpoint.config.rms_norm_eps)
    assert checkpoint.config.rms_norm_eps == pytest.approx(1e-5)
    assert set(checkpoint.tensors) == set(tensors)
    for name, expected in tensors.items():
        source = checkpoint.tensors[name]
        assert (source.name, source.shape, source.storage) == (name, expected.shape, "F32")
        np.testing.assert_array_equal(source.read(), expected)
    assert checkpoint.file("tokenizer.json") is None


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_every_storage_type_reads_whole_and_by_rows(kind: str, tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", LLAMA, tensors, GGMLQuantizationType[kind]))
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        source, expected = checkpoint.tensors[name], stored(tensors[name], GGMLQuantizationType[kind])
        assert source.storage == kind
        np.testing.assert_array_equal(source.read(), expected)
        for start, stop in ((0, 1), (3, 29), (15, 17), (5, 5), (len(expected) - 1, None), (0, len(expected))):
            np.testing.assert_array_equal(source.read(start, stop), expected[start:stop])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 65), st.integers(0, 65))
def test_any_range_of_paired_rows_is_that_range_of_the_whole(tmp_path: Path, start: int, stop: int) -> None:
    rows = np.arange(64 * 3, dtype=np.float32).reshape(64, 3)
    path = tmp_path / "rows"
    path.write_bytes(rows.tobytes())
    source = PairedRows(StoredTensor("q", (64, 3), MappedFile(path), 0, CODECS["F32"]), 16)
    np.testing.assert_array_equal(source.read(start, stop), source.read()[start:stop])


def test_paired_rows_turn_neighbouring_rotary_pairs_into_halves(tmp_path: Path) -> None:
    # rotating neighbours (2i, 2i + 1) of the file's rows and halves (i, i + D/2) of ours must give the same dot products
    rng, dim = np.random.default_rng(3), 8
    path = tmp_path / "rows"
    rows = rng.standard_normal((2 * dim, 5)).astype(np.float32)
    path.write_bytes(rows.tobytes())
    ours = PairedRows(StoredTensor("q", rows.shape, MappedFile(path), 0, CODECS["F32"]), dim).read()
    angle = rng.standard_normal(dim // 2)[None, :, None]
    even, odd = rows.reshape(2, dim // 2, 2, 5)[:, :, 0], rows.reshape(2, dim // 2, 2, 5)[:, :, 1]
    low, high = ours.reshape(2, 2, dim // 2, 5)[:, 0], ours.reshape(2, 2, dim // 2, 5)[:, 1]
    np.testing.assert_array_equal(even * np.cos(angle) - odd * np.sin(angle), low * np.cos(angle) - high * np.sin(angle))
    np.testing.assert_array_equal(even * np.sin(angle) + odd * np.cos(angle), low * np.sin(angle) + high * np.cos(angle))


def test_a_quantised_vector_reads_by_elements(tmp_path: Path) -> None:
    values = np.random.default_rng(4).standard_normal(64).astype(np.float32)
    (tmp_path / "v").write_bytes(quantize(values, GGMLQuantizationType.Q8_0).tobytes())
    source = StoredTensor("v", (64,), MappedFile(tmp_path / "v"), 0, CODECS["Q8_0"])
    expected = stored(values, GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(source.read(), expected)
    np.testing.assert_array_equal(source.read(5, 40), expected[5:40])


def test_a_tensor_of_many_chunks_is_read_in_full(tmp_path: Path) -> None:
    raw = np.random.default_rng(5).integers(0, 60, (3000, 8 * 18), dtype=np.uint8)  # 768,000 values, several chunks
    (tmp_path / "t").write_bytes(b"skip" + raw.tobytes())
    source = StoredTensor("t", (3000, 256), MappedFile(tmp_path / "t"), 4, CODECS["Q4_0"])
    np.testing.assert_array_equal(source.read(), dequantize(raw, GGMLQuantizationType.Q4_0))
    np.testing.assert_array_equal(source.read(700, 2900), dequantize(raw[700:2900], GGMLQuantizationType.Q4_0))


def test_decoding_happens_in_small_pieces(tmp_path: Path) -> None:
    seen: list[int] = []
    codec = Codec("F32", 1, 4, lambda raw, out: seen.append(raw.nbytes + out.nbytes))
    (tmp_path / "t").write_bytes(bytes(4 << 20))
    StoredTensor("t", (1024, 1024), MappedFile(tmp_path / "t"), 0, codec).read()
    assert len(seen) > 1
    assert max(seen) <= 4 << 20


# ---- configuration


def test_rope_freqs_belong_to_the_configuration(tmp_path: Path) -> None:
    factors = np.linspace(1, 32, 8).astype(np.float32)
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA), extra={"rope_freqs.weight": factors})
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.rope == RopeConfig(freq_factors=tuple(factors.tolist()))
    assert "rope_freqs.weight" not in checkpoint.tensors


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, RopeConfig()),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, RopeConfig(scaling="linear", factor=4.0)),
        ({"rope.scaling.factor": 4.0}, RopeConfig(scaling="linear", factor=4.0)),
        ({"rope.scale_linear": 2.0}, RopeConfig(scaling="linear", factor=2.0)),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, RopeConfig()),
        ({"rope.freq_base": 500000.0}, RopeConfig(theta=500000.0)),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
            RopeConfig(scaling="yarn", factor=4.0, original_max_position=32),
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.attn_factor": 2.0},
            RopeConfig(
                scaling="yarn", factor=4.0, original_max_position=128, beta_fast=16.0, attention_factor=2.0 * (0.1 * np.log(4.0) + 1.0)
            ),
        ),
    ],
)
def test_rope_scaling(keys: dict[str, Any], expected: RopeConfig, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA), metadata={f"llama.{k}": v for k, v in keys.items()})
    assert open_checkpoint(path).config.rope == expected


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"llama.rope.scaling.type": "longrope"}, ["RoPE scaling", "longrope"]),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0, "llama.rope.scaling.yarn_log_multiplier": 0.1}, ["yarn"]),
        ({"llama.rope.dimension_count": 8}, ["rotary", "part of a head"]),
        ({"llama.attention.value_length": 8}, ["values"]),
        ({"llama.expert_count": 8}, ["expert"]),
        ({"llama.attention.head_count_kv": [2, 1]}, ["head_count_kv", "layer"]),
        ({"general.architecture": "gemma3"}, ["gemma3", "llama"]),
        ({"split.count": 3}, ["3 pieces", "merge"]),
        ({"general.type": "mmproj"}, ["mmproj"]),
    ],
)
def test_what_is_not_computed_is_refused_by_name(keys: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA), metadata=keys)
    with pytest.raises(UnsupportedModelError) as error:
        open_checkpoint(path)
    assert all(word in str(error.value) for word in [str(path), *words])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "feed_forward_length", "context_length", "attention.head_count"])
def test_missing_or_mistyped_metadata_is_named(key: str, tmp_path: Path) -> None:
    for value, word in ((None, "lacks"), ("four", "'four'")):
        path = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA), metadata={f"llama.{key}": value})
        with pytest.raises(CheckpointError, match=word) as error:
            open_checkpoint(path)
        assert key in str(error.value)


def test_defaults_of_absent_keys(tmp_path: Path) -> None:
    config = replace(LLAMA, head_dim=8, num_kv_heads=4)
    absent = dict.fromkeys(["attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base"])
    keys = {f"llama.{key}": None for key in absent} | {"llama.attention.head_count": [4, 4]}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", config, random_tensors(config), metadata=keys))
    assert (checkpoint.config.num_heads, checkpoint.config.num_kv_heads, checkpoint.config.head_dim) == (4, 4, 8)
    assert checkpoint.config.rope.theta == 10000.0


def test_every_end_token_ends_an_answer(tmp_path: Path) -> None:
    keys = {f"tokenizer.ggml.{name}_token_id": i for name, i in (("eos", 5), ("eot", 7), ("eom", 5), ("bos", 4))}
    config = open_checkpoint(write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA), metadata=keys)).config
    assert (config.bos_token_id, config.eos_token_ids) == (4, (5, 7))


def test_sampling_recommendations(tmp_path: Path) -> None:
    keys = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA), metadata=keys)
    assert open_checkpoint(path).generation == GenerationDefaults(temperature=0.5, top_k=20)


# ---- the header


def test_every_type_of_metadata_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    values: dict[str, Any] = {
        "uint8": 200, "int8": -3, "uint16": 60000, "int16": -300, "uint32": 4000000000, "int32": -70000, "uint64": 2**63, "int64": -(2**40)
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 1e300)
    writer.add_bool("yes", True)
    writer.add_string("text", "Zoë 🙂")
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, 2.0])
    writer.add_array("bools", [True, False])
    writer.add_array("texts", ["", "ä", "x y"])
    writer.add_array("nested", [[1, 2], [3]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(path)
    expected = values | {"f32": 0.5, "f64": 1e300, "yes": True, "text": "Zoë 🙂", "ints": [1, -2, 3], "floats": [0.5, 2.0]}
    expected |= {"bools": [True, False], "texts": ["", "ä", "x y"], "nested": [[1, 2], [3]], "general.architecture": "llama"}
    assert {key: header.metadata[key] for key in expected} == expected
    assert header.metadata["yes"] is True
    assert type(header.metadata["uint8"]) is int
    assert header.tensors == ()


def test_version_2_and_another_alignment(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA)
    path = write_gguf(tmp_path / "m.gguf", LLAMA, tensors, metadata={"general.alignment": 1024})
    data = bytearray(path.read_bytes())
    data[4:8] = struct.pack("<I", 2)
    path.write_bytes(data)
    assert read_header(path).version == 2
    for name, source in open_checkpoint(path).tensors.items():
        np.testing.assert_array_equal(source.read(), tensors[name])


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"", "empty"),
        (b"GG", "cut short"),
        (b"not a model at all", "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60), "ends inside its header"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "ends inside its header"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**61), "ends inside its header"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77), "unknown type, 77"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff" + struct.pack("<II", 4, 1), "UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 2000, "unknown type"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"t" + struct.pack("<I", 9), "9 dimensions"),
    ],
)
def test_a_broken_header_is_one_clear_line(start: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(start)
    with pytest.raises(CheckpointError, match=words) as error:
        open_checkpoint(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_cut_anywhere_is_refused_at_open(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA))
    start, size = sections(whole)
    data = whole.read_bytes()
    cut = tmp_path / "cut.gguf"
    last = max(tensor.offset for tensor in read_header(whole).tensors)
    for length in [*range(0, start, 7), start, start + 1, last, last + 1, size - 32]:
        cut.write_bytes(data[:length])
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(cut)
        if length > start:
            assert "cut short" in str(error.value)


def test_a_file_that_shrinks_after_opening(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA))
    source = open_checkpoint(path).tensors["lm_head.weight"]
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        source.read()
    path.unlink()
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        source.read()


def test_damaged_bytes_never_raise_anything_else(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA), metadata={"tokenizer.ggml.tokens": ["a", "b"]})
    start, _ = sections(whole)
    data, rng = whole.read_bytes(), np.random.default_rng(6)
    path = tmp_path / "damaged.gguf"
    for _ in range(400):
        broken = bytearray(data)
        for at in rng.integers(8, start, 2):
            broken[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.integers(256)])
        path.write_bytes(broken)
        with suppress(CupagedError):
            open_checkpoint(path)


def test_tensors_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"

    def refuse(tensor: np.ndarray[Any, Any], kind: GGMLQuantizationType | None, error: type[CheckpointError], *words: str) -> None:
        writer = GGUFWriter(path, "llama")
        writer.add_tensor("blk.0.ffn_up.weight", tensor, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(error) as raised:
            open_checkpoint(path)
        assert all(word in str(raised.value) for word in ("blk.0.ffn_up.weight", *words))

    refuse(np.zeros((4, 84), np.uint8), GGMLQuantizationType.Q2_K, UnsupportedModelError, "Q2_K")
    refuse(np.zeros((4, 136), np.uint8), GGMLQuantizationType.IQ4_XS, UnsupportedModelError, "IQ4_XS")
    refuse(np.zeros((4, 4), np.float64), None, UnsupportedModelError, "F64")


def test_rows_that_do_not_fill_blocks_and_twice_listed_tensors(tmp_path: Path) -> None:
    def entry(name: str, sizes: list[int], kind: int) -> bytes:
        encoded = name.encode()
        return struct.pack("<Q", len(encoded)) + encoded + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, 0)

    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + entry("t", [33, 2], 8) + bytes(4096))
    with pytest.raises(CheckpointError, match="tensor t has rows of 33 values"):
        open_checkpoint(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + entry("t", [32], 0) * 2 + bytes(4096))
    with pytest.raises(CheckpointError, match="tensor t twice"):
        open_checkpoint(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + entry("t", [32, 0], 0) + bytes(4096))
    with pytest.raises(CheckpointError, match="tensor t is empty"):
        open_checkpoint(path)


# ---- the path


def test_a_gguf_file_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    assert open_checkpoint(write_gguf(tmp_path / "blob", LLAMA, random_tensors(LLAMA))).config.architecture == "llama"


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    (tmp_path / "notes.txt").write_text("hello")
    for name, words in (("absent", "does not exist"), ("model.safetensors", "folder"), ("notes.txt", "neither a GGUF file nor a folder")):
        with pytest.raises(CheckpointError, match=words) as error:
            open_checkpoint(tmp_path / name)
        assert name in str(error.value)


# ---- the real file


def test_smollm2_opens_at_once_and_is_what_it_is(smollm2_path: Path) -> None:
    seconds = min(_seconds_to_open(smollm2_path) for _ in range(3))
    assert seconds < 0.2
    checkpoint = open_checkpoint(smollm2_path)
    eps = checkpoint.config.rms_norm_eps
    assert np.float32(eps) == np.float32(1e-5)
    assert checkpoint.config == ModelConfig(
        "llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, eps, RopeConfig(theta=1e5), tie_word_embeddings=True, bos_token_id=1, eos_token_ids=(2,)
    )
    assert len(checkpoint.tensors) == 272
    assert checkpoint.tensors["model.embed_tokens.weight"].storage == "Q8_0"
    assert checkpoint.tensors["model.layers.29.mlp.up_proj.weight"].storage == "Q4_1"
    assert len(checkpoint.metadata["tokenizer.ggml.tokens"]) == 49152


def test_smollm2_tensors_equal_the_librarys(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    entries = {tensor.name: tensor for tensor in read_header(smollm2_path).tensors}
    up = checkpoint.tensors["model.layers.7.mlp.up_proj.weight"]
    raw = np.fromfile(smollm2_path, np.uint8, 1536 * 18 * 20, offset=entries["blk.7.ffn_up.weight"].offset)
    np.testing.assert_array_equal(up.read(), dequantize(raw.reshape(1536, -1), GGMLQuantizationType.Q4_1))
    query = checkpoint.tensors["model.layers.7.self_attn.q_proj.weight"]
    raw = np.fromfile(smollm2_path, np.uint8, 576 * 18 * 20, offset=entries["blk.7.attn_q.weight"].offset)
    rows = dequantize(raw.reshape(576, -1), GGMLQuantizationType.Q4_1)
    np.testing.assert_array_equal(query.read(64, 96), rows[64:128:2])  # the first half of head 1
    np.testing.assert_array_equal(query.read(96, 128), rows[65:128:2])


def _seconds_to_open(path: Path) -> float:
    start = time.perf_counter()
    open_checkpoint(path)
    return time.perf_counter() - start
