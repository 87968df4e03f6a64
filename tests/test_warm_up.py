"""`cupaged warmup`: what it compiles, what it says, and that nothing is left to compile afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from cupaged.backends import compile_ahead, cpu_jit, open_backend
from cupaged.backends.cpu_formats import FORMATS
from cupaged.checkpoint import open_checkpoint
from cupaged.cli.main import run
from cupaged.errors import BackendError, ConfigError
from tests.checkpoint_builders import CONFIG, random_tensors, write_folder, write_gguf

LISTEN = """
import sys
from numba.core import event
compiled = []
class Listener(event.Listener):
    def on_start(self, event): compiled.append(event.data)
    def on_end(self, event): pass
event.register("numba:compile", Listener())
from cupaged import LLM, SamplingParams
LLM(sys.argv[1], kv_cache_dtype="int8", num_blocks=8).generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
assert not compiled, compiled
"""


def python(*args: str, cache: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *args], env=os.environ | {"CUPAGED_CACHE": str(cache)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def without_products(tmp_path: Path) -> Path:
    """A cache that holds every kernel but those that read weights."""
    open_backend("cpu")
    folder = cpu_jit.FOLDER
    assert folder is not None
    shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("*gemm_operation*", "*embedding_operation*"))
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
    python("-c", LISTEN, str(model), cache=without_products)


def test_an_unknown_format_is_named_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("cupaged.backends.cpu_warm_up.warm_up", lambda backend: pytest.fail("compiled"))
    assert run(["warmup", "q4_1", "q3_k"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: there is no format 'q3_k' of weights; there are float32, float16, bfloat16, q8_0, q4_0,")


def test_without_a_folder_or_numba_there_is_nothing_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_jit, "FOLDER", None)
    with pytest.raises(ConfigError, match="set CUPAGED_CACHE to a folder that can be written"):
        compile_ahead.kernel_folder()
    monkeypatch.setitem(sys.modules, "cupaged.backends.cpu_jit", None)
    monkeypatch.delattr("cupaged.backends.cpu_jit", raising=False)
    with pytest.raises(BackendError, match="without Numba"):
        compile_ahead.kernel_folder()


def test_every_format_passes_through_its_kernels() -> None:
    names = [kernels.name for kernels in compile_ahead.compile_kernels()]
    assert names[0] == "what every model needs"
    assert [name for name in names if "keys" in name] == [f"keys and values in {kind}" for kind in ("bfloat16", "float16", "int8")]
    assert [name for name in names if "weights" in name] == [f"weights in {kind.name}" for kind in FORMATS]
