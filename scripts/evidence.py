"""Run the claims and write docs/evidence.md.

    scripts/reproduce                            everything, then the document
    scripts/reproduce --only waste,prefix        some claims, then the document
    scripts/reproduce --only none                the document alone, from what was run before

Every run leaves a JSON file in --results; the document is made from those. Each run is a process of its own or a
simulation in this one; runs that are timed may be put under another command (--under "taskset -c 0,1").
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import evidence_document
from bench_machine import Disturbance
from evidence_claims import CLAIMS, Claim, Trial

from cupaged.bench.report import machine

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 900


class TrialError(Exception):
    """A run failed; its last line of stderr."""


def run(claim: Claim, trial: Trial, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a trial found, with the machine that it was found on. Raises TrialError."""
    disturbance = Disturbance()
    if trial.simulation is not None:
        report = trial.simulation().as_object()
        return {**report, "machine": {**machine(), "others": round(disturbance.share(), 3)}}
    path = arguments.results / f"{claim.name}.partial"
    command = [sys.executable, "-m", "cupaged", "bench", *trial.bench, "--json", str(path)]
    command += ["--model", arguments.model] if arguments.model else []
    under = shlex.split(arguments.under) if trial.timed else []
    done = subprocess.run([*under, *command], capture_output=True, text=True, cwd=ROOT, timeout=None if under else LIMIT_SECONDS)
    if done.returncode:
        raise TrialError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    found["machine"]["others"] = round(disturbance.share(), 3)
    path.unlink()
    return found


def run_claim(claim: Claim, arguments: argparse.Namespace) -> None:
    """Run a claim's trials and keep what they found."""
    for part, trial in (("trial", claim.trial), ("contrary", claim.contrary)):
        if trial is not None and part in arguments.parts:
            print(f"{claim.name}, {part}: {trial.prediction}", flush=True)
            found = run(claim, trial, arguments)
            print(f"{claim.name}, {part}: {found['verdict']}", flush=True)
            evidence_document.path(arguments.results, claim, part).write_text(json.dumps(found), encoding="utf-8")


def parse(argv: list[str] | None) -> argparse.Namespace:
    names = [claim.name for claim in CLAIMS]
    known = textwrap.fill(f"claims: {', '.join(names)}", 100, break_on_hyphens=False)
    parser = argparse.ArgumentParser(
        prog="scripts/reproduce", description=__doc__, epilog=known, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(names), metavar="CLAIMS", help="comma-separated, or none (default: all)")
    parser.add_argument("--parts", default="trial,contrary", help="the claims themselves, the settings that make them fail, or both (default %(default)s)")
    parser.add_argument("--model", default="", help="for benchmarks: whatever cupaged takes (default: its own)")
    parser.add_argument("--under", default="", metavar="COMMAND", help="put before every timed run")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "evidence", metavar="FOLDER", help="where results are kept (default build/evidence)")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "evidence.md", metavar="FILE", help="the document (default docs/evidence.md)")
    arguments = parser.parse_args(argv)
    arguments.only = [] if arguments.only == "none" else arguments.only.split(",")
    for name in arguments.only:
        if name not in names:
            parser.error(f"no claim {name!r}; there are {', '.join(names)}")
    if not set(arguments.parts.split(",")) <= {"trial", "contrary"}:
        parser.error("--parts takes trial, contrary or both")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    arguments.results.mkdir(parents=True, exist_ok=True)
    failed = 0
    for claim in CLAIMS:
        if claim.name in arguments.only:
            try:
                run_claim(claim, arguments)
            except (TrialError, OSError, subprocess.TimeoutExpired) as error:
                print(f"error: {claim.name}: {error}", file=sys.stderr)
                failed += 1
    arguments.output.write_text(evidence_document.render(CLAIMS, arguments.results), encoding="utf-8")
    print(f"wrote {arguments.output}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
