"""The benchmark's arithmetic, and that its command line answers. Timing itself is not tested."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from gguf import GGMLQuantizationType

from cupaged.checkpoint import open_checkpoint
from cupaged.config import ModelConfig
from tests import checkpoint_builders
from tests.checkpoint_builders import random_tensors, write_folder, write_gguf

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS / "peers")]

import bench_cpu  # noqa: E402
import bench_engines  # noqa: E402
import bench_figures  # noqa: E402
import bench_jobs  # noqa: E402
import bench_machine  # noqa: E402
import bench_report  # noqa: E402
import busy_core  # noqa: E402
import export_f16  # noqa: E402
import gemm_floor  # noqa: E402
import peer_job  # noqa: E402
import read_bandwidth  # noqa: E402

CONFIG = ModelConfig("llama", 100, 16, 24, 3, 4, 2, 8, 64)
SHAPES = gemm_floor.Shapes.of(CONFIG)


def test_help_names_every_measurement() -> None:
    done = subprocess.run([sys.executable, str(SCRIPTS / "bench_cpu.py"), "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    for name in (*bench_cpu.MEASUREMENTS, "--peer-python", "--json", "--repeat"):
        assert name in done.stdout


@pytest.mark.parametrize("argv", [["--only", "speed"], ["--threads", "0"], ["--peer", "other"]])
def test_bad_usage_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        bench_cpu.parse(argv)
    assert refusal.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("measurement", "count", "prompt", "new"),
    [("stream", 1, 128, 128), ("stream16", 1, 128, 128), ("ttft", 8, 128, 1), ("prefill", 1, 1024, 1), ("batch4", 4, 64, 128), ("batch8", 8, 64, 128), ("host", 64, 64, 64)],
)
def test_jobs_ask_for_what_the_measurement_says(measurement: str, count: int, prompt: int, new: int) -> None:
    job = bench_jobs.job(measurement, 2)
    assert [(len(r["prompt_ids"]), r["max_new_tokens"]) for r in job["requests"]] == [(prompt, new)] * count
    first = [tuple(request["prompt_ids"][:4]) for request in (*job["requests"], *job["warm_up"])]
    assert len(set(first)) == count + 1  # nothing to find in a prefix cache
    assert job["in_turn"] == (measurement == "ttft")


def test_the_workload_runs_cold_and_as_it_is_and_busy_runs_its_beginning() -> None:
    workload = bench_jobs.job("workload", 2)
    assert len(workload["requests"]) == 64
    assert workload["warm_up"] == []
    assert bench_jobs.job("busy", 2) == workload | {"measurement": "busy", "requests": workload["requests"][:16]}


def test_every_measurement_has_a_job_and_a_table() -> None:
    for name in bench_cpu.MEASUREMENTS:
        assert name in bench_report._SECTIONS
        assert name == "startup" or peer_job.Job(**bench_jobs.job(name, 1), model="m").threads == 1


def test_requests_in_turn_have_clocks_of_their_own() -> None:
    asked: list[list[int]] = []

    def generate(requests: list[peer_job.Request]) -> peer_job.Answers:
        asked.append([r.prompt_ids[0] for r in requests])
        return peer_job.Answers([[r.prompt_ids[0]] for r in requests], [0.5] * len(requests), 1.5)

    requests = [peer_job.Request([7], 1), peer_job.Request([8, 8], 3)]
    fields: dict[str, Any] = {"measurement": "m", "model": "m", "threads": 1, "requests": requests, "warm_up": []}
    together, in_turn = peer_job.Job(**fields, in_turn=False), peer_job.Job(**fields, in_turn=True)
    assert (together.at_once, in_turn.at_once, in_turn.longest) == (2, 1, 5)
    assert peer_job.answer(together, generate).seconds == 1.5
    assert peer_job.answer(in_turn, generate) == peer_job.Answers([[7], [8]], [0.5, 0.5], 3.0)
    assert asked == [[7, 8], [7], [8]]


# ---- engines


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    """A model in Q4_1 whose vectors are float32."""
    config = open_checkpoint(write_folder(tmp_path / "folder", checkpoint_builders.CONFIG, {})).config
    tensors = random_tensors(config)
    return write_gguf(tmp_path / "model.gguf", config, tensors, GGMLQuantizationType.Q4_1, {"general.name": "small", "tokenizer.ggml.tokens": ["a", "b"]})


def test_float16_export_keeps_everything_but_the_width(gguf_file: Path, tmp_path: Path) -> None:
    export_f16.export(str(gguf_file), tmp_path / "narrow.gguf")
    before, after = open_checkpoint(gguf_file), open_checkpoint(tmp_path / "narrow.gguf")
    assert after.config == before.config
    assert {**after.metadata, "general.file_type": 1} == {**before.metadata, "general.file_type": 1}
    assert set(after.tensors) == set(before.tensors)
    for name, tensor in after.tensors.items():
        assert tensor.storage == ("F16" if len(tensor.shape) > 1 else "F32")
        assert (tensor.read() == before.tensors[name].read().astype(np.float16 if len(tensor.shape) > 1 else np.float32)).all()


def test_float16_export_refuses_what_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tensor big holds numbers too large for float16"):
        export_f16.narrow("big", np.full((2, 2), 1e6, np.float32))
    with pytest.raises(ValueError, match="is not a GGUF file"):
        export_f16.export(str(tmp_path), tmp_path / "narrow.gguf")


def test_each_engine_gets_the_model_it_can_read(gguf_file: Path, tmp_path: Path) -> None:
    found = bench_engines.engines(str(gguf_file), ["vllm", "llama.cpp"], ["vllm=/v", "/any"], tmp_path, float16=True)
    assert [(e.label, Path(e.model).name) for e in found] == [
        ("cupaged", "model.gguf"), ("vllm", "float32"), ("llama.cpp", "model.gguf"),
        ("cupaged float16", "float16.gguf"), ("llama.cpp float16", "float16.gguf"),
    ]  # fmt: skip
    assert [e.python for e in found[1:3]] == ["/v", "/any"]
    assert (tmp_path / "float32" / "model.safetensors").is_file()
    assert bench_engines.engines(str(gguf_file), [], [], tmp_path, float16=False) == found[:1]


def test_a_folder_is_read_as_it_is_but_not_by_llama_cpp(tmp_path: Path) -> None:
    assert [e.model for e in bench_engines.engines(str(tmp_path), ["vllm"], [], tmp_path, float16=True)] == [str(tmp_path)] * 2
    with pytest.raises(bench_engines.MeasurementError, match=r"llama\.cpp needs a GGUF file"):
        bench_engines.engines(str(tmp_path), ["llama.cpp"], [], tmp_path, float16=True)


def test_engines_that_take_part() -> None:
    stored, narrow, peer = (bench_engines.Engine(*fields) for fields in (("cupaged", "p", "m"), ("cupaged", "p", "m", "float16"), ("llama.cpp", "p", "m")))
    asked = {name: [bench_cpu._takes_part(e, name) for e in (stored, narrow, peer)] for name in ("stream", "stream16", "ttft", "host")}
    assert asked == {"stream": [True, False, True], "stream16": [False, True, False], "ttft": [True, True, True], "host": [True, False, False]}


def test_every_peer_has_a_script() -> None:
    for name in (bench_engines.OURS, *bench_engines.PEERS):
        assert (SCRIPTS / "peers" / f"{name.replace('.', '')}_peer.py").is_file()


def test_a_failed_process_is_its_last_line() -> None:
    with pytest.raises(bench_engines.MeasurementError, match=r"^ValueError: no$"):
        bench_engines.run([sys.executable, "-c", "raise ValueError('no')"])
    with pytest.raises(bench_engines.MeasurementError, match="no figures"):
        bench_engines.figures_of("loading\n")
    assert bench_engines.figures_of('{"a": 1}\nnoise\n{"a": 2}\n') == {"a": 2}


# ---- the machine


def test_a_busy_core_is_busy_until_the_block_ends() -> None:
    with busy_core.BusyCore() as core:
        process = psutil.Process(core._process.pid)
        before = process.cpu_times().user
        deadline = time.monotonic() + 20
        while process.cpu_times().user < before + 0.05:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if hasattr(os, "sched_getaffinity"):
            assert os.sched_getaffinity(process.pid) == {min(os.sched_getaffinity(0))}
    assert not process.is_running()


def test_read_bandwidth_counts_the_bytes_of_all_threads() -> None:
    assert read_bandwidth.read(np.array([5, 6, 0], np.int64)) == 3
    assert 1e7 < read_bandwidth.bandwidth(2, array_bytes=1 << 20, passes=3) < 1e13


# ---- arithmetic


def test_ratio_is_between_medians() -> None:
    assert bench_figures.ratio_of_medians([10.0, 30.0, 20.0], [1.0, 5.0, 100.0]) == 4.0


def test_agreement_counts_up_to_the_first_difference() -> None:
    assert bench_figures.agreement([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == pytest.approx(4 / 6)


def test_shapes_are_the_fused_matrices_of_a_layer() -> None:
    assert SHAPES.layer == ((64, 16), (16, 32), (48, 16), (16, 24))
    assert SHAPES.head == (100, 16)
    assert SHAPES.num_layers == 3


def test_floor_adds_layers_and_the_head_of_sampling_steps() -> None:
    costs = gemm_floor.Costs(layer={512: 0.5, 64: 0.1}, head={64: 0.03, 2: 0.01})
    assert gemm_floor.floor_seconds([(512, 0), (512, 2), (64, 64)], costs, 3) == pytest.approx(1.5 + 1.51 + 0.33)


def test_speed_counts_two_operations_a_weight() -> None:
    weights = 64 * 16 + 16 * 32 + 48 * 16 + 16 * 24
    assert gemm_floor.gflops(SHAPES, 10, 1e-9) == pytest.approx(20 * weights)


def test_measured_costs_cover_every_row_count_and_grow() -> None:
    costs = gemm_floor.measure(SHAPES, {1, 4096}, {1, 3})
    assert set(costs.layer) == {1, 4096}
    assert set(costs.head) == {1, 3}
    assert 0 < costs.layer[1] < costs.layer[4096]


def figures(seconds: float, tokens: int) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "token_ids": [list(range(tokens))],
        "first_token": [1.0],
        "prompt_tokens": 128,
        "peak_bytes": 5e8,
        "versions": {"engine": "1.0"},
    }


def test_report_compares_medians() -> None:
    ours = [{**figures(5.0, 9), "floor_seconds": 4.0}, {**figures(3.0, 9), "floor_seconds": 2.4}]
    report = bench_report.render({"cores": "2"}, {"stream": {"cupaged": ours, "vllm": [{**figures(9.0, 9), "peak_bytes": 1e9}] * 2}})
    assert "cores: 2" in report
    assert "vllm: engine 1.0" in report
    ours_row, vllm_row = [[cell.strip() for cell in line.split("|")[1:-1]] for line in report.splitlines() if line.startswith(("| cupaged", "| vllm"))]
    assert ours_row == ["cupaged", "3.0 (2.0 - 4.0)", "1000 (1000 - 1000)", "500 (500 - 500)", "80 (80 - 80)", "100", "1.00", "1.00"]
    assert vllm_row[-5:] == ["1000 (1000 - 1000)", "-", "100", "3.00", "0.50"]


def rows(report: str) -> dict[str, dict[str, str]]:
    """Engine -> column -> cell."""
    header, _, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in report.splitlines() if line.startswith("|")]
    return {line[0]: dict(zip(header, line, strict=True)) for line in lines}


def test_sixteen_bit_streams_are_shares_of_the_bandwidth() -> None:
    """8 tokens in 4 s of 3 GB each are 6 GB/s."""
    ours = {**figures(5.0, 9), "bytes_per_token": 3e9, "read_bandwidth": 8e9}
    table = rows(bench_report.render({}, {"stream16": {"cupaged float16": [ours], "llama.cpp float16": [{**figures(9.0, 9), "read_bandwidth": 4e9}]}}))
    assert [table["cupaged float16"][name] for name in ("decode tokens/s", "GB/s read", "memory's GB/s", "% of that")] == ["2.0", "6", "8", "75"]
    assert [table["llama.cpp float16"][name] for name in ("decode tokens/s", "% of that", "cupaged is x faster")] == ["1.0", "75", "2.00"]


def test_first_tokens_are_compared_by_their_median() -> None:
    ours, theirs = ({**figures(5.0, 1), "token_ids": [[1]] * 3, "first_token": times} for times in ([0.1, 0.9, 0.2], [0.5, 0.5, 0.5]))
    table = rows(bench_report.render({}, {"ttft": {"cupaged": [ours], "vllm": [theirs]}}))
    assert [table["cupaged"]["first token ms"], table["vllm"]["first token ms"], table["vllm"]["cupaged is x faster"]] == ["200", "500", "2.50"]


def test_a_batch_decodes_from_when_each_has_its_first_token() -> None:
    assert bench_report.batch_speed({"seconds": 5.0, "first_token": [0.5, 1.0], "token_ids": [[1] * 9, [2] * 5]}) == 3.0


def test_a_busy_machine_is_compared_with_the_idle_one() -> None:
    runs = [{"idle": figures(2.0, 8), "busy": figures(4.0, 8)}, {"idle": figures(4.0, 8), "busy": figures(8.0, 8)}]
    assert rows(bench_report.render({}, {"busy": {"cupaged": runs}}))["cupaged"]["% of the idle machine's"] == "50"


def test_report_tells_how_quiet_the_machine_was() -> None:
    runs = {"startup": {"cupaged": [{"cached": 1.0, "first_run": 9.0, "others": share} for share in (0.01, 0.4)]}}
    assert "taken by other processes, at worst: 40 % of all cores" in bench_report.render({}, runs)


@pytest.mark.parametrize("who", ["RUSAGE_SELF", "RUSAGE_CHILDREN"])
@pytest.mark.parametrize(("ours", "share"), [(0.0, 0.75), (2.0, 0.25), (3.0, 0.0)])
def test_own_work_is_no_disturbance(ours: float, share: float, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 s of one core, of which all processes took 3, and this one or its children so many of them, half in the system."""
    clock, busy, children = [100.0, 104.0], [1000, 1300], [5.0, 5.0 + ours / 2]
    monkeypatch.setattr(bench_machine.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(bench_machine.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(bench_machine.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(bench_machine.Path, "read_text", lambda path, **options: f"cpu  {busy[0] - 60} 10 20 7777 8888 30 0 0\ncpu0 1\n")
    used = {getattr(resource, who): children}
    monkeypatch.setattr(bench_machine.resource, "getrusage", lambda asked: SimpleNamespace(**dict.fromkeys(("ru_utime", "ru_stime"), used.get(asked, [0.0])[0])))
    disturbance = bench_machine.Disturbance()
    for values in (clock, busy, children):
        del values[0]
    assert disturbance.share() == pytest.approx(share)


def test_host_share_is_what_the_model_does_not_take() -> None:
    parts = {"schedule": 0.001, "batch": 0.0005, "apply": 0.001, "outputs": 0.0005}
    shares = bench_report.host_shares([{"total": 0.1, "model": 0.095, **parts}] * 3)
    assert shares["share"] == pytest.approx(5.0)
    assert shares["total"] == pytest.approx(100.0)
    assert shares["host"] == pytest.approx(5.0)
    assert shares["outputs"] == pytest.approx(0.5)
