"""Check that the engine computes right on the GPU of this machine. Nothing is timed here; scripts/bench_gpu.py does that.

    python scripts/gpu_check.py
    python scripts/gpu_check.py --only primitives,operations
    python scripts/gpu_check.py --device emu --tiny        (no GPU: proves the script)

primitives    instructions that the kernels stand on, the same text and inputs on the GPU and on the emulator (which wants a
              C++ compiler): shuffles, reductions, ldmatrix and cp.async bit for bit, tensor cores and functions closely
operations    every operation and attention kernel in float32, float16, bfloat16 and over an fp8 cache, against NumPy
graphs        replayed CUDA graphs against the same steps, their kernels launched one by one
engine        small models of every family, however their work is cut up: the reference's tokens
goldens       SmolLM2's stored reference answers in float32, their log-probabilities in 16 bits (if the model is there)
conformance   `cupaged kernels check` on the device, where this version has it

A part that fails is told and the next one runs; after --budget seconds what is left is not run, and told. Exit code 1 if
anything failed or was not run. The table goes to stdout, and with the JSON to scripts/results/ (emu: only with --out).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from gpu import goldens, graphs, machine, operations
from gpu.cases import Budget, Case, Failure, Figures, Parts, Skip, run_parts, tell
from gpu.primitives import Calibration
from gpu.report import render, save

from cupaged.backends.device import Device
from cupaged.errors import BackendError

RESULTS = Path(__file__).resolve().parent / "results"
PARTS = ("primitives", "operations", "graphs", "engine", "goldens", "conformance")
TINY_ANSWER = 40
"""Tokens, prompt and answer together, of the longest stored answer that the emulator is asked for."""


def parts_of(device: Device, arguments: argparse.Namespace, budget: Budget) -> Parts:
    name, longest = arguments.device, TINY_ANSWER if arguments.tiny else None
    return {
        "primitives": lambda: Calibration(device).cases(),
        "operations": partial(operations.cases, device),
        "graphs": partial(graphs.cases, device),
        "engine": partial(goldens.engines, name),
        "goldens": partial(goldens.references, name, arguments.model, longest),
        "conformance": partial(conformance, name, budget),
    }


def conformance(device: str, budget: Budget) -> Iterator[Case]:
    yield Case("cupaged kernels check", partial(_kernels_check, device, budget))


def _kernels_check(device: str, budget: Budget) -> Figures:
    command = [sys.executable, "-m", "cupaged", "kernels", "check", "--device", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, budget.left), check=False, cwd=machine.ROOT)
    except subprocess.TimeoutExpired as error:
        raise Failure("the budget was spent before it ended") from error
    lines = done.stdout.strip().splitlines()
    if done.returncode == 2:  # click's answer to a command or a device that it does not know
        raise Skip(f"this version cannot: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    if done.returncode:
        raise Failure("; ".join([*lines[-1:], *lines[:3]]) or done.stderr.strip()[-300:])
    return {"verdict": lines[-1] if lines else "all passed"}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or emu (default %(default)s)")
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated: %(default)s")
    parser.add_argument("--budget", type=float, default=420, metavar="SECONDS", help="default %(default)s")
    parser.add_argument("--tiny", action="store_true", help="of the stored answers only the shortest, for the emulator")
    parser.add_argument("--model", default="", help="the SmolLM2 file of the goldens (default: what `cupaged pull` put in the cache)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the results go (default: scripts/results on a GPU)")
    arguments = parser.parse_args(argv)
    arguments.only = arguments.only.split(",")
    for name in arguments.only:
        if name not in PARTS:
            parser.error(f"no part {name!r}; there are {', '.join(PARTS)}")
    if arguments.device.partition(":")[0] not in ("cuda", "emu"):
        parser.error(f"no device {arguments.device!r}; there are cuda, cuda:1 and emu")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    budget = Budget(arguments.budget)
    try:
        device = machine.open_device(arguments.device)
    except BackendError as error:
        tell(f"error: {error}")
        return 1
    facts = machine.describe(device)
    results = run_parts(parts_of(device, arguments, budget), arguments.only, budget)
    text = render("gpu_check", facts, results)
    print(text)
    out = arguments.out or (RESULTS if device.name == "cuda" else None)
    if out is not None:
        tell(f"results: {save(out, 'gpu_check', facts, results, text)}")
    return 1 if any(result.status in ("failed", "cut") for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
