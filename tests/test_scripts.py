"""The benchmark's arithmetic, and that its command line answers. Timing itself is not tested."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cupaged.config import ModelConfig

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS / "peers")]

import bench_cpu  # noqa: E402
import bench_figures  # noqa: E402
import bench_machine  # noqa: E402
import bench_report  # noqa: E402
import gemm_floor  # noqa: E402

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


def test_jobs_ask_for_what_the_measurement_says() -> None:
    stream = bench_cpu.job("stream", 2)["requests"]
    assert [(len(r["prompt_ids"]), r["max_new_tokens"]) for r in stream] == [(128, 128)]
    prefill = bench_cpu.job("prefill", 2)
    assert [(len(r["prompt_ids"]), r["max_new_tokens"]) for r in prefill["requests"]] == [(1024, 1)]
    assert prefill["warm_up"][0]["prompt_ids"][0] not in prefill["requests"][0]["prompt_ids"][:1]
    host = bench_cpu.job("host", 2)["requests"]
    assert len(host) == 64
    assert len({tuple(r["prompt_ids"]) for r in host}) == 64
    workload = bench_cpu.job("workload", 2)
    assert len(workload["requests"]) == 64
    assert workload["warm_up"] == []


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1.0), (50, 2.5), (95, 3.85), (100, 4.0)]
)
def test_percentile(percent: float, expected: float) -> None:
    assert bench_figures.percentile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(expected)
    assert bench_figures.percentile([7.0], percent) == 7.0


def test_percentile_of_nothing() -> None:
    with pytest.raises(ValueError, match="no values"):
        bench_figures.percentile([], 50)


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
    report = bench_report.render({"cores": "2"}, {"stream": {"cupaged": ours, "vllm": [figures(9.0, 9), figures(9.0, 9)]}})
    assert "cores: 2" in report
    assert "vllm: engine 1.0" in report
    ours_row, vllm_row = [[cell.strip() for cell in line.split("|")[1:-1]] for line in report.splitlines() if line.startswith(("| cupaged", "| vllm"))]
    assert ours_row == ["cupaged", "3.0 (2.0 - 4.0)", "1000 (1000 - 1000)", "500 (500 - 500)", "80 (80 - 80)", "100", "1.00"]
    assert vllm_row[-4:] == ["500 (500 - 500)", "-", "100", "3.00"]


def test_report_tells_how_quiet_the_machine_was() -> None:
    runs = {"startup": {"cupaged": [{"cached": 1.0, "first_run": 9.0, "others": share} for share in (0.01, 0.4)]}}
    assert "taken by other processes, at worst: 40 % of all cores" in bench_report.render({}, runs)


def test_own_children_are_no_disturbance() -> None:
    disturbance = bench_machine.Disturbance()
    subprocess.run([sys.executable, "-c", "sum(range(20_000_000))"], check=True)
    assert 0 <= disturbance.share() <= 1


def test_host_share_is_what_the_model_does_not_take() -> None:
    steps = [{"total": 0.1, "forward": 0.08, "head": 0.015, "sampling": 0.002, "schedule": 0.001, "apply": 0.001}] * 3
    shares = bench_report.host_shares({"host_steps": steps})
    assert shares["share"] == pytest.approx(5.0)
    assert shares["total"] == pytest.approx(100.0)
