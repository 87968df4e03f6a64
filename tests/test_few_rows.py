"""Where few rows end: measured on the model's own products before anything is recorded, kept, and what products then are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kernels_cu
from cupaged import LLM, SamplingParams
from cupaged.backends import few_rows
from cupaged.backends.cupy_device import CupyDevice
from cupaged.backends.emu_device import EmuDevice
from cupaged.backends.few_rows import COUNTS, SKINNY_ROWS, few
from cupaged.backends.kernel_graphs import ForwardGraphs
from cupaged.backends.kernels import KernelBackend
from cupaged.backends.launch import Launch
from cupaged.conformance.steps import Stored
from cupaged.conformance.subject import random
from cupaged.errors import BackendError
from tests.family_models import ROOT
from tests.support import fake_cupy
from tests.support.kernels import skip_without_compiler

MODEL = str(ROOT / "llama_tied")
ROOMY: dict[str, Any] = {"num_blocks": 60, "block_size": 4, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32}
OURS = ("skinny_matmul", "skinny_gate_up")


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> fake_cupy.CublasLibrary:
    skip_without_compiler()
    return fake_cupy.install(monkeypatch)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where measurements are kept."""
    monkeypatch.setattr(few_rows, "cache_dir", lambda: tmp_path)
    return tmp_path / "few_rows"


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of all that was timed."""
    seen: list[float] = []
    honest = CupyDevice.seconds
    monkeypatch.setattr(CupyDevice, "seconds", lambda self, work: (seen.append(honest(self, work)), seen[-1])[1])
    return seen


def faster_up_to(rows: int) -> None:
    """Our kernels take a second a row; cuBLAS takes as long whatever it does, and the kernels around it nothing."""
    fake_cupy.Clock.cost = lambda name, n: n if name in OURS else rows + 0.5 if name == "gemm" else 0


def backend(dtype: str = "float32", *, graphs: bool = True, inputs: int = 16, device: Any = None) -> KernelBackend:
    """Of a model with one matrix of each role."""
    made = KernelBackend(device or CupyDevice(), dtype, graphs=graphs)
    part = Stored(random(1, 8, inputs))
    made.load_matrix([part, part, part])
    made.load_matrix([part])
    made.load_gate_up(part, part)
    made.load_vector(Stored(np.ones(8, np.float32)))
    return made


def recorded(made: KernelBackend) -> int:
    made.record(lambda rows: None, 4)
    return made._few.most


@pytest.mark.parametrize(
    ("seconds", "most"),
    [
        ({1: (1.0, 2.0), 2: (1.0, 2.0), 4: (1.0, 2.0)}, 4),
        ({1: (1.0, 2.0), 2: (2.0, 2.0), 4: (3.0, 2.0)}, 2),
        ({1: (3.0, 2.0)}, 0),
        ({}, 0),
    ],
)
def test_few_rows_end_where_cublas_is_faster(seconds: dict[int, tuple[float, float]], most: int) -> None:
    assert few(seconds) == most


# ---- what is measured


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("most", [0, 1, 2, 4])
def test_what_was_measured_decides_which_kernels_run(most: int, graphs: bool, library: fake_cupy.CublasLibrary) -> None:
    faster_up_to(most)
    made = backend(graphs=graphs)
    assert recorded(made) == most
    device = made._device
    matrix = made.load_matrix([Stored(random(2, 24, 16))])
    for rows in range(1, 6):
        x, out = device.upload(random(3, rows, 16)), device.empty((rows, 24), np.float32)
        before = library.calls.count("gemm")
        made.linear(x, matrix, out)
        assert library.calls.count("gemm") - before == (rows > most)


@pytest.mark.parametrize("most", [0, 1, 4])
def test_the_same_tokens_wherever_few_rows_end(most: int) -> None:
    prompts = [np.random.default_rng(s).integers(3, 100, n).tolist() for s, n in enumerate((3, 9, 5))]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in LLM(MODEL, device="reference", **ROOMY).generate(prompts, params)]
    faster_up_to(most)
    llm = LLM(MODEL, device="cuda", dtype="float32", **ROOMY)
    assert llm.engine._runner._backend._few.most == most
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected


def test_a_models_own_products_are_timed_with_what_stands_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    honest = CupyDevice.launch
    monkeypatch.setattr(CupyDevice, "launch", lambda self, launch: (launched.append(launch.variant.kernel), honest(self, launch))[1])
    made = backend(graphs=False)
    recorded(made)
    ours, theirs = ["skinny_matmul", "skinny_matmul", "skinny_gate_up"], ["rms_norm", "rms_norm", "silu_mul"]
    runs = few_rows.REPEATS + 2
    assert launched == len(COUNTS) * (runs * ours + runs * theirs)


def test_with_graphs_replays_are_timed_and_without_them_launches(monkeypatch: pytest.MonkeyPatch, timed: list[float]) -> None:
    captures: list[int] = []
    honest = CupyDevice.capture
    monkeypatch.setattr(CupyDevice, "capture", lambda self, work: (captures.append(len(timed)), honest(self, work))[1])
    faster_up_to(4)
    recorded(backend(graphs=False))
    assert not captures
    without, timed[:] = list(timed), []
    recorded(backend(graphs=True))
    assert captures == [few_rows.REPEATS * i for i in range(2 * len(COUNTS))]
    assert timed == without
    assert set(without) == {3.0 * rows for rows in COUNTS} | {3 * 4.5}


def test_it_ends_with_the_first_loss_and_takes_the_fastest_of_several(timed: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def cost(name: str, rows: int) -> float:
        nonlocal calls
        calls += 1
        disturbed = 100.0 if calls % 17 == 0 else 0.0
        return disturbed + (rows if name in OURS else 1.5 if name == "gemm" else 0)

    fake_cupy.Clock.cost = cost
    assert recorded(backend()) == 1
    assert len(timed) == 2 * 2 * few_rows.REPEATS  # of one row and of two


def test_a_measurement_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def fail(self: CupyDevice, work: Any) -> float:
        raise BackendError("CUDA: for once")

    monkeypatch.setattr(CupyDevice, "seconds", fail)
    made = backend()
    with pytest.raises(BackendError, match="for once"):
        recorded(made)
    assert made._few.most == SKINNY_ROWS
    assert not folder.exists()


# ---- when


def test_all_is_measured_before_the_first_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def note(owner: Any, name: str) -> None:
        honest: Callable[..., Any] = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (events.append(name), honest(*args))[1])

    note(CupyDevice, "seconds")
    note(ForwardGraphs, "__call__")
    fake_cupy.Device.free, fake_cupy.Device.total = 8 << 20, 64 << 20
    llm = LLM(MODEL, device="cuda", dtype="float32", **{**ROOMY, "num_blocks": None, "gpu_memory_utilization": 0.95})  # the pool's size is profiled
    llm.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert events.count("__call__") > 3
    assert events.count("seconds") == 2 * len(COUNTS) * few_rows.REPEATS  # once, for two runners
    assert "seconds" not in events[events.index("__call__") :]


def test_nothing_is_measured_in_a_captured_region() -> None:
    made = backend()
    with pytest.raises(BackendError, match="a captured region"):
        made._device.capture(lambda: made._few.settle(made))
    assert made._few.most == SKINNY_ROWS


def test_the_emulator_measures_nothing_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def fail(*_: Any) -> float:
        raise AssertionError("time means nothing here")

    monkeypatch.setattr(EmuDevice, "seconds", fail)
    launched: list[Launch] = []
    monkeypatch.setattr(EmuDevice, "launch", lambda self, launch: launched.append(launch))
    assert recorded(backend(device=EmuDevice())) == SKINNY_ROWS
    assert not launched
    assert not folder.exists()


# ---- what is kept


def test_a_later_start_measures_nothing(folder: Path, timed: list[float]) -> None:
    faster_up_to(2)
    assert recorded(backend()) == 2
    assert timed
    timed.clear()
    faster_up_to(4)
    assert recorded(backend()) == 2
    assert not timed
    (kept,) = folder.iterdir()
    content = json.loads(kept.read_text(encoding="utf-8"))
    assert content["few_rows"] == 2
    assert content["products"] == [["gate", 16, 16, 1], ["norm", 24, 16, 1], ["plain", 8, 16, 1]]
    assert content["seconds"] == {"1": [3.0, 7.5], "2": [6.0, 7.5], "4": [12.0, 7.5]}


@pytest.mark.parametrize("other", ["dtype", "graphs", "shape", "kernels", "GPU", "cuBLAS"])
def test_what_the_answer_depends_on_is_measured_anew(other: str, folder: Path, timed: list[float], monkeypatch: pytest.MonkeyPatch, library: fake_cupy.CublasLibrary) -> None:
    recorded(backend())
    timed.clear()
    options: dict[str, dict[str, Any]] = {"dtype": {"dtype": "bfloat16"}, "graphs": {"graphs": False}, "shape": {"inputs": 24}}
    if other == "kernels":
        honest = kernels_cu.source
        monkeypatch.setattr(kernels_cu, "source", lambda name: honest(name) + ("\n// changed\n" if name == "skinny_gate_up.cu" else ""))
    if other == "GPU":
        monkeypatch.setattr(fake_cupy.runtime, "getDeviceProperties", lambda device: {"name": b"NVIDIA Other"})
    if other == "cuBLAS":
        library.cublasGetVersion_v2.call = lambda handle, version: setattr(version._obj, "value", 130000) or 0
    recorded(backend(**options.get(other, {})))
    assert timed
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff", b'{"few_rows": 3}', b'{"few_rows": "2"}', b'{"few_rows": 99}', b"{}"])
def test_a_damaged_file_is_measured_anew_and_replaced(content: bytes, folder: Path, timed: list[float]) -> None:
    faster_up_to(2)
    recorded(backend())
    timed.clear()
    (kept,) = folder.iterdir()
    kept.write_bytes(content)
    assert recorded(backend()) == 2
    assert timed
    assert json.loads(kept.read_text(encoding="utf-8"))["few_rows"] == 2


def test_where_nothing_can_be_kept_every_start_measures(folder: Path, timed: list[float]) -> None:
    folder.write_bytes(b"a file in the folder's place")
    for _ in range(2):
        timed.clear()
        faster_up_to(1)
        assert recorded(backend()) == 1
        assert timed
