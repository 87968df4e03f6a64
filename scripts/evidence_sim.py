"""Claims about machines that are not here, simulated: the real scheduler and cache, and a roofline in the place of the model.

The machine is the PagedAttention paper's, and so are its figures: see cupaged/sim/paper.py. One constant there, the
overhead of a step, is fitted to the last figure of BATCH for ShareGPT; everything else is a test.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
from sharing_counts import blocks_saved

from cupaged.bench.report import Cell, Plot, Report, Table
from cupaged.bench.serving import sustained_rate
from cupaged.presets import MODELS
from cupaged.sim.paper import BATCH, MAX_LEN, NUM_BLOCKS, OVERHEAD, WASTE, batch_table, paper_setup, waste_table
from cupaged.sim.report import PAPER_STATES, simulate
from cupaged.sim.report import Report as Simulated
from cupaged.workloads import generators
from cupaged.workloads.request import TraceRequest, Workload

SYSTEMS = ("max", "pow2", "oracle", "paged")
NAMES = {"max": "Orca Max", "pow2": "Orca Pow2", "oracle": "Orca Oracle", "paged": "paged"}
VOCABULARY = MODELS["opt-13b"].vocab_size


@cache
def run(allocation: str, dataset: str, rate: float, count: int, *, batching: str = "separate", pools: int = 1) -> Simulated:
    """A simulated run on the paper's machine, or one with so many times its memory. Prompts are not shared."""
    workload = generators.make(dataset, count, rate, 0, VOCABULARY, MAX_LEN)
    setup = replace(paper_setup(allocation), batching=batching, num_blocks=pools * NUM_BLOCKS)
    return simulate(workload, setup)


# ---- the claims


def waste(block: int = 16) -> Report:
    """The share of KV memory by what it is good for, everybody waiting for memory."""
    found = waste_table(page=block)
    shown = NAMES | {"paged": f"paged, block {block}"}
    rows = [(shown[name], *(found[name][state] for state in PAPER_STATES), *WASTE[name]) for name in SYSTEMS]
    tokens = {name: found[name]["token_states"] for name in SYSTEMS}
    states = [state.replace("_", " ") for state in PAPER_STATES]
    header = ("policy", *(f"{state}, %" for state in states), *(f"paper: {state}" for state in states))
    return Report(
        abs(tokens["paged"] - WASTE["paged"][0]) <= 5 and tokens["max"] < tokens["pow2"] < tokens["oracle"] < tokens["paged"],
        ", ".join(f"{NAMES[name]} {tokens[name]:.1f} %" for name in SYSTEMS if name != "paged") + f" and paged {tokens['paged']:.1f} % of the pool hold tokens",
        (Table("share of the pool, ShareGPT at 4 requests/s", header, tuple(rows)),),
        (Plot("bars", "token states, % of the pool", "policy", "%", tuple(NAMES[n] for n in SYSTEMS), {"share": [tokens[n] for n in SYSTEMS]}),),
    )


def batched(batching: str = "separate", step: float = OVERHEAD) -> Report:
    """Mean requests in a batch, with an overhead of so many seconds a step."""
    rows: list[tuple[Cell, ...]] = []
    ratios = []
    for (dataset, rate), paper_row in BATCH.items():
        table = batch_table(dataset, 1000 if dataset == "sharegpt" else 3000, overhead=step, batching=batching)
        for name, found in table.items():
            paper = paper_row[name]
            rows.append((f"{dataset}, {rate:g} a second", NAMES[name], found, paper, found / paper))
            ratios.append(found / paper)
    sharegpt = ratios[:4]
    return Report(
        all(0.75 <= ratio <= 1.25 for ratio in ratios),
        f"with {1e3 * step:.0f} ms a step ShareGPT's batches are {min(sharegpt):.2f} to {max(sharegpt):.2f} times the paper's, Alpaca's {min(ratios[4:]):.2f} to {max(ratios[4:]):.2f} times",
        (Table("mean requests in a batch", ("workload", "policy", "ours", "paper", "ours / paper"), tuple(rows)),),
    )


RATES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)


