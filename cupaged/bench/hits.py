"""Hit rates of the prefix cache: by eviction policy, and by the order in which requests are served.

Counted, not timed: the scheduler and the cache are the real ones, and the model answers at random, because what is found
in a cache does not depend on what was computed into it.
"""

from __future__ import annotations

from cupaged.bench.lab import Lab
from cupaged.bench.report import Cell, Plot, Report, Table
from cupaged.bench.runner import Run
from cupaged.bench.stand_in import VOCABULARY, stand_in
from cupaged.cache.eviction import POLICIES as EVICTIONS
from cupaged.policy import POLICIES as QUEUES
from cupaged.workloads import generators
from cupaged.workloads.request import Workload

MIXES = ("shared_prompt", "chats", "few_shot_trees", "adversarial_prefixes")
BLOCK = 16
UNBOUNDED = 1 << 17


def eviction(lab: Lab) -> Report:
    """Eviction policy by mix, one request at a time, in pools of so many longest sequences."""
    mixes = (lab.choices.workload,) if lab.choices.workload else MIXES
    rows: list[tuple[Cell, ...]] = []
    rates: dict[tuple[str, int], dict[str, float]] = {}
    for mix in mixes:
        workload = _mix(lab, mix)
        best = _alone(lab, workload, UNBOUNDED, "lru").hit_rate
        for sequences in lab.whole_values:
            blocks = sequences * lab.max_len // BLOCK
            found = {policy: _alone(lab, workload, blocks, policy).hit_rate for policy in EVICTIONS}
            rates[mix, sequences] = found
            rows.append((workload.name, sequences, *(100 * rate for rate in found.values()), 100 * best))
    hostile = [found for (mix, _), found in rates.items() if mix == "adversarial_prefixes"] or list(rates.values())
    wins = sum(found["weighted"] > found["lru"] for found in hostile)
    told = ", ".join(f"{name} lru {100 * f['lru']:.1f} / weighted {100 * f['weighted']:.1f} %" for (name, _), f in rates.items())
    return Report(
        wins == len(hostile),
        told,
        (Table("prompt tokens found in the cache, %", ("workload", "pool, sequences", *EVICTIONS, "never evicted"), tuple(rows)),),
        tuple(
            Plot("bars", f"{mix} in a pool of {size} sequences: hit rate, %", "policy", "%", tuple(found), {"hit": [100 * v for v in found.values()]})
            for (mix, size), found in rates.items()
            if mix == mixes[-1]
        ),
        {"rates": {f"{mix} {size}": found for (mix, size), found in rates.items()}},
    )


def _mix(lab: Lab, mix: str) -> Workload:
    if lab.choices.trace is not None:
        return lab.workload(VOCABULARY)
    workload = generators.make(mix, lab.requests, None, lab.seed, VOCABULARY, lab.max_len)
    lab.remember(workload)
    return workload


def _alone(lab: Lab, workload: Workload, blocks: int, policy: str) -> Run:
    longest = max(lab.max_len, max(request.num_tokens for request in workload.requests))
    engine = stand_in(blocks, lab.seed, max_model_len=longest, eviction=policy, max_num_batched_tokens=2048)
    return lab.serve_one_by_one(engine, workload, f"{workload.name}, {policy}")


def queue(lab: Lab) -> Report:
    """Order of service: few-shot prompts that all wait, in pools of so many longest sequences, against what an endless
    cache would find (arXiv 2312.07104: serving depth first is optimal, the longest shared prefix first is equivalent)."""
    mix = lab.choices.workload or "few_shot_trees"
    workload = _mix(lab, mix)
    rows: list[tuple[Cell, ...]] = []
    found: dict[int, dict[str, float]] = {}
    best = _waiting(lab, workload, UNBOUNDED, "dfs").hit_rate
    for sequences in lab.whole_values:
        blocks = sequences * lab.max_len // BLOCK
        found[sequences] = {name: _waiting(lab, workload, blocks, name).hit_rate / best for name in QUEUES}
        rows.append((sequences, *(100 * share for share in found[sequences].values()), 100 * best))
    smallest = found[min(found)]
    return Report(
        min(smallest["dfs"], smallest["lpm"]) >= 0.96,
        f"in a pool of {min(found)} longest sequences fcfs finds {100 * smallest['fcfs']:.1f} % of what an endless cache finds,"
        f" lpm {100 * smallest['lpm']:.1f} % and dfs {100 * smallest['dfs']:.1f} %",
        (Table(f"{workload.name}: hits, % of the optimum", ("pool, sequences", *QUEUES, "optimum: hit rate, %"), tuple(rows)),),
        (Plot("bars", "hits by order of service, % of the optimum", "order", "%", tuple(smallest), {"share": [100 * v for v in smallest.values()]}),),
        {"of_optimum": {str(size): value for size, value in found.items()}, "optimum": best},
    )


def _waiting(lab: Lab, workload: Workload, blocks: int, order: str) -> Run:
    """All requests wait from the start and one is served at a time, so that nothing but the order counts."""
    longest = max(lab.max_len, max(request.num_tokens for request in workload.requests))
    engine = stand_in(blocks, lab.seed, max_model_len=longest, queue=order, max_num_batched_tokens=2048, max_num_seqs=1)
    return lab.serve(engine, workload, f"{workload.name}, {order}")
