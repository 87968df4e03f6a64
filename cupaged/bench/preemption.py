"""What a full pool costs: computing a preempted request's KV again, or bringing it back from host memory."""

from __future__ import annotations

from cupaged.bench.lab import Lab
from cupaged.bench.report import Plot, Report, Table

WAYS = ("recompute", "swap")


def preemption(lab: Lab) -> Report:
    """The same requests in a pool that is too small for them, by block size and by what a preempted request does."""
    sizes = lab.whole_values
    slots = int(lab.option("num_blocks")) * int(lab.option("block_size"))
    rows = []
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for size in sizes:
        for way in WAYS:
            engine = lab.engine(prefix_cache=False, preemption=way, block_size=size, num_blocks=max(1, slots // size))
            run = lab.serve(engine, lab.workload(engine.model_config.vocab_size), f"{way}, blocks of {size}")
            seconds[way].append(run.seconds)
            swapped = run.moments[-1].record.bytes_swapped / 1e6
            rows.append((size, way, run.seconds, run.output_rate, run.preemptions, run.computed, swapped))
    ratios = [again / back for again, back in zip(seconds["recompute"], seconds["swap"], strict=True)]
    preempted = max(int(row[4]) for row in rows)
    return Report(
        preempted > 0 and max(ratios) <= 1.2,
        f"recomputing takes {min(ratios):.2f} to {max(ratios):.2f} times as long as swapping, with up to {preempted} preemptions",
        (Table("recompute against swap", ("block size", "", "seconds", "output tokens/s", "preempted", "tokens computed", "MB swapped"), tuple(rows)),),
        (Plot("lines", "time to serve everything, by block size", "block size", "s", sizes, seconds),),
        {"seconds": seconds, "ratios": ratios},
    )
