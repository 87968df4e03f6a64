"""Choosing tokens on the CPU, to be called as `backends.sampling` is: by a crew of two."""

from __future__ import annotations

import functools
from typing import Any

from cupaged.backends import cpu_sampling
from cupaged.backends.cpu_threads import Crew


@functools.cache
def crew() -> Crew:
    return Crew(2)


def sample(*arguments: Any) -> Any:
    logits, batch, counts = arguments
    return cpu_sampling.Sampler(crew(), counts).sample(logits, batch)


def token_logprobs(*arguments: Any) -> Any:
    return cpu_sampling.token_logprobs(*arguments, crew())


def beam_candidates(*arguments: Any) -> Any:
    return cpu_sampling.beam_candidates(*arguments, crew())
