"""What the profiler counts while decode attention reads: L2 hits and bytes from memory, paged against contiguous.

The profiler (ncu) runs this file as a program, which launches every kernel once. Where it is missing, or the driver does
not let it count, there are no such figures.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # as the profiler's program: scripts/ is where the packages are
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu.bench import Bench, Heads
from gpu.cases import Case, Figures, Skip
from gpu.decode import KERNELS, Step
from gpu.machine import open_device

METRICS = {
    "lts__t_sector_hit_rate.pct": "L2 hits %",
    "lts__t_bytes_op_read.sum": "read from L2",
    "dram__bytes_read.sum": "read from memory",
    "gpu__time_duration.sum": "time",
}
VARIANTS = tuple((kernel, paged) for kernel in KERNELS for paged in (True, False))
HEADS, BATCH, CONTEXT = Heads(32, 8, 128), 32, 4096
TINY_HEADS = Heads(3, 1, 64)
LIMIT_SECONDS = 90


def counted(bench: Bench) -> Iterator[Case]:
    found: list[Figures] = []
    for i, (kernel, paged) in enumerate(VARIANTS):
        title = f"{HEADS}, batch {BATCH}, context {CONTEXT}: {kernel}, {'paged' if paged else 'contiguous'}"
        yield Case(title, partial(_counted, bench, found, i))


def _counted(bench: Bench, found: list[Figures], number: int) -> Figures:
    if not found:
        found.extend(_profile(bench))
    return found[number]


def _profile(bench: Bench) -> list[Figures]:
    ncu = shutil.which("ncu")
    if bench.device.name != "cuda" or ncu is None:
        raise Skip("the profiler (ncu) is not here")
    pattern = "regex:^(paged_decode|attention_partition)$"
    command = [ncu, "--csv", "--page", "raw", "--metrics", ",".join(METRICS), "--kernel-name", pattern, sys.executable, __file__, "cuda"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise Skip(f"the profiler took longer than {LIMIT_SECONDS} s") from error
    rows = parse(done.stdout)
    if len(rows) != len(VARIANTS):
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        raise Skip(f"the profiler counted {len(rows)} kernels of {len(VARIANTS)}: {''.join(last)}")
    return rows


def parse(text: str) -> list[Figures]:
    """The profiler's table (a line of names, a line of units, a line for each kernel) -> our figures with their units."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    table = list(csv.DictReader(io.StringIO("\n".join(lines))))
    if not table or not all(name in table[0] for name in METRICS):
        return []
    units, *kernels = table
    return [{title: f"{row[name]} {units[name]}".strip() for name, title in METRICS.items()} for row in kernels]


def launch_all(device: str) -> None:
    """Every variant once, each on a pool of its own that nobody has touched since."""
    tiny = device == "emu"
    bench = Bench(open_device(device), tiny, "")
    step = Step(bench, TINY_HEADS, 1, 32) if tiny else Step(bench, HEADS, BATCH, CONTEXT)
    for i, (kernel, paged) in enumerate(VARIANTS):
        for launch in step.launches(kernel, paged, i):
            bench.device.launch(launch)
    bench.clock.synchronize()


if __name__ == "__main__":
    launch_all(sys.argv[1])
