"""Measure the CPU engine against its own floor and, with --peer, against other engines in the same run.

    python scripts/bench_cpu.py
    python scripts/bench_cpu.py --peer all --peer-python transformers=/venvs/hf/bin/python --peer-python vllm=/venvs/vllm/bin/python

workload  64 heavy-tailed requests, all there at the start, greedy; a process that has computed nothing before
stream    one request: 128 tokens of prompt, 128 generated
prefill   one prompt of 1,024 tokens
host      a step of 64 sequences: the share that is not the model's arithmetic
startup   from `cupaged generate` to the end of its first token: with everything cached, and with no compiled kernels

Every measurement is a fresh process, engines take turns (A B A B), and ratios are between medians. docs/performance.md
says how to install the peers and what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_machine
import bench_report

from cupaged.folders import cache_dir

SCRIPTS = Path(__file__).resolve().parent
WORKLOAD = SCRIPTS.parent / "tests" / "golden" / "workload.json"
OURS = "cupaged"
PEERS = ("transformers", "vllm")
MEASUREMENTS = ("workload", "stream", "prefill", "host", "startup")
LIMIT_SECONDS = 3600

Figures = dict[str, Any]


class MeasurementError(Exception):
    """A measured process failed; its last line of stderr."""


@dataclass(frozen=True)
class Engine:
    name: str
    python: str
    model: str

    def measure(self, job: Figures) -> Figures:
        """Run a job in a fresh process of this engine. Raises MeasurementError."""
        script = SCRIPTS / "peers" / f"{self.name}_peer.py"
        output = _run([self.python, str(script)], json.dumps({**job, "model": self.model}))
        lines = [line for line in output.splitlines() if line.startswith("{")]
        if not lines:
            raise MeasurementError("it printed no figures")
        figures: Figures = json.loads(lines[-1])
        return figures


def _run(command: list[str], text: str = "", **environment: str) -> str:
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, env={**os.environ, **environment}, timeout=LIMIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MeasurementError(str(error)) from error
    if done.returncode:
        raise MeasurementError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return done.stdout


# ---- jobs


def job(measurement: str, threads: int) -> Figures:
    """What an engine is asked to do. Prompts are the workload's, joined and cut where another length is wanted."""
    workload = json.loads(WORKLOAD.read_text(encoding="utf-8"))
    text = [token for request in workload for token in request["prompt_ids"]]

    def piece(start: int, length: int, new: int) -> Figures:
        return {"prompt_ids": text[start : start + length], "max_new_tokens": new}

    warm_up = [piece(4096, 32, 4)]
    requests = {
        "workload": (workload, []),
        "stream": ([piece(0, 128, 128)], warm_up),
        "prefill": ([piece(0, 1024, 1)], warm_up),
        "host": ([piece(64 * i, 64, 64) for i in range(64)], warm_up),
    }[measurement]
    return {"measurement": measurement, "threads": threads, "requests": requests[0], "warm_up": requests[1]}


def startup(model: str, threads: int) -> Figures:
    """Seconds of a whole `cupaged generate` of one token, first with no compiled kernel, then with everything cached."""
    command = [sys.executable, "-m", "cupaged", "generate", "The capital of France is", "--model", model]
    command += ["--max-tokens", "1", "--temperature", "0", "--threads", str(threads)]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "models").symlink_to(cache_dir() / "models")
        return {name: _seconds(lambda: _run(command, CUPAGED_CACHE=folder)) for name in ("first_run", "cached")}


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


# ---- the run


def measure(arguments: argparse.Namespace, engines: list[Engine]) -> Figures:
    """Raw figures by measurement and engine, one entry a repetition; an engine that fails is told and left out."""
    results: Figures = {}
    for measurement in arguments.only:
        results[measurement] = {}
        taking_part = engines if measurement in ("workload", "stream", "prefill") else engines[:1]
        for repetition in range(arguments.repeat):
            for engine in taking_part:
                tell(f"{measurement}, {engine.name}, {repetition + 1} of {arguments.repeat}")
                disturbance = bench_machine.Disturbance()
                try:
                    if measurement == "startup":
                        figures = startup(arguments.model, arguments.threads)
                    else:
                        figures = engine.measure(job(measurement, arguments.threads))
                except MeasurementError as error:
                    if engine.name == OURS:
                        raise
                    tell(f"{engine.name} left out: {error}")
                    taking_part = [other for other in taking_part if other is not engine]
                else:
                    figures["others"] = disturbance.share()
                    results[measurement].setdefault(engine.name, []).append(figures)
    return results


def tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def peers(arguments: argparse.Namespace, folder: Path) -> list[Engine]:
    """The peers asked for, with the model where torch engines can read it: a folder as it is, anything else exported."""
    names = [name for name in PEERS if {name, "all"} & set(arguments.peer)]
    if not names:
        return []
    model = arguments.model
    if not Path(model).is_dir():
        tell("writing the model as float32 for the peers")
        model = str(folder / "model")
        _run([sys.executable, str(SCRIPTS / "export_hf.py"), arguments.model, model])
    pythons: dict[str, str] = {}
    for given in arguments.peer_python:
        name, _, python = given.rpartition("=")
        pythons[name] = python
    default = pythons.get("", sys.executable)
    return [Engine(name, pythons.get(name, default), model) for name in names]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whatever cupaged takes (default %(default)s)")
    parser.add_argument("--only", default=",".join(MEASUREMENTS), help="comma-separated: %(default)s")
    parser.add_argument("--threads", type=int, default=bench_machine.usable_cores(), help="default: the cores there are")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="fresh processes a figure (default %(default)s)")
    parser.add_argument("--peer", action="append", choices=(*PEERS, "all"), default=[], help="also measure it; may be repeated")
    parser.add_argument("--peer-python", action="append", default=[], metavar="[PEER=]PYTHON", help="the Python with that peer (or all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw figures there")
    arguments = parser.parse_args(argv)
    arguments.only = arguments.only.split(",")
    for name in arguments.only:
        if name not in MEASUREMENTS:
            parser.error(f"no measurement {name!r}; there are {', '.join(MEASUREMENTS)}")
    if arguments.threads < 1 or arguments.repeat < 1:
        parser.error("--threads and --repeat are at least 1")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    machine = {**bench_machine.describe(), "threads": str(arguments.threads), "command": " ".join(["python", *sys.argv])}
    with tempfile.TemporaryDirectory() as folder:
        try:
            engines = [Engine(OURS, sys.executable, arguments.model), *peers(arguments, Path(folder))]
            results = measure(arguments, engines)
        except MeasurementError as error:
            tell(f"error: {error}")
            return 1
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine, "results": results}), encoding="utf-8")
    print(bench_report.render(machine, results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
