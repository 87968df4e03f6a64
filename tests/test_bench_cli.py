"""`cupaged bench` end to end on a tiny model: every benchmark predicts, runs and judges; what makes no sense is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import cupaged
from cupaged.bench import picture
from cupaged.bench.catalogue import BENCHMARKS
from cupaged.checkpoint.hf_config import model_config
from cupaged.cli.main import run
from tests.checkpoint_builders import CONFIG, random_tensors, write_folder
from tests.support.scripted_llm import ScriptedLLM

SMALL = {
    "throughput": ["--requests", "4"],
    "latency": ["--requests", "4", "--rate", "200"],
    "rates": ["--requests", "3", "--values", "1,4"],
    "fragmentation": ["--requests", "4"],
    "prefix": ["--requests", "2", "--values", "4,16"],
    "eviction": ["--requests", "4", "--values", "2"],
    "queue": ["--requests", "6", "--values", "2"],
    "block-size": ["--requests", "3", "--values", "4,16,64"],
    "chunked-prefill": ["--requests", "4", "--values", "8,64", "--rate", "200"],
    "preemption": ["--requests", "4", "--values", "4,8", "--swap-space", "1MB"],
    "overhead": ["--requests", "1", "--values", "4"],
}
POOL = ["--device", "reference", "--max-model-len", "64", "--num-blocks", "16", "--block-size", "4"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    return str(write_folder(folder, CONFIG, random_tensors(model_config(Path("config.json"), CONFIG, {}))))


def bench(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = run(["bench", *args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(autouse=True)
def no_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.mark.parametrize("name", SMALL)
def test_every_benchmark_predicts_runs_and_judges(name: str, tiny: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    code, out, err = bench(capsys, name, "--model", tiny, *POOL, *SMALL[name], "--seed", "5", "--json", str(path))
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0] == f"prediction   {BENCHMARKS[name].prediction}"
    assert lines[-1].startswith(("verdict      as predicted: ", "verdict      NOT as predicted: "))
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["benchmark"] == name
    assert result["holds"] == ("NOT" not in lines[-1])
    assert result["verdict"] in lines[-1]
    assert result["seed"] == 5
    assert result["machine"]["cores"] >= 1
    assert result["workloads"]
    for workload in result["workloads"]:
        assert len(workload["requests_in_order"]) == workload["requests"]
    for table in result["tables"]:
        assert table["rows"]
        assert {len(row) for row in table["rows"]} == {len(table["header"])}
    for plot in result["plots"]:
        assert {len(values) for values in plot["series"].values()} == {len(plot["x"])}


def test_the_list_of_small_runs_is_complete() -> None:
    assert {*SMALL, "beam"} == set(BENCHMARKS)


def test_beams_of_texts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cupaged, "LLM", ScriptedLLM)
    code, out, err = bench(capsys, "beam", "--requests", "2", "--values", "1,2", "--max-model-len", "256", "--num-blocks", "256", "--block-size", "4")
    assert code == 0, err
    assert "4 beams of 2,048 + 512 tokens save 75 % of the prompt's blocks" in out


def test_beams_need_a_tokenizer(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = bench(capsys, "beam", "--model", tiny, *POOL)
    assert code == 1
    assert err.splitlines()[-1] == f"error: beams are measured on texts, and {tiny} has no tokenizer"


def test_counted_benchmarks_give_the_same_for_a_seed(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    def told(seed: str) -> str:
        return bench(capsys, "eviction", "--model", tiny, *POOL, *SMALL["eviction"], "--seed", seed, "--workload", "chats")[1]

    assert told("1") == told("1") != told("2")


def test_one_can_bring_ones_own_trace(tiny: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt_tokens": 5, "output": 4}\n{"prompt": [3, 4], "output": 6, "arrival": 0.01}\n')
    result = tmp_path / "r.json"
    code, _, err = bench(capsys, "latency", "--model", tiny, *POOL, "--trace", str(path), "--json", str(result))
    assert code == 0, err
    (workload,) = json.loads(result.read_text())["workloads"]
    assert [row[1:3] for row in workload["requests_in_order"]] == [[5, 4], [2, 6]]


@pytest.mark.parametrize(
    ("args", "code", "line"),
    [
        (["throughput", "--requests", "0"], 1, "error: --requests must be above 0, not 0"),
        (["latency", "--rate", "0"], 1, "error: --rate must be above 0, not 0"),
        (["rates", "--values", "1,0"], 1, "error: --values are arrival rates over the measured capacity, each above 0"),
        (["throughput", "--num-blocks", "3"], 1, "error: the pool is smaller than a request: 3 blocks of 4 tokens against 64 tokens (--max-model-len): raise --num-blocks or lower --max-model-len"),
        (["block-size", "--values", "0"], 1, "error: --values takes whole numbers from 1 on here, not 0"),
        (["block-size", "--values", "300"], 2, "error: block_size must be between 1 and 256, not 300"),
        (["prefix", "--values", "100"], 1, "error: a request of 117 tokens is longer than the longest sequence (64 tokens)"),
        (["prefix", "--requests", "1"], 1, "error: sharing takes at least 2 requests: raise --requests"),
        (["latency", "--trace", "BAD"], 1, "error: BAD, line 1: not JSON: 'nonsense'"),
        (["latency", "--trace", "LONG"], 1, "error: a request of 90 tokens is longer than the longest sequence (64 tokens)"),
    ],
)
def test_what_makes_no_sense_is_one_line(args: list[str], code: int, line: str, tiny: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "BAD").write_text("nonsense\n")
    (tmp_path / "LONG").write_text('{"prompt_tokens": 80, "output": 10}\n')
    given = [str(tmp_path / arg) if arg in ("BAD", "LONG") else arg for arg in args]
    found, _, err = bench(capsys, given[0], "--model", tiny, *POOL, *given[1:])
    errors = [text for text in err.splitlines() if text.startswith("error: ")]
    assert (found, len(errors)) == (code, 1)
    assert errors[0].replace(str(tmp_path) + "/", "").startswith(line)


def test_wrong_usage_is_2(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    for args, says in ((["rates", "--values", "a"], "is not a list of numbers"), (["latency", "--json", "/absent/x.json"], "no such folder")):
        code, _, err = bench(capsys, args[0], "--model", tiny, *args[1:])
        assert code == 2
        assert says in err


def test_a_picture_that_cannot_be_made_is_told_before_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(picture.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    monkeypatch.setattr(cupaged, "LLM", lambda *args, **options: pytest.fail("loaded a model"))
    code, out, err = bench(capsys, "throughput", "--plot", str(tmp_path / "x.png"))
    assert (code, out) == (2, "")
    assert err.startswith("error: a picture needs matplotlib: pip install 'cupaged[plot]'")


def test_the_prediction_is_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise cupaged.CupagedError("no model today")

    monkeypatch.setattr(cupaged, "LLM", fail)
    code, out, err = bench(capsys, "overhead")
    assert (code, out) == (1, f"prediction   {BENCHMARKS['overhead'].prediction}\n")
    assert err == "error: no model today\n"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_help_tells_the_prediction_and_how_to_make_it_fail(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = bench(capsys, name, "--help")
    assert code == 0
    assert "Prediction:" in out
    if BENCHMARKS[name].contrary:
        assert f"cupaged bench {name} {' '.join(BENCHMARKS[name].contrary)}" in out
