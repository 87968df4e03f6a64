"""The planner: its figures against hand-computed ones, and one clear line for what makes no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from cupaged import hub
from cupaged.capacity import Wish, capacity, find_model
from cupaged.checkpoint.hf_config import model_config
from cupaged.cli.main import run
from cupaged.config import ModelConfig
from cupaged.errors import CheckpointError, ConfigError
from cupaged.presets import DEVICES, MODELS, GiB, ModelShape
from tests.checkpoint_builders import CONFIG, random_tensors, write_folder

LLAMA_70B, OPT = MODELS["llama-3-70b"], MODELS["opt-13b"]


def plan(model: str, device: str = "a100-80gb", **wish: Any) -> Any:
    return capacity(MODELS[model], DEVICES[device], Wish(**wish))


# ---- what a model costs


def test_kv_bytes_of_a_token() -> None:
    assert LLAMA_70B.kv_bytes_per_token("bfloat16") == 2 * 80 * 8 * 128 * 2 == 327_680
    assert LLAMA_70B.kv_bytes_per_token("bfloat16") * 8192 == 2_684_354_560, "an 8K request: 2.68 GB, not 40"
    assert LLAMA_70B.kv_bytes_per_token("bfloat16") * 16 == 5_242_880, "a block of 16"
    assert OPT.kv_bytes_per_token("float16") == 819_200
    assert MODELS["llama-3-8b"].kv_bytes_per_token("fp8") == 65_536
    assert MODELS["smollm2-135m"].kv_bytes_per_token("int8") == 2 * 30 * 3 * (64 + 4)


def test_a_shape_agrees_with_the_config_it_comes_from() -> None:
    config = ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, tie_word_embeddings=True)
    shape = ModelShape.of("smollm2-135m", config)
    assert shape == MODELS["smollm2-135m"]
    for dtype in ("float32", "bfloat16", "int8"):
        assert shape.kv_bytes_per_token(dtype) == config.kv_bytes_per_token(dtype)


@pytest.mark.parametrize(
    ("model", "billions"), [("smollm2-135m", 0.1345), ("llama-3-8b", 8.03), ("llama-3-70b", 70.55), ("opt-13b", 12.85)]
)
def test_parameters_are_those_of_the_published_models(model: str, billions: float) -> None:
    assert MODELS[model].num_parameters / 1e9 == pytest.approx(billions, rel=0.001)


def test_flops_of_a_token_by_hand() -> None:
    tiny = ModelShape("tiny", 10, 4, 6, 2, 2, 1, 2, 32)
    layer = 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 6  # q; k and v; o; gate, up and down
    assert tiny.layer_weights == layer == 120
    # 3 tokens at positions 0, 1, 2 look at 1 + 2 + 3 tokens; one is sampled
    assert tiny.flops(3, 1, 6) == 2 * (3 * 2 * layer + 40) + 4 * 2 * 2 * 2 * 6


# ---- what a machine holds


def test_the_paper_s_machine_has_15_700_slots_and_seven_requests_under_max() -> None:
    """40 GiB, nine tenths of it used, less the weights: the 12 GB and 15.7K slots of arXiv 2309.06180."""
    found = plan("opt-13b", "a100-40gb", context=2048, mean_prompt=161, mean_output=338)
    assert found.weights_bytes == 2 * OPT.num_parameters
    assert found.pool_bytes == int(40 * GiB * 0.9) - found.weights_bytes
    assert found.num_blocks == found.pool_bytes // (16 * 819_200)
    assert found.num_blocks * 16 == pytest.approx(15_700, rel=0.01)
    assert found.requests["max"] == found.num_blocks // 128 == 7
    assert found.requests["pow2"] == found.num_blocks // 64, "161 + 512 tokens are 43 blocks: a buddy of 64"
    assert found.requests["paged, longest"] == found.num_blocks // 32, "499 tokens are 32 blocks"
    assert found.requests["paged"] == int(found.num_blocks * 16 / (161 + 338 / 2 + 7.5))


def test_a_context_that_is_no_power_of_two_is_rounded_up_to_one() -> None:
    found = plan("opt-13b", "a100-40gb", context=1500, mean_prompt=161, mean_output=338)
    assert found.requests["max"] == found.num_blocks // 128 == 7, "94 blocks are a buddy of 128"


def test_a_model_that_is_too_large_is_answered_not_refused() -> None:
    found = plan("llama-3-70b", memory=80 * 10**9, context=8192)
    assert not found.fits
    assert found.num_blocks == 0
    assert set(found.requests.values()) == {0}
    assert found.bottleneck == "memory"
    # 72 GB less 70.55 leave 1.45 on each of 2 devices, and on them an 8K context takes 1.34 GB; on one, 2.68
    ways = {(way.gpus, way.dtype): way.requests for way in found.ways}
    assert (ways[1, "bfloat16"], ways[1, "fp8"], ways[2, "bfloat16"]) == (0, 0, 1)


def test_tensor_parallel_divides_weights_and_heads() -> None:
    one, eight = plan("llama-3-70b", memory=640 * 10**9, context=8192), plan("llama-3-70b", memory=80 * 10**9, context=8192, tensor_parallel=8)
    assert eight.kv_bytes_per_token == 327_680 // 8 == 40_960
    assert eight.weights_bytes == -(-one.weights_bytes // 8)
    assert eight.num_blocks == pytest.approx(one.num_blocks, rel=1e-3)


def test_the_bottleneck_is_what_takes_longest_in_a_full_step() -> None:
    """Weights are read once a step whoever shares them: while that is the longest part, more room would help."""
    small = plan("llama-3-8b", memory=20 * 10**9, context=8192, mean_prompt=1000, mean_output=200)
    assert small.bottleneck == "memory"
    large = plan("llama-3-8b", "h200", context=8192, mean_prompt=1000, mean_output=200)
    assert large.bottleneck == "bandwidth"
    assert large.seconds["kv"] > large.seconds["weights"]
    short = plan("llama-3-8b", "h200", context=8192, mean_prompt=4, mean_output=8)
    assert short.bottleneck == "compute"
    step = max(short.seconds["weights"] + short.seconds["kv"], short.seconds["compute"])
    assert short.tokens_per_second == pytest.approx(short.requests["paged"] / step)


def test_a_cpu_computes_with_the_weights_that_are_on_disk() -> None:
    on_cpu = plan("smollm2-135m", "cpu", memory=10**9, stored_bytes=98_362_432)
    assert (on_cpu.dtype, on_cpu.weights_bytes) == ("stored", 98_362_432)
    assert on_cpu.kv_bytes_per_token == 2 * 30 * 3 * 64 * 4
    on_gpu = plan("smollm2-135m", "rtx-4090", stored_bytes=98_362_432)
    assert (on_gpu.dtype, on_gpu.weights_bytes) == ("bfloat16", 2 * MODELS["smollm2-135m"].num_parameters)
    assert plan("smollm2-135m", "cpu", memory=10**9, dtype="float32", stored_bytes=98_362_432).dtype == "float32"


@pytest.mark.parametrize(
    ("wish", "line"),
    [
        ({"context": 0}, "context"),
        ({"context": 9000}, "8192 positions"),
        ({"context": 1024, "mean_prompt": 1000, "mean_output": 100}, "1100 tokens"),
        ({"block_size": 257}, "block_size"),
        ({"tensor_parallel": 3}, "8 KV heads"),
        ({"dtype": "q9"}, "dtype"),
        ({"kv_cache_dtype": "q9"}, "kv_cache_dtype"),
        ({"memory": 0}, "memory"),
        ({"mean_prompt": 0}, "mean_prompt"),
        ({"utilisation": 1.5}, "utilisation"),
    ],
)
def test_what_makes_no_sense_is_one_line(wish: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as refusal:
        plan("llama-3-8b", **wish)
    assert len(str(refusal.value).splitlines()) == 1


# ---- models by name


def test_a_model_may_be_a_preset_a_folder_or_a_config(tmp_path: Path) -> None:
    assert find_model("opt-13b")[0] is OPT
    layout = model_config(tmp_path / "config.json", CONFIG, {})
    write_folder(tmp_path / "whole", CONFIG, random_tensors(layout))
    shape, stored = find_model(str(tmp_path / "whole"))
    assert shape == ModelShape.of("whole", layout)
    assert stored == (tmp_path / "whole" / "model.safetensors").stat().st_size
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    assert find_model(str(alone)) == (ModelShape.of("alone", layout), None), "no weights are needed to plan"


def test_of_a_hub_id_only_the_config_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    fetched: list[Any] = []

    def download(repo: str, **options: Any) -> str:
        fetched.append((repo, options["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(hub, "_ask_hub", lambda repo, revision, label: None)
    shape, stored = find_model("someone/large")
    assert fetched == [("someone/large", ["config.json", "generation_config.json"])]
    assert (shape.name, shape.num_layers, stored) == ("someone/large", 2, None)


def test_a_folder_that_is_no_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        find_model(str(tmp_path))


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean llama-3-70b"):
        find_model("llama3-70b")


# ---- the command


def test_the_command_shows_the_formula(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "llama-3-70b", "--memory", "80GB", "--context", "8192"]) == 0
    out = capsys.readouterr().out
    assert "2 x 80 layers x 8 KV heads x 128 x 2 bytes = 327,680" in out
    assert "2.68 GB" in out
    assert "5.24 MB" in out


def test_the_command_speaks_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "opt-13b", "--gpu", "a100-40gb", "--prompt", "161", "--output", "338", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["kv_bytes_per_token"] == 819_200
    assert value["requests"]["max"] == 7


def test_the_command_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "opt-13b", "--gpu", "b52"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: no device preset 'b52'; there are a100-40gb, a100-80gb, h100, h200, rtx-4090, cpu"
    ]
