"""What each measurement asks of an engine: requests, made of the workload's prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORKLOAD = Path(__file__).resolve().parent.parent / "tests" / "golden" / "workload.json"

Figures = dict[str, Any]

# measurement -> (of how many requests, prompt tokens, generated tokens)
_SHAPES = {
    "stream": (1, 128, 128),
    "stream16": (1, 128, 128),
    "ttft": (8, 128, 1),
    "prefill": (1, 1024, 1),
    "batch4": (4, 64, 128),
    "batch8": (8, 64, 128),
    "host": (64, 64, 64),
    "host1": (1, 64, 128),
}
_IN_TURN = ("ttft",)
"""Each request begins when the one before has ended; elsewhere all are there at the start."""

_SHORT = 16
"""Requests of the workload that `busy` takes."""


def job(measurement: str, threads: int) -> Figures:
    """Fields of peer_job.Job, without the model. Prompts are the workload's, joined and cut where another length is wanted."""
    workload = json.loads(WORKLOAD.read_text(encoding="utf-8"))
    text = [token for request in workload for token in request["prompt_ids"]]

    def piece(start: int, length: int, new: int) -> Figures:
        return {"prompt_ids": text[start : start + length], "max_new_tokens": new}

    if measurement in _SHAPES:
        count, length, new = _SHAPES[measurement]
        requests, warm_up = [piece(i * length, length, new) for i in range(count)], [piece(4096, 32, 4)]
    else:
        requests, warm_up = workload[:_SHORT] if measurement == "busy" else workload, []
    return {
        "measurement": measurement,
        "threads": threads,
        "requests": requests,
        "warm_up": warm_up,
        "in_turn": measurement in _IN_TURN,
    }