def rates(pools: int = 1, count: int = 250) -> Report:
    """Normalised latency over the arrival rate, and the rate that each sustains at one latency."""
    systems: dict[str, tuple[str, str]] = {name: (name, "separate") for name in reversed(SYSTEMS)} | {"static max": ("max", "static")}
    series = {}
    for name, (allocation, batching) in systems.items():
        runs = [run(allocation, "sharegpt", rate, count, batching=batching, pools=pools) for rate in RATES]
        series[name] = [r.latencies()["normalised"]["mean"] for r in runs]
    limit = 2 * series["paged"][0]
    sustained = {name: sustained_rate(list(RATES), values, limit) for name, values in series.items()}
    gains = {name: sustained["paged"] / rate for name, rate in sustained.items()}
    low = series["max"][0] / series["paged"][0]
    rows = tuple((name, *values, sustained[name], gains[name]) for name, values in series.items())
    shown = {name: [min(value, 5 * limit) for value in values] for name, values in series.items()}
    return Report(
        low <= 1.25 and gains["max"] >= 2 and gains["oracle"] >= 1.5,
        f"at {RATES[0]:g} requests/s max takes {low:.2f} times paged's latency; at {limit:.3f} s a token paged sustains at least {gains['oracle']:.1f} times"
        f" Oracle's rate, {gains['max']:.1f} times Max's and {gains['static max']:.1f} times that of static batches (those below {RATES[0]:g} requests/s count as {RATES[0]:g})",
        (Table("mean normalised latency, s a token, by requests/s", ("policy", *(f"{rate:g}" for rate in RATES), "sustained", "paged / it"), rows),),
        (Plot("lines", f"normalised latency (cut at {5 * limit:.2f} s a token)", "requests/s", "s a token", RATES, shown),),
    )


def preemptions() -> Report:
    """How often a running request must give its memory up."""
    rows: list[tuple[Cell, ...]] = []
    pairs = []
    for rate in (1.5, 2.0, 3.0):
        found = {name: run(name, "sharegpt", rate, 300).preemptions for name in (*SYSTEMS, "demand")}
        rows.append((rate, *found.values()))
        pairs.append((found["demand"], found["paged"]))
    told = [f"{demand / paged:.0f} times as often as paged" if paged else f"{demand} times against none" for demand, paged in pairs]
    reserving = sum(int(row[i]) for row in rows for i in (1, 2, 3))
    return Report(
        reserving == 0 and all(4 * paged <= demand <= 16 * paged for demand, paged in pairs),
        f"Max, Pow2 and Oracle reserve ahead and preempt {reserving} times; contiguous memory that grows on demand preempts"
        f" {', '.join(told)}, by load",
        (Table("preemptions of 300 ShareGPT requests", ("requests/s", *(NAMES[n] for n in SYSTEMS), "contiguous, on demand"), tuple(rows)),),
    )


SHARED = {
    ("Alpaca", "samples"): ((6.09, 6.09), (8.53, 8.53), (9.79, 9.79)),
    ("Alpaca", "beams"): ((37.56, 37.56), (53.13, 53.13), (55.16, 55.16)),
    ("ShareGPT", "samples"): ((16.2, 30.5),) * 3,
    ("ShareGPT", "beams"): ((44.3, 66.3),) * 3,
}
"""Figure 15: percent of blocks that 2, 4 and 6 sequences of a prompt save. For ShareGPT the paper gives the range alone."""


def sharing(requests: int = 60) -> Report:
    """Blocks saved by sharing among the samples and beams of a prompt, by the paper's lengths; counted with a stand-in."""
    rows: list[tuple[Cell, ...]] = []
    found: dict[tuple[str, str], list[float]] = {}
    for (dataset, kind), paper in SHARED.items():
        found[dataset, kind] = [100 * blocks_saved(dataset, n, kind == "beams", requests) for n in (2, 4, 6)]
        for n, ours, (low, high) in zip((2, 4, 6), found[dataset, kind], paper, strict=True):
            rows.append((dataset, kind, n, ours, f"{low:g}" if low == high else f"{low:g} - {high:g}"))
    tested = [(ours, *within) for key in (("ShareGPT", "samples"), ("ShareGPT", "beams")) for ours, within in zip(found[key], SHARED[key], strict=True)]
    tested += [(ours, low - 1, high + 1) for ours, (low, high) in zip(found["Alpaca", "samples"], SHARED["Alpaca", "samples"], strict=True)]
    told = (f"{dataset} {kind} {' / '.join(f'{value:.1f}' for value in values)} %" for (dataset, kind), values in found.items())
    return Report(
        all(low <= ours <= high for ours, low, high in tested),
        f"2 / 4 / 6 sequences save: {', '.join(told)}",
        (Table(f"blocks saved, {requests} requests", ("lengths", "sequences", "of a prompt", "ours, %", "paper, %"), tuple(rows)),),
    )


