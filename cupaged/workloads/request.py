"""TraceRequest and Workload: requests as values, before any engine has seen them.

    workload   0.0 s ... 0.4 s ...... 1.1 s ...          arrivals, in seconds from the start
                 |         |             |
    requests   prompt    prompt        prompt             token ids
               output    output        output             how many tokens each will generate

Lengths of answers are part of a workload because a benchmark must ask the same of every engine: a model's end of text is
ignored, and an answer ends when it has its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from cupaged.errors import WorkloadError, shown

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request. Raises WorkloadError for one that nobody can serve.

    arrival     seconds after the workload's start
    prompt      int32 [tokens], token ids
    num_output  tokens that it will generate (each of its answers)
    session     requests of one session are turns of a conversation, or share a prefix; None: on its own
    n           samples of the prompt
    beams       width of a beam search instead of samples; 0: none
    """

    arrival: float
    prompt: IntArray
    num_output: int
    session: str | None = None
    n: int = 1
    beams: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.arrival) and self.arrival >= 0):
            raise WorkloadError(f"a request arrives at a number of seconds from 0 on, not at {shown(self.arrival)}")
        if not len(self.prompt):
            raise WorkloadError("a request's prompt is empty: give at least one token")
        if self.num_output < 1 or self.n < 1:
            raise WorkloadError(f"a request has at least 1 output token and 1 answer, not {self.num_output} and {self.n}")
        if self.beams < 0 or (self.beams and self.n > 1):
            raise WorkloadError(f"a request has samples or beams, not {self.n} samples and {self.beams} beams")

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Prompt and one answer."""
        return len(self.prompt) + self.num_output

    @property
    def width(self) -> int:
        """Sequences that it runs at once."""
        return self.beams or self.n


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival. The same name, seed and size give the same requests everywhere.

    max_len    what lengths were clipped to, in tokens: the longest prompt and output together; 0: nothing was clipped
    """

    name: str
    seed: int
    requests: tuple[TraceRequest, ...] = field(repr=False)
    max_len: int = 0

    @classmethod
    def of(cls, name: str, seed: int, requests: Iterable[TraceRequest], max_len: int = 0) -> Workload:
        """Sort the requests by arrival (equal arrivals keep their order). Raises WorkloadError where there is none."""
        ordered = tuple(sorted(requests, key=lambda request: request.arrival))
        if not ordered:
            raise WorkloadError(f"the workload {name!r} holds no request")
        return cls(name, seed, ordered, max_len)

    def arriving(self, times: Iterable[float]) -> Workload:
        """The same requests, in the same order, at other times (seconds, ascending)."""
        moved = (replace(request, arrival=float(time)) for request, time in zip(self.requests, times, strict=True))
        return Workload.of(self.name, self.seed, moved, self.max_len)

    def at_once(self) -> Workload:
        """The same requests, all there at the start."""
        return self.arriving([0.0] * len(self.requests))

    def describe(self) -> dict[str, str | int | float]:
        """What it is, for a result file: name, seed, totals and means (tokens), seconds from first to last arrival, and
        the mean arrival rate in requests a second (0: all at once)."""
        count = len(self.requests)
        prompt = sum(request.num_prompt for request in self.requests)
        output = sum(request.num_output * request.width for request in self.requests)
        seconds = self.requests[-1].arrival - self.requests[0].arrival
        return {
            "name": self.name,
            "seed": self.seed,
            "max_len": self.max_len,
            "requests": count,
            "prompt_tokens": prompt,
            "output_tokens": output,
            "mean_prompt": prompt / count,
            "mean_output": sum(request.num_output for request in self.requests) / count,
            "longest": max(request.num_tokens for request in self.requests),
            "sessions": len({request.session for request in self.requests if request.session is not None}),
            "seconds": seconds,
            "rate": (count - 1) / seconds if seconds else 0.0,
        }
