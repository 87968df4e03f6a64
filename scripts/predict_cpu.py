#!/usr/bin/env python
"""Is the simulator right about this computer? A prediction of the golden workload, beside the run itself.

    python scripts/predict_cpu.py                     # takes about a minute; exit status 1 if it is off by more than 15 %
    python scripts/predict_cpu.py --requests 16       # the first requests only
    python scripts/predict_cpu.py --json figures.json

The cost of a step is fitted to another, shorter run first (cupaged/sim/calibrate.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

from cupaged import LLM
from cupaged.cli.simulate_text import comparison
from cupaged.hub import DEFAULT_MODEL
from cupaged.sim.calibrate import calibrate, compare
from cupaged.workloads.request import TraceRequest, Workload

WORKLOAD = Path(__file__).resolve().parent.parent / "tests" / "golden" / "workload.json"
TOLERANCE = 0.15


def golden(count: int | None) -> Workload:
    """The golden workload, or its first requests."""
    rows = json.loads(WORKLOAD.read_text(encoding="utf-8"))[:count]
    return Workload.of("golden", 0, (TraceRequest(0.0, np.array(row["prompt_ids"], np.int32), row["max_new_tokens"]) for row in rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="what to run (default: the built-in model)")
    parser.add_argument("--requests", type=int, help="how many of the 64 requests (default: all)")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    arguments = parser.parse_args()
    if arguments.requests is not None and arguments.requests < 1:
        parser.error("--requests must be at least 1")
    llm = LLM(arguments.model)
    cost = calibrate(llm.engine)
    found, _ = compare(llm.engine, cost, golden(arguments.requests))
    print(comparison(cost, found).text)
    if arguments.json:
        arguments.json.write_text(json.dumps(comparison(cost, found).values | {"comparison": asdict(found)}, indent=1), encoding="utf-8")
    return int(abs(found.error) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
