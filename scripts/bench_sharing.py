#!/usr/bin/env python
"""What sharing KV blocks saves, gains and costs.

    python scripts/bench_sharing.py                       # all of it, in the default model
    python scripts/bench_sharing.py --only saved,hits     # some of it
    python scripts/bench_sharing.py --json sharing.json   # raw figures, too

saved       blocks saved by sharing for 2, 4, 6 samples and beams, beside the PagedAttention paper's (counted)
prompt      a system prompt of 1,000 tokens and 32 questions: tokens computed and time to the first token
overhead    the tree's cost where nothing is shared, as a share of a real run
hits        hit rate by eviction policy on three mixes of requests (counted)
speed       match and insert in a large tree; block allocation
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import cupaged  # noqa: F401  # before NumPy is loaded: it sets how BLAS threads wait

# isort: split

import bench_machine
import sharing_counts
import sharing_times
from bench_figures import spread, table
from sharing_counts import Figures

from cupaged.cache.eviction import POLICIES

MEASUREMENTS = ("saved", "prompt", "overhead", "hits", "speed")


def measure(name: str, arguments: argparse.Namespace) -> Figures:
    measurements: dict[str, Callable[[], Figures]] = {
        "saved": lambda: {"rows": sharing_counts.saved_table(arguments.requests)},
        "prompt": lambda: sharing_times.system_prompt(arguments.model, arguments.questions, arguments.threads),
        "overhead": lambda: sharing_times.overhead(arguments.model, arguments.threads, arguments.repeat),
        "hits": lambda: {"rows": sharing_counts.hit_table(8 * arguments.requests)},
        "speed": lambda: {"tree": sharing_times.tree_speed(), "pool": sharing_times.allocation_speed()},
    }
    return measurements[name]()


# ---- tables


def saved(figures: Figures) -> str:
    rows = [[r["dataset"], r["kind"], str(r["n"]), f"{100 * r['saved']:.1f}", r["paper"]] for r in figures["rows"]]
    return table(["lengths", "sequences", "n", "blocks saved, %", "paper, %"], rows)


def prompt(figures: Figures) -> str:
    rows = []
    for name in ("without", "with"):
        first, *later = (1e3 * seconds for seconds in figures[name]["seconds"])
        rows.append([f"{name} the tree", f"{figures[name]['computed']:,}", f"{figures[name]['cached']:,}", f"{first:.0f}", spread(later, 0)])
    medians = [statistics.median(figures[name]["seconds"][1:]) for name in ("without", "with")]
    title = ["", "tokens computed", "cached", "first TTFT, ms", "later TTFTs, ms (median, range)"]
    return f"{table(title, rows)}\n\nlater first tokens come {medians[0] / medians[1]:.1f} times sooner"


def overhead(figures: Figures) -> str:
    run = figures["run"]
    rows = [
        ["bookkeeping without the tree", f"{1e3 * figures['off']:.0f} ms"],
        ["bookkeeping with the tree", f"{1e3 * figures['on']:.0f} ms"],
        [f"a real run with the tree, {run['steps']} steps", f"{run['seconds']:.1f} s, of it bookkeeping {1e3 * run['bookkeeping']:.0f} ms"],
        ["the tree's share of it", f"{100 * figures['share']:.2f} %"],
    ]
    return table(["64 requests that share nothing", ""], rows)


def hits(figures: Figures) -> str:
    columns = [*POLICIES, "unbounded"]
    rows = [[r["mix"], *(f"{100 * r[name]:.1f}" for name in columns)] for r in figures["rows"]]
    return table(["hit rate, %", *columns], rows)


def speed(figures: Figures) -> str:
    tree, pool = figures["tree"], figures["pool"]
    rows = [
        [f"match + insert, {tree['tokens']:,} tokens in a tree of {tree['blocks']:,} blocks", f"{tree['median_ms']:.2f} ms (worst {tree['worst_ms']:.2f})"],
        [f"allocate, {pool['at_once']} blocks at once", f"{pool['allocate_us']:.2f} us a block"],
        ["allocate, release and free the same", f"{pool['round_trip_us']:.2f} us a block"],
        ["allocate one block", f"{pool['single_us']:.2f} us"],
    ]
    return table(["bookkeeping", ""], rows)


TABLES: dict[str, Callable[[Figures], str]] = {"saved": saved, "prompt": prompt, "overhead": overhead, "hits": hits, "speed": speed}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whatever cupaged takes (default %(default)s)")
    parser.add_argument("--only", default=",".join(MEASUREMENTS), help="comma-separated: %(default)s")
    parser.add_argument("--threads", type=int, help="default: the cores there are")
    parser.add_argument("--requests", type=int, default=60, metavar="N", help="requests of `saved`; `hits` takes 8 times as many (default %(default)s)")
    parser.add_argument("--questions", type=int, default=32, metavar="N", help="questions of `prompt` (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="how often `overhead` is repeated (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw figures there")
    arguments = parser.parse_args(argv)
    arguments.only = arguments.only.split(",")
    for name in arguments.only:
        if name not in MEASUREMENTS:
            parser.error(f"no measurement {name!r}; there are {', '.join(MEASUREMENTS)}")
    if arguments.questions < 2 or arguments.requests < 1 or arguments.repeat < 1:
        parser.error("--questions is at least 2, --requests and --repeat at least 1")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    machine = {**bench_machine.describe(), "command": " ".join(["python", *sys.argv])}
    print("\n".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    results: Figures = {}
    for name in arguments.only:
        results[name] = measure(name, arguments)
        print(f"\n{TABLES[name](results[name])}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine, "results": results}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
