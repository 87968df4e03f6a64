"""What `cupaged simulate` shows: each result as lines to read and as values for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, NamedTuple

from cupaged.sim import paper
from cupaged.sim.calibrate import Comparison, FittedCost
from cupaged.sim.replicas import FleetReport
from cupaged.sim.report import STATES, Report

NAMES = {state: state.replace("_", " ") for state in STATES} | {"external": "external or free"}


class Result(NamedTuple):
    text: str
    values: dict[str, Any]


def _lines(rows: list[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<15}{value}".rstrip() for name, value in rows)


def _percentiles(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {1e3 * value:,.1f}" for name, value in seconds.items()) + " ms"


def run(allocation: str, report: Report) -> Result:
    """One simulated run."""
    workload, latencies = report.workload, report.latencies()
    prompt, output = workload["mean_prompt"], workload["mean_output"]
    rows = [
        (allocation, f"{workload['requests']:,} {workload['name']} requests of {prompt:.1f} + {output:.1f} tokens in {report.seconds:,.1f} s, {report.steps:,} steps"),
        ("throughput", f"{report.requests_per_second:.2f} requests/s, {report.output_tokens_per_second:,.1f} output tokens/s"),
        ("mean batch", f"{report.mean_batch:.2f} requests"),
        ("memory", ", ".join(f"{NAMES[name]} {100 * share:.1f} %" for name, share in report.memory.items())),
        ("first token", _percentiles(latencies["first_token"])),
        *([("between tokens", _percentiles(latencies["inter_token"]))] if "inter_token" in latencies else []),
        ("per token", f"{latencies['normalised']['mean']:.4f} s of latency for each output token, on average"),
        ("preemptions", f"{report.preemptions:,}"),
        ("computed", f"{report.computed_tokens:,} tokens; {report.cached_tokens:,} prompt tokens were cached"),
        ("simulated in", f"{report.host_seconds:.1f} s of processor time"),
    ]
    return Result(_lines(rows) + "\n", {"allocation": allocation, "host_seconds": report.host_seconds} | report.values())


def fleet(report: FleetReport) -> Result:
    """Many replicas under one routing."""
    rows = [
        (report.routing, f"{report.replicas:,} replicas, {report.seconds:,.1f} s, {report.output_tokens_per_second:,.1f} output tokens/s"),
        ("cached", f"{100 * report.hit_rate:.1f} % of the prompt tokens; {report.computed_tokens:,} tokens computed"),
        ("first token", _percentiles(report.first_token)),
        ("request", _percentiles(report.request)),
        ("balance", f"the busiest replica had {report.worst_share:.2f} times the mean of requests"),
    ]
    return Result(_lines(rows) + "\n", report.values())


def paper_tables(waste: dict[str, dict[str, float]], batches: dict[str, dict[str, float]]) -> Result:
    """Simulated figures beside the PagedAttention paper's."""
    states = ("token_states", "reservation", "internal", "external")
    lines = ["OPT-13B, A100-40GB, ShareGPT, while requests wait for room: percent of the pool, ours (paper's)"]
    for name, row in waste.items():
        if not row:
            lines.append(f"  {name:<8}nobody had to wait: ask for more requests")
            continue
        cells = (f"{state.replace('_', ' ')} {row[state]:.1f} ({theirs:.1f})" for state, theirs in zip(states, paper.WASTE[name], strict=True))
        lines.append(f"  {name:<8}" + "  ".join(cells))
    for (dataset, rate), row in paper.BATCH.items():
        fitted = ": the constant is fitted on paged" if dataset == "sharegpt" else ""
        lines.append(f"mean batched requests, {dataset} at {rate:g} a second, ours (paper's){fitted}")
        lines += [f"  {name:<8}{batches[dataset][name]:.2f} ({theirs:.2f})" for name, theirs in row.items()]
    return Result("\n".join(lines), {"waste": waste, "batch": batches})


def comparison(cost: FittedCost, found: Comparison) -> Result:
    """A prediction beside the measurement."""
    parts = ", ".join(f"{name} {1e6 * value:.2f}" for name, value in asdict(cost).items())
    rows = [
        ("step", f"{parts} us"),
        ("predicted", f"{found.predicted:.1f} output tokens/s, {found.predicted_seconds:.2f} s"),
        ("measured", f"{found.measured:.1f} output tokens/s, {found.measured_seconds:.2f} s"),
        ("error", f"{100 * found.error:+.1f} % of throughput"),
    ]
    figures = {"predicted": found.predicted, "measured": found.measured, "error": found.error, "cost_seconds": asdict(cost)}
    return Result(_lines(rows), figures)
