"""The engines that a benchmark compares, each with the model where it can read it, and a process for every measurement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupaged.hub import resolve_model

SCRIPTS = Path(__file__).resolve().parent
OURS, LLAMA_CPP = "cupaged", "llama.cpp"
PEERS = ("transformers", "vllm", LLAMA_CPP)
STORED, FLOAT16 = "stored", "float16"
"""Weights: the model's own, or all matrices as float16. Torch engines have the model's own in float32."""

LIMIT_SECONDS = 3600

Figures = dict[str, Any]


class MeasurementError(Exception):
    """A measured process failed; its last line of stderr."""


@dataclass(frozen=True)
class Engine:
    name: str
    python: str
    model: str
    weights: str = STORED

    @property
    def label(self) -> str:
        return self.name if self.weights == STORED else f"{self.name} {self.weights}"

    def measure(self, job: Figures) -> Figures:
        """Run a job in a fresh process of this engine. Raises MeasurementError."""
        script = SCRIPTS / "peers" / f"{self.name.replace('.', '')}_peer.py"
        return figures_of(run([self.python, str(script)], json.dumps({**job, "model": self.model})))


def run(command: list[str], text: str = "", **environment: str) -> str:
    """What a command printed, `text` being its input. Raises MeasurementError."""
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, env={**os.environ, **environment}, timeout=LIMIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MeasurementError(str(error)) from error
    if done.returncode:
        raise MeasurementError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return done.stdout


def figures_of(output: str) -> Figures:
    """The last JSON object that a process printed. Raises MeasurementError."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        raise MeasurementError("it printed no figures")
    figures: Figures = json.loads(lines[-1])
    return figures


def engines(model: str, names: Sequence[str], pythons: Sequence[str], folder: Path, *, float16: bool) -> list[Engine]:
    """cupaged first, then the peers asked for; what they need is written to `folder`.

    `pythons`: PEER=PYTHON, or PYTHON for those that are not named. Torch engines read a folder of float32 weights, into
    which everything but a folder is exported; llama.cpp reads a GGUF file. `float16`: a GGUF file is also exported as
    float16, and cupaged and llama.cpp are there a second time, with that. Raises MeasurementError.
    """
    given = {name: python for name, _, python in (each.rpartition("=") for each in pythons)}
    path = resolve_model(model)
    found = [Engine(OURS, sys.executable, model)]
    for name in names:
        python = given.get(name, given.get("", sys.executable))
        if name != LLAMA_CPP:
            found.append(Engine(name, python, _exported("export_hf.py", path, folder / "float32") if path.is_file() else str(path)))
        elif path.is_file():
            found.append(Engine(name, python, str(path)))
        else:
            raise MeasurementError(f"llama.cpp needs a GGUF file, and {model} is none")
    if float16 and path.suffix == ".gguf":
        narrow = _exported("export_f16.py", path, folder / "float16.gguf")
        found += [Engine(e.name, e.python, narrow, FLOAT16) for e in found if e.name in (OURS, LLAMA_CPP)]
    return found


def _exported(script: str, model: Path, target: Path) -> str:
    if not target.exists():
        run([sys.executable, str(SCRIPTS / script), str(model), str(target)])
    return str(target)
