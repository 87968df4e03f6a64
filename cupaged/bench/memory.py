"""What becomes of the pool's memory: fragmentation by allocation, and the size of a block."""

from __future__ import annotations

from cupaged.bench.baseline import SYSTEMS, StatesWatch, system
from cupaged.bench.lab import Lab
from cupaged.bench.report import Cell, Plot, Report, Table
from cupaged.cache.states import MemoryStates
from cupaged.sim.report import PAPER_STATES
from cupaged.workloads.metrics import mean


def fragmentation(lab: Lab) -> Report:
    """Where the slots of the pool are while requests wait: the paper's figure 2, on the real engine."""
    rows: list[tuple[Cell, ...]] = []
    plots = []
    shares: dict[str, dict[str, float]] = {}
    for name in SYSTEMS:
        engine = system(lab.engine(prefix_cache=False), name)
        workload = lab.workload(engine.model_config.vocab_size)
        with StatesWatch(engine) as watch:
            run = lab.serve(engine, workload, name)
        busy = [s for s, moment in zip(watch.states, run.moments, strict=True) if moment.record.num_waiting] or watch.states
        shares[name] = shares_of(busy)
        shares[name]["most wasted"] = max(s.internal / (m.record.num_running + m.record.num_finished) for s, m in zip(watch.states, run.moments, strict=True))
        rows.append((name, *shares[name].values(), run.mean_running))
        plots.append(_stacked(name, [m.seconds for m in run.moments], watch.states))
    paged = shares["paged"]["of held"]
    in_order = shares["paged"]["token_states"] > shares["oracle"]["token_states"] > shares["max"]["token_states"]
    return Report(
        paged >= 90 and in_order,
        f"{paged:.1f} % of what paged gave out holds tokens, in its worst step {shares['paged']['most wasted']:.1f} slots a sequence are empty on average; of the pool {shares['paged']['token_states']:.1f} %,"
        f" oracle {shares['oracle']['token_states']:.1f} %, pow2 {shares['pow2']['token_states']:.1f} %, max {shares['max']['token_states']:.1f} %",
        (Table("share of the pool while requests wait, %", ("system", "token states", "reservation", "internal", "external", "tokens, of what is held", "largest mean waste, tokens a sequence", "mean running"), tuple(rows)),),
        tuple(plots),
        {"shares": shares},
    )


def shares_of(states: list[MemoryStates]) -> dict[str, float]:
    """Means of each state, in percent of the pool, and the tokens in percent of what was given out."""
    shares = {state: 100 * mean([getattr(s, state) / s.pool for s in states]) for state in PAPER_STATES}
    held = sum(s.token_states + s.reservation + s.internal for s in states)
    return shares | {"of held": 100 * sum(s.token_states for s in states) / held}


def _stacked(name: str, seconds: list[float], states: list[MemoryStates]) -> Plot:
    series = {state.replace("_", " "): [getattr(s, state) / s.pool for s in states] for state in PAPER_STATES}
    return Plot("stack", f"{name}: the pool over time", "s", "share of the pool", tuple(seconds), series)


def block_size(lab: Lab) -> Report:
    """The same memory in blocks of different sizes: speed, waste and bookkeeping."""
    sizes = lab.whole_values
    slots = int(lab.option("num_blocks")) * int(lab.option("block_size"))
    rows = []
    speed: dict[int, float] = {}
    for size in sizes:
        engine = lab.engine(prefix_cache=False, block_size=size, num_blocks=max(1, slots // size))
        run = lab.serve(engine, lab.workload(engine.model_config.vocab_size), f"blocks of {size}")
        speed[size] = run.output_rate
        host = sum(m.record.schedule_seconds + m.record.apply_seconds for m in run.moments)
        rows.append((size, run.output_rate, 100 * (1 - run.token_share(size)), run.mean_running, run.preemptions, 100 * host / run.seconds))
    best = max(speed, key=lambda size: speed[size])
    usual = min(sizes, key=lambda size: abs(size - 16))
    return Report(
        speed[usual] >= 0.9 * speed[best] and speed[max(sizes)] < 0.9 * speed[usual],
        f"the fastest is {best}; {usual} reaches {100 * speed[usual] / speed[best]:.0f} % of it, {min(sizes)} {100 * speed[min(sizes)] / speed[best]:.0f} %"
        f" and {max(sizes)} {100 * speed[max(sizes)] / speed[best]:.0f} %",
        (Table("by block size", ("block size", "output tokens/s", "wasted in held blocks, %", "mean running", "preempted", "bookkeeping, % of the time"), tuple(rows)),),
        (Plot("bars", "output tokens a second by block size", "block size", "tokens/s", sizes, {"rate": [speed[size] for size in sizes]}),),
        {"rate": {str(size): value for size, value in speed.items()}},
    )