def code_batch(share: float = generators.CODE_SHARE) -> Report:
    """A batch that on average uses such a share of what is reserved: what Max wastes of it, and what paged does."""
    workload = generators.code_batch(300, 4.0, 0, VOCABULARY, MAX_LEN, share)
    use = float(np.mean([request.num_tokens for request in workload.requests])) / MAX_LEN
    found = {name: simulate(workload, paper_setup(name)) for name in ("max", "paged")}
    held = {name: r.memory["token_states"] / (1 - r.memory["external"]) for name, r in found.items()}
    rows = tuple((NAMES[name], 100 * held[name], r.mean_batch, r.output_tokens_per_second) for name, r in found.items())
    return Report(
        0.2 <= 1 - held["max"] <= 0.85 and held["max"] < 0.4 and held["paged"] > 0.9,
        f"requests end at {100 * use:.1f} % of the longest sequence on average; of what is given out Max fills {100 * held['max']:.1f} % and paged {100 * held['paged']:.1f} %",
        (Table("a code-generation batch (ours), OPT-13B", ("policy", "of what is given out, % filled", "mean batch", "output tokens/s"), rows),),
    )


def shared_prefix(prefixes: tuple[int, ...] = (80, 341)) -> Report:
    """Translations behind a common prefix (lengths are ours: 40 tokens in, 40 out), all waiting: paged and shared against Oracle."""
    rows: list[tuple[Cell, ...]] = []
    gains = []
    for length in prefixes:
        rng = np.random.default_rng(0)
        head = rng.integers(0, 50_000, length)
        prompts = (np.concatenate([head, rng.integers(0, 50_000, 40)]).astype(np.int32) for _ in range(400))
        workload = Workload.of(f"{length} shared tokens", 0, [TraceRequest(0.0, prompt, 40, "shared") for prompt in prompts], MAX_LEN)
        found = [simulate(workload, replace(paper_setup(name), prefix_cache=name == "paged")) for name in ("oracle", "paged")]
        gains.append(found[1].requests_per_second / found[0].requests_per_second)
        rows.append((length, *(r.requests_per_second for r in found), gains[-1], {80: 1.67, 341: 3.58}.get(length, "-")))
    return Report(
        gains[-1] > gains[0] > 1 and gains[-1] >= 1.67,
        f"behind {prefixes[0]} shared tokens paged serves {gains[0]:.2f} times Oracle's requests a second, behind {prefixes[-1]} {gains[-1]:.2f} times",
        (Table("requests a second", ("shared tokens", "Orca Oracle", "paged, shared", "ours", "paper"), tuple(rows)),),
    )


def arithmetic() -> Report:
    """The article's sizes, computed from the models' shapes."""
    big, gb, mb = MODELS["llama-3-70b"], 1e9, 1e6
    token = big.kv_bytes_per_token("bfloat16")
    weights = 70e9 * 2
    sizes: tuple[tuple[str, str, float, int], ...] = (
        ("KV of 8,192 tokens, GB", "8,192 x a token", token * 8192 / gb, 40),
        ("a block of 16 tokens, MB", "16 x a token", token * 16 / mb, 5),
        ("weights of 70B in 16 bits over 8 GPUs, GB", "140 / 8", weights / 8 / gb, 40),
        ("weights of 7B in FP8, GB", "7e9 x 1", 7.0, 14),
        ("tokens of 83 MB on one of 8 GPUs", "83 MB / (a token / 8)", 83 * mb / (token / 8), 4096),
    )
    wrong = [what for what, _, ours, article in sizes if abs(ours - article) > 0.1 * article]
    right = [what.split(",")[0] for what, *_ in sizes if what not in wrong]
    of_a_token = ("KV of one token, llama-3-70b, bytes", "2 x 80 x 8 x 128 x 2", str(token), "-")
    return Report(
        not wrong,
        f"{len(wrong)} of the article's {len(sizes)} sizes are more than 10 % off its own formula; right: {', '.join(right) or 'none'}",
        (Table("sizes", ("what", "formula", "ours", "article"), (of_a_token, *sizes)),),
    )
