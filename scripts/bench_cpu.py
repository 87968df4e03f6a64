"""Measure the CPU engine against its own floor and, with --peer, against other engines in the same run.

    python scripts/bench_cpu.py
    python scripts/bench_cpu.py --peer all --peer-python vllm=/venvs/vllm/bin/python --peer-python llama.cpp=/venvs/llama/bin/python

workload  64 heavy-tailed requests, all there at the start, greedy; a process that has computed nothing before
stream    one request: 128 tokens of prompt, 128 generated
stream16  the same from float16 weights, and the share of the memory's read bandwidth that it reaches
ttft      first tokens of prompts of 128 tokens, one after the other
prefill   one prompt of 1,024 tokens
batch4    decoding 4 sequences together: prompts of 64 tokens, 128 generated
batch8    the same with 8
busy      16 requests of the workload, alone and beside another program that keeps one core busy
host      a step of 64 sequences: what is not the model's arithmetic, where each has an output at its end, and after every step
host1     the same of one sequence
startup   from `cupaged generate` to the end of its first token: with everything cached, and with no compiled kernels

Every measurement is a fresh process, engines take turns (A B A B), and ratios are between medians. docs/performance.md
says how to install the peers and what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_machine
import bench_report
from bench_engines import FLOAT16, OURS, PEERS, SCRIPTS, STORED, Engine, MeasurementError, engines, figures_of, run
from bench_jobs import job
from busy_core import BusyCore

from cupaged.folders import cache_dir

ALONE = ("host", "host1", "startup")
"""Measurements of cupaged only; in all others the peers take part."""

OTHER_WEIGHTS = {"stream16": (FLOAT16,), "ttft": (STORED, FLOAT16), "batch4": (STORED, FLOAT16), "batch8": (STORED, FLOAT16)}
"""Measurements that are not of the model's own weights alone."""

MEASUREMENTS = ("workload", "stream", "stream16", "ttft", "prefill", "batch4", "batch8", "busy", "host", "host1", "startup")

Figures = dict[str, Any]


def figures(measurement: str, engine: Engine, threads: int) -> Figures:
    """One measurement of one engine. Raises MeasurementError."""
    if measurement == "startup":
        return startup(engine.model, threads)
    wanted = job(measurement, threads)
    if measurement == "busy":
        idle = engine.measure(wanted)
        with BusyCore():
            return {"idle": idle, "busy": engine.measure(wanted)}
    if measurement == "stream16":
        before = read_bandwidth(threads)
        found = engine.measure(wanted)
        return found | {"read_bandwidth": (before + read_bandwidth(threads)) / 2}
    return engine.measure(wanted)


def read_bandwidth(threads: int) -> float:
    """Bytes a second, measured in a process of its own."""
    output = run([sys.executable, str(SCRIPTS / "read_bandwidth.py"), "--threads", str(threads)])
    return float(figures_of(output)["read_bandwidth"])


def startup(model: str, threads: int) -> Figures:
    """Seconds of a whole `cupaged generate` of one token, first with no compiled kernel, then with everything cached."""
    command = [sys.executable, "-m", "cupaged", "generate", "The capital of France is", "--model", model]
    command += ["--max-tokens", "1", "--temperature", "0", "--threads", str(threads)]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "models").symlink_to(cache_dir() / "models")
        return {name: _seconds(lambda: run(command, CUPAGED_CACHE=folder)) for name in ("first_run", "cached")}


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure(arguments: argparse.Namespace, contestants: list[Engine]) -> Figures:
    """Raw figures by measurement and engine, one entry a repetition; an engine that fails is told and left out."""
    results: Figures = {}
    for measurement in arguments.only:
        taking_part = [e for e in contestants if _takes_part(e, measurement)]
        if not taking_part:
            tell(f"{measurement} left out: it needs a GGUF file")
            continue
        results[measurement] = {}
        for repetition in range(arguments.repeat):
            for engine in list(taking_part):
                tell(f"{measurement}, {engine.label}, {repetition + 1} of {arguments.repeat}")
                disturbance = bench_machine.Disturbance()
                try:
                    found = figures(measurement, engine, arguments.threads)
                except MeasurementError as error:
                    if engine.name == OURS:
                        raise
                    tell(f"{engine.label} left out: {error}")
                    taking_part.remove(engine)
                else:
                    found["others"] = disturbance.share()
                    results[measurement].setdefault(engine.label, []).append(found)
    return results


def _takes_part(engine: Engine, measurement: str) -> bool:
    return engine.weights in OTHER_WEIGHTS.get(measurement, (STORED,)) and (engine.name == OURS or measurement not in ALONE)


def tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


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
    peers = [name for name in PEERS if {name, "all"} & set(arguments.peer)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            float16 = bool(OTHER_WEIGHTS.keys() & set(arguments.only))
            found = engines(arguments.model, peers, arguments.peer_python, Path(folder), float16=float16)
            results = measure(arguments, found)
        except MeasurementError as error:
            tell(f"error: {error}")
            return 1
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine, "results": results}), encoding="utf-8")
    print(bench_report.render(machine, results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
