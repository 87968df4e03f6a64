"""bench_cpu.py's raw figures as Markdown: one table a measurement, ratios between medians."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from bench_figures import agreement, ratio_of_medians, spread, table

from cupaged.workloads.metrics import percentile

OURS = "cupaged"
MEGABYTE = 1e6

Figures = dict[str, Any]
Runs = dict[str, list[Figures]]
"""Engine -> one Figures a repetition."""


def render(machine: dict[str, str], results: dict[str, Runs]) -> str:
    worst = max((figures.get("others", 0.0) for runs in results.values() for each in runs.values() for figures in each), default=0.0)
    facts = {**machine, "taken by other processes, at worst": f"{100 * worst:.0f} % of all cores", **_versions(results)}
    parts = ["\n".join(f"{name}: {value}" for name, value in facts.items())]
    for measurement, runs in results.items():
        parts.append(f"## {measurement}\n\n{_SECTIONS[measurement](runs)}")
    return "\n\n".join(parts) + "\n"


def _versions(results: dict[str, Runs]) -> dict[str, str]:
    """Engine -> the versions it ran with."""
    first = {name: runs[0] for measured in results.values() for name, runs in measured.items() if "versions" in runs[0]}
    return {name: ", ".join(f"{k} {v}" for k, v in figures["versions"].items()) for name, figures in first.items()}


# ---- one figure of one process


def output_speed(figures: Figures) -> float:
    """Generated tokens a second, over all requests."""
    return sum(map(len, figures["token_ids"])) / float(figures["seconds"])


def decode_speed(figures: Figures) -> float:
    """Tokens a second of one stream after its first token."""
    return (len(figures["token_ids"][0]) - 1) / float(figures["seconds"] - figures["first_token"][0])


def prompt_speed(figures: Figures) -> float:
    """Prompt tokens a second of one request, its first token included."""
    return float(figures["prompt_tokens"] / figures["first_token"][0])


def batch_speed(figures: Figures) -> float:
    """Tokens a second of all sequences together, from when each has its first one."""
    others = sum(len(token_ids) - 1 for token_ids in figures["token_ids"])
    return float(others / (figures["seconds"] - max(figures["first_token"])))


def first_token_ms(figures: Figures) -> float:
    return 1000 * statistics.fmean(figures["first_token"])


def floor_share(figures: Figures) -> float:
    """Percent of the time that the matrices alone would have taken."""
    return 100 * float(figures["floor_seconds"] / figures["seconds"])


# ---- tables


def _compare(runs: Runs, speed: Callable[[Figures], float], columns: dict[str, Callable[[Figures], float]], unit: str) -> str:
    """A row an engine; the first one is cupaged."""
    ours, rows = next(iter(runs.values())), []
    for name, figures in runs.items():
        speeds = [speed(one) for one in figures]
        peaks = [one["peak_bytes"] / MEGABYTE for one in figures]
        rows.append(
            [name, spread(speeds)]
            + [spread([column(one) for one in figures], 0) for column in columns.values()]
            + [spread(peaks, 0)]
            + [spread([floor_share(one) for one in figures], 0) if "floor_seconds" in figures[0] else "-"]
            + [f"{100 * agreement(ours[0]['token_ids'], figures[0]['token_ids']):.0f}"]
            + [f"{ratio_of_medians([speed(one) for one in ours], speeds):.2f}"]
            + [f"{ratio_of_medians([one['peak_bytes'] / MEGABYTE for one in ours], peaks):.2f}"]
        )
    header = ["engine", unit, *columns, "peak memory MB", "% of the time at the GEMM floor", "% same tokens", "cupaged is x faster", "and takes x the memory"]
    return table(header, rows)


def _workload(runs: Runs) -> str:
    columns: dict[str, Callable[[Figures], float]] = {
        "first token ms, mean": first_token_ms,
        "p50": lambda figures: 1000 * percentile(figures["first_token"], 50),
        "p95": lambda figures: 1000 * percentile(figures["first_token"], 95),
    }
    return _compare(runs, output_speed, columns, "output tokens/s")


def _stream(runs: Runs) -> str:
    return _compare(runs, decode_speed, {"first token ms": first_token_ms}, "decode tokens/s")


def _stream16(runs: Runs) -> str:
    """Every engine is taken to read what cupaged does; keys and values, of which others keep other widths, are a few per cent."""
    read = next(iter(runs.values()))[0]["bytes_per_token"]
    columns: dict[str, Callable[[Figures], float]] = {
        "GB/s read": lambda figures: decode_speed(figures) * read / 1e9,
        "memory's GB/s": lambda figures: float(figures["read_bandwidth"] / 1e9),
        "% of that": lambda figures: 100 * decode_speed(figures) * read / float(figures["read_bandwidth"]),
    }
    return _compare(runs, decode_speed, columns, "decode tokens/s")


def _first(runs: Runs) -> str:
    """Of several prompts the median; as a speed, so that ratios read as everywhere."""
    columns: dict[str, Callable[[Figures], float]] = {"first token ms": lambda figures: 1000 * statistics.median(figures["first_token"])}
    return _compare(runs, lambda figures: 1 / statistics.median(figures["first_token"]), columns, "prompts/s")


def _batch(runs: Runs) -> str:
    return _compare(runs, batch_speed, {}, "decode tokens/s")


def _busy(runs: Runs) -> str:
    rows = []
    for name, figures in runs.items():
        idle, busy = ([output_speed(one[state]) for one in figures] for state in ("idle", "busy"))
        rows.append([name, spread(idle), spread(busy), f"{100 * ratio_of_medians(busy, idle):.0f}"])
    return table(["engine", "output tokens/s", "with one core busy", "% of the idle machine's"], rows)


def _prefill(runs: Runs) -> str:
    return _compare(runs, prompt_speed, {}, "prompt tokens/s")


HOST_PARTS = ("schedule", "batch", "apply", "outputs")


def host_shares(steps: list[dict[str, float]]) -> dict[str, float]:
    """Of a median full step: milliseconds by part, in `host` of all but the model's arithmetic, and in `share` its percentage."""
    median = {name: 1000 * statistics.median(step[name] for step in steps) for name in ("total", "model", *HOST_PARTS)}
    host = 1000 * statistics.median(step["total"] - step["model"] for step in steps)
    share = 100 * statistics.median(1 - step["model"] / step["total"] for step in steps)
    return {**median, "host": host, "share": share}


def _host(runs: Runs) -> str:
    rows = []
    for outputs in runs[OURS][0]["host_steps"]:
        shares = [host_shares(figures["host_steps"][outputs]) for figures in runs[OURS]]
        names = ("total", "model", *HOST_PARTS, "host", "share")
        rows.append([outputs, *(spread([share[name] for share in shares], 1 if name == "share" else 2) for name in names)])
    return table(["an output", "step ms", "model ms", *(f"{name} ms" for name in HOST_PARTS), "all but the model ms", "%"], rows)


def _startup(runs: Runs) -> str:
    row = [spread([figures[name] for figures in runs[OURS]], 2) for name in ("cached", "first_run")]
    return table(["everything cached, s", "first run, no compiled kernels, s"], [row])


_SECTIONS: dict[str, Callable[[Runs], str]] = {
    "workload": _workload,
    "stream": _stream,
    "stream16": _stream16,
    "ttft": _first,
    "batch4": _batch,
    "batch8": _batch,
    "busy": _busy,
    "prefill": _prefill,
    "host": _host,
    "host1": _host,
    "startup": _startup,
}
