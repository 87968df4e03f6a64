"""Report: what a simulated run means, in one value.

Means over time are taken while the machine is under load: from the start until nothing more is to come and nobody waits.
The end of a run, when the last few requests have a machine for themselves, says nothing of either.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from cupaged.sim.cost import Cost
from cupaged.sim.setup import Setup
from cupaged.sim.simulator import Simulator, Step
from cupaged.workloads import metrics
from cupaged.workloads.metrics import RequestTimes
from cupaged.workloads.request import Workload

PAPER_STATES = ("token_states", "reservation", "internal", "external")
"""What the PagedAttention paper's figure 2 divides a pool into."""

STATES = (*PAPER_STATES, "cached")


@dataclass(frozen=True)
class Report:
    """Seconds are simulated, but for host_seconds: processor time that the simulation itself took.

    mean_batch   requests in a step, over time, idle time included (under load)
    memory       share of the pool by what it is good for (cache/states.py), over time (under load); memory_when_full: over
                 those steps only in which somebody waits for room; empty where nobody ever did
    """

    workload: dict[str, Any]
    times: tuple[RequestTimes, ...]
    seconds: float
    busy_seconds: float
    steps: int
    requests_per_second: float
    output_tokens_per_second: float
    mean_batch: float
    memory: dict[str, float]
    memory_when_full: dict[str, float]
    preemptions: int
    computed_tokens: int
    cached_tokens: int
    host_seconds: float

    def values(self) -> dict[str, Any]:
        """By name, for JSON: figures without the times of each request, and without the host's, so that equal runs are equal."""
        figures = {name: value for name, value in asdict(self).items() if name not in ("times", "host_seconds")}
        return figures | {"latency": self.latencies()}

    def latencies(self) -> dict[str, dict[str, float]]:
        """Percentiles in seconds: to the first token, between tokens, of a whole request, and per output token."""
        between = [t.inter_token for t in self.times if t.inter_token is not None]
        kinds: dict[str, list[float]] = {
            "first_token": [t.ttft for t in self.times],
            "inter_token": between,
            "request": [t.latency for t in self.times],
            "normalised": [t.normalised for t in self.times],
        }
        return {name: metrics.percentiles(values) | {"mean": metrics.mean(values)} for name, values in kinds.items() if values}


class _Means:
    """Means over time of what steps show."""

    def __init__(self) -> None:
        self.until = self._batch = self._counted = 0.0
        self._states = dict.fromkeys(STATES, 0.0)

    def add(self, step: Step) -> None:
        self.until = step.started + step.seconds
        self._batch += step.num_running * step.seconds
        if step.states:
            self._counted += step.seconds
            for name in STATES:
                self._states[name] += getattr(step.states, name) / step.states.pool * step.seconds

    @property
    def batch(self) -> float:
        return self._batch / self.until if self.until else 0.0

    @property
    def memory(self) -> dict[str, float]:
        return {name: value / self._counted for name, value in self._states.items()} if self._counted else {}


class Tally:
    """Adds the steps of a run up."""

    def __init__(self) -> None:
        self.busy = 0.0
        self.preemptions = 0
        self._loaded, self._whole, self.full = _Means(), _Means(), _Means()

    def __call__(self, step: Step) -> None:
        self.busy += step.seconds
        self.preemptions += step.num_preempted
        self._whole.add(step)
        if step.loaded:
            self._loaded.add(step)
        if step.num_waiting:
            self.full.add(step)

    @property
    def means(self) -> _Means:
        """Those under load, or of the whole run where nobody ever waited and all came at once."""
        return self._loaded if self._loaded.until else self._whole


def simulate(workload: Workload, setup: Setup, cost: Cost | None = None, states_every: int = 8) -> Report:
    """Serve a workload on a simulated machine. `cost`: in place of the setup's roofline.

    Raises ConfigError for a setup that makes no sense, RequestError for a request that the pool can never hold.
    """
    began = time.process_time()
    setup, tally = setup.decided(), Tally()
    simulator = Simulator(setup.scheduler(), cost or setup.roofline(), tally, states_every)
    simulator.run(workload.requests)
    rates = metrics.throughput(simulator.times)
    return Report(
        workload=workload.describe(),
        times=tuple(simulator.times),
        seconds=simulator.now,
        busy_seconds=tally.busy,
        steps=simulator.steps,
        requests_per_second=rates.requests,
        output_tokens_per_second=rates.output_tokens,
        mean_batch=tally.means.batch,
        memory=tally.means.memory,
        memory_when_full=tally.full.memory,
        preemptions=tally.preemptions,
        computed_tokens=simulator.computed_tokens,
        cached_tokens=simulator.cached_tokens,
        host_seconds=time.process_time() - began,
    )
