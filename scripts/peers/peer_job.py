"""What bench_cpu.py and the engines it measures say to each other: a job as JSON on stdin, figures as JSON on stdout.

Standard library only, because each engine runs in a Python of its own.
"""

from __future__ import annotations

import json
import platform
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any


@dataclass(frozen=True)
class Request:
    """A prompt and exactly how many tokens to generate after it, greedily, whatever they are."""

    prompt_ids: list[int]
    max_new_tokens: int


@dataclass(frozen=True)
class Job:
    """`warm_up` are requests to run before the clock starts; they share no prefix with the measured ones.

    in_turn    each request begins when the one before has ended; else all are there at the start
    """

    measurement: str
    model: str
    threads: int
    requests: list[Request]
    warm_up: list[Request]
    in_turn: bool

    @property
    def at_once(self) -> int:
        """How many requests an engine has at a time, at most."""
        return 1 if self.in_turn else len(self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest request with its answer."""
        return max(len(r.prompt_ids) + r.max_new_tokens for r in (*self.requests, *self.warm_up))


def read_job() -> Job:
    fields = json.load(sys.stdin)
    for name in ("requests", "warm_up"):
        fields[name] = [Request(**request) for request in fields[name]]
    return Job(**fields)


def peak_memory() -> int:
    """The most bytes this process has held (resident)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else 1024 * peak  # the one counts bytes, the others kibibytes


def versions(*packages: str) -> dict[str, str]:
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}


@dataclass(frozen=True)
class Answers:
    """Token ids of each request in order, and when (seconds after the start) its first token came and all was done."""

    token_ids: list[list[int]]
    first_token: list[float]
    seconds: float


def answer(job: Job, generate: Callable[[list[Request]], Answers]) -> Answers:
    """Run the requests. The clock of one that waits for its turn starts when that comes."""
    if not job.in_turn:
        return generate(job.requests)
    each = [generate([request]) for request in job.requests]
    return Answers([one.token_ids[0] for one in each], [one.first_token[0] for one in each], sum(one.seconds for one in each))


def report(job: Job, answers: Answers, **more: Any) -> None:
    """Print the figures as the last line of stdout. Raises ValueError where the engine did another job."""
    for request, token_ids in zip(job.requests, answers.token_ids, strict=True):
        if len(token_ids) != request.max_new_tokens:
            raise ValueError(f"asked for {request.max_new_tokens} tokens, got {len(token_ids)}")
    figures = {
        "seconds": answers.seconds,
        "first_token": answers.first_token,
        "token_ids": answers.token_ids,
        "prompt_tokens": sum(len(request.prompt_ids) for request in job.requests),
        "peak_bytes": peak_memory(),
    }
    print(json.dumps(figures | more), flush=True)
