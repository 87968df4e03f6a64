"""One request alone: what pages cost it, and that they gain it nothing."""

from __future__ import annotations

from statistics import median

import numpy as np

from cupaged.bench.lab import Lab
from cupaged.bench.report import Plot, Report, Table
from cupaged.errors import WorkloadError
from cupaged.workloads.request import TraceRequest, Workload

LARGEST_BLOCK = 256


def overhead(lab: Lab) -> Report:
    """One stream in blocks of the usual size and in one block as large as the sequence, in turns."""
    repeat, length = lab.requests, lab.max_len
    if length > LARGEST_BLOCK:
        raise WorkloadError(f"a contiguous sequence here is one block, of at most {LARGEST_BLOCK} tokens: --max-model-len {length} is longer")
    sizes = (*lab.whole_values, length)
    engines = {size: lab.engine(prefix_cache=False, block_size=size, num_blocks=-(-length // size)) for size in dict.fromkeys(sizes)}
    first: dict[int, list[float]] = {size: [] for size in engines}
    speed: dict[int, list[float]] = {size: [] for size in engines}
    for turn in range(repeat):
        for size, engine in engines.items():
            prompt = np.random.default_rng(lab.seed + turn).integers(0, engine.model_config.vocab_size, length // 4).astype(np.int32)
            workload = Workload.of("one stream", lab.seed, [TraceRequest(0.0, prompt, length - len(prompt))], length)
            (times,) = lab.serve(engine, workload, f"turn {turn + 1}, blocks of {size}").times
            first[size].append(times.ttft)
            speed[size].append(1 / (times.inter_token or float("inf")))
    lab.remember(workload)
    paged, whole = sizes[0], length
    ratio = median(p / w for p, w in zip(speed[paged], speed[whole], strict=True))
    rows = tuple((_name(size, length), median(speed[size]), min(speed[size]), max(speed[size]), 1e3 * median(first[size])) for size in engines)
    return Report(
        0.95 <= ratio <= 1.05,
        f"alone, a request decodes {ratio:.2f} times as fast in blocks of {paged} as in one run of memory",
        (Table(f"one stream of {length} tokens, {repeat} turns", ("memory", "tokens/s, median", "least", "most", "TTFT, ms"), rows),),
        (Plot("bars", "tokens a second of one stream", "memory", "tokens/s", tuple(r[0] for r in rows), {"rate": [r[1] for r in rows]}),),
        {"ratio": ratio, "tokens_per_second": {str(size): speed[size] for size in engines}},
    )


def _name(size: int, length: int) -> str:
    return "contiguous" if size == length else f"blocks of {size}"
