"""scripts/gpu_check.py and bench_gpu.py in tiny sizes: on the emulator, and over the CuPy of our own, as on a GPU. Structure only:
what they would measure here means nothing."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.backends import cupy_device, nvrtc
from cupaged.backends.emu_device import EmuDevice, EmuGraph
from cupaged.backends.kernel_specs import variants
from cupaged.backends.launch import KernelSpec, Launch
from tests.support import fake_cupy
from tests.support.kernels import skip_without_compiler

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_gpu  # noqa: E402
import gpu_check  # noqa: E402
from gpu import attention, bench, cases, clock, graphs, l2, machine, prefill, primitives, random_model, report  # noqa: E402

GPU_PARTS = "probe,gemm,decode,large,paging,prefill,skinny,steps,small"


@pytest.fixture(autouse=True)
def _compiler() -> None:
    skip_without_compiler()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CuPy of our own, in all places that would import the real one, with what the scripts want beyond CupyDevice."""
    library = fake_cupy.CublasLibrary()
    for module in (cupy_device, clock, machine):
        monkeypatch.setattr(module, "cupy", fake_cupy)
    monkeypatch.setattr(cupy_device, "cupyx", fake_cupy)
    monkeypatch.setattr(cupy_device, "load_library", lambda major: library)
    monkeypatch.setattr(fake_cupy.cuda, "get_elapsed_time", lambda start_event, end_event: 0.5, raising=False)
    properties = {"getDeviceProperties": lambda index: {"name": b"NVIDIA Fake"}, "driverGetVersion": lambda: 12080}
    for name, value in properties.items():
        monkeypatch.setattr(fake_cupy.runtime, name, value, raising=False)
    pool = fake_cupy.get_default_memory_pool()
    pool.free_all_blocks = lambda: None
    monkeypatch.setattr(fake_cupy, "get_default_memory_pool", lambda: pool)


def stored(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.json")
    assert path.with_suffix(".md").exists()
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def by_part(content: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    parts: dict[str, list[dict[str, Any]]] = {}
    for result in content["results"]:
        parts.setdefault(result["part"], []).append(result)
    return parts


# ---- on the emulator


def test_every_measurement_runs_in_tiny_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_gpu.main(["--device", "emu", "--tiny", "--out", str(tmp_path)]) == 0
    content = stored(tmp_path)
    assert {"device", "architecture", "date", "command", "versions"} <= set(content["machine"])
    parts = by_part(content)
    assert list(parts) == list(bench_gpu.PARTS)
    skipped = {"l2", "peer-decode", "peer-prefill", "transformers"}
    for name, results in parts.items():
        assert {result["status"] for result in results} == {"skipped" if name in skipped else "ok"}, name
    figures = {name: results[0]["figures"] for name, results in parts.items()}
    assert {"us", "GB/s", "% of the probe", "target %", "apart from v2"} == set(figures["decode"])
    assert {"tuned paged us", "tuned contiguous us", "tuned penalty %", "v2 paged us", "v2 contiguous us", "v2 penalty %"} < set(figures["paging"])
    assert {"step ms", "floor ms", "% of the floor's speed", "decode tokens/s"} <= set(figures["large"])
    assert figures["steps"]["launches"] == 7 * random_model.TINY.num_layers + 2, "7 a layer, the embedding, the head"
    assert figures["steps"]["launches apart"] == 10 * random_model.TINY.num_layers + 3
    assert {"ours us", "apart us", "cuBLAS us", "faster"} < set(figures["skinny"])
    assert all(value > 0 for part in parts["probe"] for value in part["figures"].values())
    table = capsys.readouterr().out
    assert "the figures mean nothing" in table
    assert re.search(r"\d rows; an engine chooses [0124] of at most 4", table)


def test_every_check_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "HEADS", [(2, 2, 80, 16, 0), (2, 3, 64, 16, 0), (1, 3, 64, 8, 40)])
    assert gpu_check.main(["--device", "emu", "--tiny", "--only", "primitives,operations,graphs,engine", "--out", str(tmp_path)]) == 0
    parts = by_part(stored(tmp_path))
    assert {result["status"] for results in parts.values() for result in results} == {"ok"}
    assert len(parts["primitives"]) == 15
    assert {"paged_decode", "paged_prefill"} <= {kernel for r in parts["operations"] for kernel in r["figures"].get("kernels", "").split(", ")}
    assert all(result["figures"]["graphs"] >= 3 for result in parts["graphs"])


# ---- as on a GPU


@pytest.mark.usefixtures("gpu")
def test_measurements_over_cupys_calls(tmp_path: Path) -> None:
    assert bench_gpu.main(["--device", "cuda", "--tiny", "--only", GPU_PARTS, "--out", str(tmp_path)]) == 0
    content = stored(tmp_path)
    assert content["machine"]["GPU"] == "NVIDIA Fake"
    assert content["machine"]["CUDA"] == "runtime 12.9, driver's 12.8"
    assert {result["status"] for result in content["results"]} == {"ok"}
    (gemm,) = by_part(content)["gemm"]
    assert gemm["figures"]["us"] == pytest.approx(500)  # an event's half millisecond, and one product a replay


@pytest.mark.usefixtures("gpu")
def test_checks_over_cupys_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "TOLERANCES", {"float32": 1e-4})
    assert gpu_check.main(["--device", "cuda", "--tiny", "--only", "primitives,graphs", "--out", str(tmp_path)]) == 0
    assert {result["status"] for result in stored(tmp_path)["results"]} == {"ok"}


