"""Speed as users see it: throughput, latency, and both over the arrival rate; the real engine, timed."""

from __future__ import annotations

from cupaged.bench.baseline import system
from cupaged.bench.lab import Lab
from cupaged.bench.report import Cell, Plot, Report, Table
from cupaged.bench.runner import Run
from cupaged.errors import WorkloadError
from cupaged.workloads.metrics import mean, percentiles, variance
from cupaged.workloads.request import TraceRequest, Workload

# ---- throughput


def throughput(lab: Lab) -> Report:
    """Everything at once, in one pool, paged and with the model's longest sequence reserved for each request."""
    rows, rates = [], {}
    for name in ("max", "paged"):
        engine = system(lab.engine(), name)
        workload = lab.workload(engine.model_config.vocab_size)
        cold = lab.serve(engine, workload, f"{name}, cold cache")
        warm = lab.serve(engine, workload, f"{name}, the same again") if name == "paged" else None
        rates[name] = cold.output_rate
        rows.append(_throughput_row(name, "cold", cold))
        if warm is not None:
            rows.append(_throughput_row(name, "warm", warm))
    gain = rates["paged"] / rates["max"]
    return Report(
        gain >= 1.5,
        f"paged serves {gain:.2f} times the output tokens a second of max on {len(workload.requests)} requests",
        (Table("throughput in one pool", ("system", "cache", "requests/s", "output tokens/s", "mean running", "hit rate", "preempted"), tuple(rows)),),
        (Plot("bars", "output tokens a second", "system", "tokens/s", tuple(f"{r[0]}, {r[1]}" for r in rows), {"rate": [float(r[3]) for r in rows]}),),
        {"gain": gain},
    )


def _throughput_row(name: str, cache: str, run: Run) -> tuple[Cell, ...]:
    return name, cache, run.request_rate, run.output_rate, run.mean_running, run.hit_rate, run.preemptions


# ---- latency


def latency(lab: Lab) -> Report:
    """Poisson arrivals, first into an empty prefix cache, then the same requests again."""
    engine = lab.engine()
    workload = lab.workload(engine.model_config.vocab_size)
    runs = {"cold": lab.serve(engine, workload, "cold cache"), "warm": lab.serve(engine, workload, "warm cache")}
    rows: list[tuple[Cell, ...]] = []
    for cache, run in runs.items():
        measures = {"TTFT": [t.ttft for t in run.times], "between tokens": run.gaps, "whole request": [t.latency for t in run.times]}
        rows += [(cache, what, *(1e3 * value for value in percentiles(found).values())) for what, found in measures.items() if found]
    first = {cache: percentiles([t.ttft for t in run.times])["p50"] for cache, run in runs.items()}
    return Report(
        first["warm"] <= 0.8 * first["cold"],
        f"the median first token comes after {1e3 * first['cold']:.0f} ms from a cold cache and {1e3 * first['warm']:.0f} ms from a warm one",
        (Table(f"latency in ms at {lab.rate or 0:g} requests/s", ("cache", "", "p50", "p90", "p99"), tuple(rows)),),
        (_over_time(runs),),
        {"ttft_p50": first, "hit_rate": {cache: run.hit_rate for cache, run in runs.items()}},
    )


def _over_time(runs: dict[str, Run]) -> Plot:
    arrivals = tuple(t.arrival for t in runs["cold"].times)
    series = {cache: [1e3 * t.ttft for t in run.times] for cache, run in runs.items()}
    return Plot("lines", "time to first token", "arrival, s", "TTFT, ms", arrivals, series)


# ---- rates


