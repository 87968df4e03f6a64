"""`cupaged warmup`: what it compiles, what it says, and that nothing is left to compile afterwards."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from cupaged.backends import compile_ahead, cpu_code
from cupaged.backends.cpu import kernels_of
from cupaged.backends.cpu_formats import FORMATS
from cupaged.backends.cpu_kv_numbers import KINDS
from cupaged.checkpoint import open_checkpoint
from cupaged.cli.main import run
from cupaged.errors import BackendError, ConfigError
from tests.checkpoint_builders import CONFIG, random_tensors, write_folder, write_gguf

NOTHING_COMPILES = """
import subprocess, sys
def refuse(*_, **__):
    raise AssertionError("a process was started")
subprocess.Popen = refuse
from cupaged import LLM, SamplingParams
LLM(sys.argv[1], kv_cache_dtype="int8", num_blocks=8).generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
"""


def python(*args: str, cache: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *args], env=os.environ | {"CUPAGED_CACHE": str(cache)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def without_products(tmp_path: Path) -> Path:
    """A cache that holds every kernel but those that read weights."""
    folder = cpu_code.folder()
    for kind in KINDS:
        cpu_code.compile_missing(kernels_of(kind))
    shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("gemm-*", "embedding-*"))
    return tmp_path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Its matrices in Q4_1."""
    config = open_checkpoint(write_folder(tmp_path / "folder", CONFIG, {})).config
    return write_gguf(tmp_path / "model.gguf", config, random_tensors(config), GGMLQuantizationType.Q4_1)


def test_after_a_warm_up_nothing_is_compiled(without_products: Path, model: Path) -> None:
    first = python("-m", "cupaged", "warmup", "q4_1", cache=without_products)
    told = first.stderr.splitlines()
    assert told[0].startswith("compiling what is missing")
    assert told[-1].startswith("weights in q4_1: 2 in ")
    (folder,) = without_products.glob("kernels-*")
    assert first.stdout.endswith(f": {folder}\n")
    assert " kernels compiled in " in first.stdout
    assert python("-m", "cupaged", "warmup", "q4_1", cache=without_products).stdout == f"all kernels were there: {folder}\n"
    python("-c", NOTHING_COMPILES, str(model), cache=without_products)


def test_an_unknown_format_is_named_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cpu_code, "compile_missing", lambda names: pytest.fail("compiled"))
    assert run(["warmup", "q4_1", "q3_k"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: there is no format 'q3_k' of weights; there are float32, float16, bfloat16, q8_0, q4_0,")


def test_without_a_folder_or_numba_there_is_nothing_to_keep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    forget_folders()
    monkeypatch.setenv("CUPAGED_CACHE", str(blocked))
    with pytest.raises(ConfigError, match="set CUPAGED_CACHE to a folder that can be written"):
        compile_ahead.kernel_folder()
    forget_folders()
    monkeypatch.setattr(importlib.metadata, "version", no_package)
    with pytest.raises(BackendError, match="without Numba"):
        compile_ahead.kernel_folder()
    forget_folders()


def forget_folders() -> None:
    cpu_code.folder.cache_clear()
    cpu_code.kept_folder.cache_clear()


def no_package(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


def test_every_format_passes_through_its_kernels() -> None:
    names = [kernels.name for kernels in compile_ahead.compile_kernels()]
    assert names[0] == "what every model needs"
    assert [name for name in names if "keys" in name] == [f"keys and values in {kind}" for kind in ("bfloat16", "float16", "int8")]
    assert [name for name in names if "weights" in name] == [f"weights in {kind.name}" for kind in FORMATS]