# ---- what is wrong is found


def check_statuses(part: str, tmp_path: Path) -> list[str]:
    assert gpu_check.main(["--device", "emu", "--tiny", "--only", part, "--out", str(tmp_path)]) == 1
    return [result["status"] for result in stored(tmp_path)["results"]]


def test_a_device_whose_kernels_differ_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = EmuDevice.launch

    def wrong(self: EmuDevice, launch: Launch) -> None:
        honest(self, launch)
        if self._mode == "fast":  # the device; the emulator beside it checks
            for argument in launch.arguments:
                if isinstance(argument, np.ndarray):
                    argument.reshape(-1).view(np.uint8)[0] ^= 1

    monkeypatch.setattr(EmuDevice, "launch", wrong)
    statuses = check_statuses("primitives", tmp_path)
    assert statuses.count("failed") >= 12
    assert len(statuses) == 15, "a failure stops nobody"


def test_a_graph_that_is_stale_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, played = EmuGraph.replay, []

    def stale(self: EmuGraph) -> None:
        played.append(self)
        if played.count(self) < 2:  # the second replay leaves the first one's results
            honest(self)

    monkeypatch.setattr(EmuGraph, "replay", stale)
    assert check_statuses("graphs", tmp_path) == ["failed"] * 3


OUT = {"merge_items": 4, "plain_prefill": 7}
"""Where among its arguments a kernel has its result."""


def test_a_kernel_that_is_a_little_off_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = EmuDevice.launch

    def off(self: EmuDevice, launch: Launch) -> None:
        honest(self, launch)
        if launch.variant.kernel in OUT:
            out = launch.arguments[OUT[launch.variant.kernel]]
            out[...] = out.astype(np.float32) * 1.05

    monkeypatch.setattr(EmuDevice, "launch", off)
    monkeypatch.setattr(attention, "HEADS", [(2, 3, 64, 16, 0)])
    statuses = check_statuses("operations", tmp_path)
    assert statuses.count("failed") == 6  # for every pair of types the attention; and there are kernels that no such heads take


# ---- the parts

SPECS = [spec for module in (primitives, bench) for spec in vars(module).values() if isinstance(spec, KernelSpec)]


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_the_scripts_own_kernels_compile_for_gpus(spec: KernelSpec, architecture: str) -> None:
    for variant in variants(spec):
        assert nvrtc.complaints(spec, nvrtc.compile_variant(variant, architecture)) == []


