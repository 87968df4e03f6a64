"""Measure the GPU engine against what its GPU can do, and beside torch, FlashInfer and transformers where installed.

    python scripts/bench_gpu.py
    python scripts/bench_gpu.py --only probe,decode,paging --budget 120
    python scripts/bench_gpu.py --device emu --tiny        (no GPU: proves the script, measures nothing)

probe         reading memory alone; the best of its grids is what others are shares of
gemm          cuBLAS at its best
decode        decode attention, the engine's kernel, from cold memory
large         Llama 8B's shape with random weights, end to end, against the floor: weights + KV bytes at the probe's speed
paging        block tables against contiguous memory, with the two-pass kernel and the tuned one
prefill       prefill attention, TFLOP/s
skinny        a layer's products of 1 to 16 rows with their norms, ours in one launch each against cuBLAS
steps         launches of a step; a graph against one launch after the other; norms inside of products against apart
small         SmolLM2 end to end, in graphs and without
setups        the decode kernel with other stages and grids
l2            L2 hits of decode attention, from the profiler
peer-decode, peer-prefill, transformers    the same work by others

A part that fails is told and the next one runs; after --budget seconds what is left is not run, and told. Exit code 1 if
anything failed. The table goes to stdout, and with the JSON to scripts/results/ (emu: only with --out).
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from gpu import ceilings, decode, end_to_end, l2, machine, peers, prefill, skinny, steps
from gpu.bench import Bench
from gpu.cases import Budget, Parts, run_parts, tell
from gpu.report import render, save

from cupaged.errors import BackendError

RESULTS = Path(__file__).resolve().parent / "results"
PARTS = {
    "probe": ceilings.probes,
    "gemm": ceilings.products,
    "decode": decode.decode,
    "large": end_to_end.large_model,
    "paging": decode.paging,
    "prefill": prefill.prefill,
    "skinny": skinny.skinny,
    "steps": steps.steps,
    "small": end_to_end.small_model,
    "setups": decode.setups,
    "l2": l2.counted,
    "peer-decode": peers.decoding,
    "peer-prefill": peers.prefilling,
    "transformers": peers.transformers_generate,
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or emu (default %(default)s)")
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated: %(default)s")
    parser.add_argument("--budget", type=float, default=420, metavar="SECONDS", help="default %(default)s")
    parser.add_argument("--tiny", action="store_true", help="sizes that the emulator gets through; the figures mean nothing")
    parser.add_argument("--model", default="", help="a SmolLM2 to measure end to end (default: what `cupaged pull` put in the cache)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the results go (default: scripts/results on a GPU)")
    arguments = parser.parse_args(argv)
    arguments.only = arguments.only.split(",")
    for name in arguments.only:
        if name not in PARTS:
            parser.error(f"no part {name!r}; there are {', '.join(PARTS)}")
    if arguments.device.partition(":")[0] not in ("cuda", "emu"):
        parser.error(f"no device {arguments.device!r}; there are cuda, cuda:1 and emu")
    if arguments.device == "emu" and not arguments.tiny:
        parser.error("the emulator wants --tiny: real sizes would take it days")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    budget = Budget(arguments.budget)
    try:
        device = machine.open_device(arguments.device)
    except BackendError as error:
        tell(f"error: {error}")
        return 1
    facts, bench = machine.describe(device), Bench(device, arguments.tiny, arguments.model)
    parts: Parts = {name: partial(cases, bench) for name, cases in PARTS.items()}
    results = run_parts(parts, arguments.only, budget)
    title = "bench_gpu" + (", tiny: the figures mean nothing" if arguments.tiny else "")
    text = render(title, facts, results)
    print(text)
    out = arguments.out or (RESULTS if device.name == "cuda" and not arguments.tiny else None)
    if out is not None:
        tell(f"results: {save(out, 'bench_gpu', facts, results, text)}")
    return 1 if any(result.status == "failed" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