def rates(lab: Lab) -> Report:
    """The arrival rate from far below what the engine can serve to far above, paged and with the longest reserved."""
    if any(value <= 0 for value in lab.values):
        raise WorkloadError("--values are arrival rates over the measured capacity, each above 0")
    engine = lab.engine(prefix_cache=False)
    vocab_size = engine.model_config.vocab_size
    whole = lab.serve(engine, lab.workload(vocab_size, at_once=True), "capacity")
    capacity = whole.request_rate
    offered = sorted(value * capacity for value in lab.values)
    series: dict[str, list[float]] = {}
    for name in ("paged", "max"):
        engine = system(lab.engine(prefix_cache=False), name)
        runs = [lab.serve(engine, lab.workload(vocab_size, rate=rate), f"{name}, {rate:.2f} requests/s") for rate in offered]
        series[name] = [mean([t.normalised for t in run.times]) for run in runs]
    low, high = (series["max"][i] / series["paged"][i] for i in (0, -1))
    rows = tuple((rate, *(1e3 * series[name][i] for name in series), series["max"][i] / series["paged"][i]) for i, rate in enumerate(offered))
    sustained = {name: sustained_rate(offered, found, 2 * series["paged"][0]) for name, found in series.items()}
    return Report(
        low <= 1.25 and high >= 1.3,
        f"max takes {low:.2f} times paged's latency at the lowest rate and {high:.2f} times at the highest;"
        f" at twice the lowest latency paged sustains {sustained['paged'] / sustained['max']:.2f} times its rate",
        (Table("mean normalised latency, ms a token", ("requests/s", "paged", "max", "max / paged"), rows),),
        (Plot("lines", "normalised latency over the arrival rate", "requests/s", "s a token", tuple(offered), series),),
        {"capacity": capacity, "offered": offered, "normalised": series, "sustained": sustained},
    )


def sustained_rate(offered: list[float], latency: list[float], limit: float) -> float:
    """The rate at which the latency reaches a limit, interpolated; the lowest or highest offered one where it does not cross."""
    if latency[0] > limit:
        return offered[0]
    for i in range(1, len(offered)):
        if latency[i] > limit:
            part = (limit - latency[i - 1]) / (latency[i] - latency[i - 1])
            return offered[i - 1] + part * (offered[i] - offered[i - 1])
    return offered[-1]


# ---- chunked prefill


def chunked_prefill(lab: Lab) -> Report:
    """Short requests at a steady rate and every fourth one with a long prompt; by the largest number of tokens in a step."""
    budgets = lab.whole_values
    rows = []
    found: dict[int, dict[str, float]] = {}
    for budget in budgets:
        engine = lab.engine(prefix_cache=False, max_num_batched_tokens=budget, max_num_seqs=min(budget, 32))
        workload = lab.workload(engine.model_config.vocab_size)
        if lab.choices.trace is None:
            workload = with_long_prompts(lab, workload, engine.model_config.vocab_size)
        run = lab.serve(engine, workload, f"{budget} tokens a step")
        ttfts = [t.ttft for t in run.times]
        found[budget] = {"variance": variance(ttfts), "gap": percentiles(run.gaps)["p99"] if run.gaps else 0.0}
        rows.append((budget, 1e3 * mean(ttfts), 1e6 * variance(ttfts), *(1e3 * v for v in percentiles(ttfts).values()), 1e3 * found[budget]["gap"], run.output_rate))
    small, large = found[min(budgets)], found[max(budgets)]
    return Report(
        small["variance"] <= 0.9 * large["variance"],
        f"{min(budgets)} tokens a step instead of {max(budgets)} change the variance of TTFT by a factor of {small['variance'] / large['variance']:.2f}"
        f" and the p99 gap between tokens from {1e3 * large['gap']:.0f} to {1e3 * small['gap']:.0f} ms",
        (Table("TTFT by chunk", ("tokens a step", "mean, ms", "variance, ms²", "p50", "p90", "p99", "p99 gap, ms", "output tokens/s"), tuple(rows)),),
        (Plot("bars", "longest gaps between tokens, by tokens a step", "tokens a step", "p99 gap, ms", budgets, {"gap": [1e3 * found[b]["gap"] for b in budgets]}),),
        {"by_budget": {str(budget): value for budget, value in found.items()}},
    )


def with_long_prompts(lab: Lab, workload: Workload, vocab_size: int) -> Workload:
    """Every fourth request asks with a prompt of three quarters of the longest sequence."""
    rng = lab.rng()
    length = 3 * lab.max_len // 4
    requests = list(workload.requests)
    for i in range(3, len(requests), 4):
        output = min(requests[i].num_output, lab.max_len - length)
        requests[i] = TraceRequest(requests[i].arrival, rng.integers(0, vocab_size, length).astype("int32"), output)
    mixed = Workload.of(f"{workload.name} and long prompts", workload.seed, requests, workload.max_len)
    lab.workloads[-1] = mixed
    return mixed