def test_a_run_keeps_to_its_budget_and_says_so() -> None:
    def listed() -> list[cases.Case]:
        runs = {"good": lambda: {"x": 1}, "bad": lambda: {"x": 1 // 0}, "none": skip, "late": late, "never": dict}
        return [cases.Case(name, run) for name, run in runs.items()]

    def skip() -> cases.Figures:
        raise cases.Skip("not here")

    def late() -> cases.Figures:
        budget._end = 0.0
        return {}

    budget = cases.Budget(100)
    results = cases.run_parts({"a": listed, "b": listed}, ["a", "b"], budget)
    assert [(r.part, r.status) for r in results] == [("a", "ok"), ("a", "failed"), ("a", "skipped"), ("a", "ok"), ("a", "cut"), ("b", "cut")]
    assert results[4].case == "1 of 5 cases"
    text = report.render("title", {"device": "d"}, results)
    assert "FAILED: ZeroDivisionError" in text
    assert "not run: the budget was spent" in text
    assert text.rstrip().endswith("2 ok, 1 failed, 1 skipped, 2 not run")


@pytest.mark.parametrize("script", [bench_gpu, gpu_check])
@pytest.mark.parametrize("argv", [["--only", "speed"], ["--device", "tpu"]])
def test_bad_usage_is_refused(script: Any, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        script.parse(argv)
    assert refusal.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("script", [bench_gpu, gpu_check])
def test_help_names_every_part(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        script.parse(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert all(name in told for name in (*script.PARTS, "--device", "--only", "--budget", "--out"))


def test_without_a_gpu_there_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cupy_device, "cupy", None)
    for script in (bench_gpu, gpu_check):
        assert script.main([]) == 1
        assert capsys.readouterr().err.startswith("error: no CuPy")


def test_random_tensors_are_the_same_in_any_pieces() -> None:
    tensor = random_model.RandomTensor("t", (3000, 1000), "bfloat16")
    whole = tensor.read()
    assert whole.shape == (3000, 1000)
    assert np.array_equal(np.concatenate([tensor.read(start, start + 700) for start in range(0, 3000, 700)]), whole)
    assert len(np.unique(whole.astype(np.float32)[:, :8], axis=0)) == 3000, "no row comes twice"
    assert float(whole.astype(np.float32).std()) == pytest.approx(1000**-0.5, rel=0.02)


def test_an_8b_step_reads_16_gigabytes_less_the_embedding() -> None:
    config = random_model.LLAMA_8B
    layer = 6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096
    assert random_model.weight_bytes(config) == 2 * (32 * layer + 128256 * 4096)
    assert config.kv_bytes_per_token("bfloat16") == 131072


def test_operations_of_causal_attention() -> None:
    assert prefill.operations(bench.Heads(2, 1, 64), 3, 4, 4) == 4 * 2 * 64 * 3 * (1 + 2 + 3 + 4)
    assert prefill.operations(bench.Heads(2, 1, 64), 1, 2, 10) == 4 * 2 * 64 * (9 + 10)


NEXT_AFTER_ONE = 1 + 2.0**-23


@pytest.mark.parametrize(("ours", "expected", "ulps"), [(1, 1, 0), (1, NEXT_AFTER_ONE, 1), (-1, 1, 0x7F000000), (0, 1e-40, 0), (-1e-45, 1e-45, 0), (np.nan, 1, 2**31)])
def test_distance_in_ulps(ours: float, expected: float, ulps: int) -> None:
    assert primitives.ulps_apart(np.array([ours], np.float32), np.array([expected], np.float32)) == ulps


def test_the_profilers_table_is_read() -> None:
    names = ",".join(f'"{name}"' for name in ("ID", *l2.METRICS))
    text = f'==PROF== Connected\n{names}\n"","%","Mbyte","Mbyte","us"\n"0","12.5","537","530","201"\n"1","3","537","536","190"\n'
    assert l2.parse(text) == [
        {"L2 hits %": "12.5 %", "read from L2": "537 Mbyte", "read from memory": "530 Mbyte", "time": "201 us"},
        {"L2 hits %": "3 %", "read from L2": "537 Mbyte", "read from memory": "536 Mbyte", "time": "190 us"},
    ]
    assert l2.parse("==ERROR== ERR_NVGPUCTRPERM") == []


def test_the_profilers_program_launches_every_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    honest = EmuDevice.launch
    monkeypatch.setattr(EmuDevice, "launch", lambda self, launch: (names.append(launch.variant.kernel), honest(self, launch))[1])
    l2.launch_all("emu")
    assert [name for name in names if name in ("paged_decode", "attention_partition")] == ["paged_decode"] * 2 + ["attention_partition"] * 2
