"""Traces: a workload as JSON lines, one request a line, so that one's own requests can be replayed.

    {"arrival": 0.25, "prompt": [12, 7, 9], "output": 40}
    {"arrival": 0.31, "prompt_tokens": 120, "output": 8, "session": "anna", "n": 2}

`prompt` holds token ids; `prompt_tokens` says only how many there are, and random ones are made. `arrival` is in seconds
and 0 where it is left out; `session`, `n` and `beams` are what TraceRequest says. A first line {"workload": NAME, "seed":
SEED} names the whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cupaged.errors import WorkloadError, shown
from cupaged.workloads.request import TraceRequest, Workload

_KEYS = ("arrival", "prompt", "prompt_tokens", "output", "session", "n", "beams")
_HEADING = ("workload", "seed", "max_len")
_MOST_TOKENS = 1 << 24


def write_jsonl(path: Path, workload: Workload) -> None:
    """Save a workload; `read_jsonl` gives an equal one."""
    heading = {"workload": workload.name, "seed": workload.seed, "max_len": workload.max_len}
    lines = [heading, *(_line(request) for request in workload.requests)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _line(request: TraceRequest) -> dict[str, Any]:
    line = {"arrival": request.arrival, "prompt": request.prompt.tolist(), "output": request.num_output}
    optional = {"session": (request.session, None), "n": (request.n, 1), "beams": (request.beams, 0)}
    return line | {name: value for name, (value, default) in optional.items() if value != default}


def read_jsonl(path: Path, vocab_size: int, seed: int = 0) -> Workload:
    """A workload from a file; `seed` makes the prompts that it gives by their length alone.

    Raises WorkloadError naming file and line for what is no request, or has a token outside the vocabulary.
    """
    rng = np.random.default_rng(seed)
    name, kept_seed, max_len = path.stem, seed, 0
    requests: list[TraceRequest] = []
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}: not a text in UTF-8: a trace is JSON lines") from error
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            value = _object(text)
            if "workload" in value and not requests:
                _known(value, _HEADING)
                name, kept_seed = str(value["workload"]), _whole(value, "seed", 0, 0)
                max_len = _whole(value, "max_len", 0, 0)
            else:
                requests.append(_request(value, vocab_size, rng))
        except WorkloadError as error:
            raise WorkloadError(f"{path}, line {number}: {error}") from None
    if not requests:
        raise WorkloadError(f"{path} holds no request")
    return Workload.of(name, kept_seed, requests, max_len)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"not JSON: {shown(text)}") from error
    if not isinstance(value, dict):
        raise WorkloadError(f"a request is a JSON object, not {shown(value)}")
    return value


def _known(value: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    for name in value:
        if name not in keys:
            raise WorkloadError(f"unknown key {shown(name)}; there are {', '.join(keys)}")


def _request(value: Mapping[str, Any], vocab_size: int, rng: np.random.Generator) -> TraceRequest:
    _known(value, _KEYS)
    if ("prompt" in value) == ("prompt_tokens" in value):
        raise WorkloadError("a request has either prompt (token ids) or prompt_tokens (how many)")
    prompt = value["prompt"] if "prompt" in value else rng.integers(0, vocab_size, _whole(value, "prompt_tokens", None, 1)).tolist()
    if not isinstance(prompt, list):
        raise WorkloadError(f"prompt is a list of token ids, not {shown(prompt)}")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise WorkloadError(f"the prompt holds {shown(token)}, which is no token id: those are 0 .. {vocab_size - 1}")
    arrival, session = value.get("arrival", 0.0), value.get("session")
    if isinstance(arrival, bool) or not isinstance(arrival, (int, float)):
        raise WorkloadError(f"arrival is a number of seconds, not {shown(arrival)}")
    if session is not None and not isinstance(session, str):
        raise WorkloadError(f"session is a text, not {shown(session)}")
    return TraceRequest(
        float(arrival), np.array(prompt, np.int32), _whole(value, "output", None, 1), session, _whole(value, "n", 1, 1), _whole(value, "beams", 0, 0)
    )


def _whole(value: Mapping[str, Any], name: str, default: int | None, least: int) -> int:
    found = value.get(name, default)
    if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= _MOST_TOKENS:
        raise WorkloadError(f"{name} is a whole number from {least} on, not {'missing' if found is None else shown(found)}")
    return found
