"""open_engine: what a model folder or an option can do wrong while everything is put together, in one line each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cupaged.backends.reference import ReferenceBackend
from cupaged.config import EngineConfig
from cupaged.errors import BackendError, CheckpointError, ConfigError, UnsupportedModelError
from cupaged.model_loader import open_engine

FAMILIES = Path(__file__).parent / "families"


def model(folder: Path, config: dict[str, Any] | None = None, generation: dict[str, Any] | None = None) -> str:
    shutil.copytree(FAMILIES / "llama_tied", folder / "model")
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    if generation is not None:
        (folder / "model" / "generation_config.json").write_text(json.dumps(generation))
    return str(folder / "model")


def options(**values: Any) -> EngineConfig:
    return EngineConfig(device="reference", **({"num_blocks": 8} | values))


@pytest.mark.parametrize("sizes", [{"num_blocks": 2**31 - 1}, {"max_num_batched_tokens": 2**31 - 1, "max_num_seqs": 2**31 - 1}])
def test_what_memory_cannot_hold_names_the_knobs(tmp_path: Path, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, shape: tuple[int, ...], dtype: object) -> None:
        raise MemoryError(f"Unable to allocate an array with shape {shape}")

    monkeypatch.setattr(ReferenceBackend, "empty", full)
    with pytest.raises(BackendError, match=r"not enough memory .*num_blocks, kv_cache_memory; now \d+ blocks\), max_num_batched_tokens"):
        open_engine(model(tmp_path), options(**sizes))


def test_a_recommendation_that_makes_no_sense_names_the_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model recommends sampling .* top_p must be above 0") as raised:
        open_engine(model(tmp_path, generation={"top_p": 0.0}), options())
    assert not isinstance(raised.value, ConfigError)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -3}, "sliding window of -3"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 0}}, "beta_fast"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": -4}}, "original context"),
    ],
)
def test_numbers_that_describe_no_model_are_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        open_engine(model(tmp_path, config), options())
