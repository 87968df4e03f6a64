"""Many engines behind a router: what a prefix cache is worth when requests could go anywhere.

Each replica is a whole simulated engine with a cache of its own. The router sees prompts and how many requests each
replica has, never a cache. It remembers where it has sent each prefix:

    random   anywhere, by lot: what a plain load balancer does
    least    where the fewest requests are
    prefix   where the longest known prefix of the prompt was sent, unless that replica has too much to do

A replica that already has much more than its share is passed over, so that one popular prefix cannot keep the others idle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cupaged.errors import ConfigError, shown
from cupaged.sim.cost import Cost
from cupaged.sim.setup import Setup
from cupaged.sim.simulator import Simulator
from cupaged.step_plan import IntArray
from cupaged.workloads import metrics
from cupaged.workloads.generators import chats, make, shared_prompt
from cupaged.workloads.request import Workload

ROUTINGS = ("random", "least", "prefix")

MOST_LOAD = 1.5
"""A replica with more than so many times the mean load, and GRACE requests besides, gets nothing for its prefixes' sake."""

GRACE = 4

SHARED = 2
"""Open conversations, or system prompts, for each replica."""


class PrefixMap:
    """Which replicas have been sent which prefixes: a tree over whole blocks of tokens. It is exact: tokens are compared."""

    def __init__(self, block_size: int) -> None:
        self._bytes = 4 * block_size
        self._children: dict[tuple[int, bytes], int] = {}
        self._replicas: list[set[int]] = [set()]

    def deepest(self, prompt: IntArray) -> list[set[int]]:
        """The replicas that have each known prefix of the prompt, the longest first."""
        return [self._replicas[node] for node in reversed(self._path(prompt, grow=False))]

    def sent(self, prompt: IntArray, replica: int) -> None:
        for node in self._path(prompt, grow=True):
            self._replicas[node].add(replica)

    def _path(self, prompt: IntArray, grow: bool) -> list[int]:
        text, node, path = prompt.tobytes(), 0, []
        for start in range(0, len(text) - self._bytes + 1, self._bytes):
            key = node, text[start : start + self._bytes]
            found = self._children.get(key)
            if found is None:
                if not grow:
                    break
                found = self._children[key] = len(self._replicas)
                self._replicas.append(set())
            node = found
            path.append(node)
        return path


class Router:
    """Chooses a replica for each prompt. `load`: requests at each replica, kept up to date by the caller."""

    def __init__(self, routing: str, replicas: int, block_size: int, seed: int = 0) -> None:
        if routing not in ROUTINGS:
            raise ConfigError(f"routing must be one of {', '.join(ROUTINGS)}, not {shown(routing)}")
        if replicas < 1:
            raise ConfigError(f"there must be at least 1 replica, not {shown(replicas)}")
        self.load = [0] * replicas
        self._known = PrefixMap(block_size)
        self._rng = np.random.default_rng(seed)
        choices: dict[str, Callable[[IntArray], int]] = {"random": self._random, "least": self._least, "prefix": self._prefix}
        self._choose = choices[routing]

    def route(self, prompt: IntArray) -> int:
        """The replica that gets the request."""
        return self._choose(prompt)

    def _random(self, prompt: IntArray) -> int:
        return int(self._rng.integers(len(self.load)))

    def _least(self, prompt: IntArray) -> int:
        return min(range(len(self.load)), key=self.load.__getitem__)

    def _prefix(self, prompt: IntArray) -> int:
        most = MOST_LOAD * sum(self.load) / len(self.load) + GRACE
        for replicas in self._known.deepest(prompt):
            chosen = min(replicas, key=lambda replica: (self.load[replica], replica))
            if self.load[chosen] <= most:
                break
        else:
            chosen = self._least(prompt)
        self._known.sent(prompt, chosen)
        return chosen


@dataclass(frozen=True)
class FleetReport:
    """Seconds are simulated. hit_rate: prompt tokens found in a cache; computed_tokens: by all replicas;
    worst_share: requests of the busiest replica over the mean of all."""

    routing: str
    replicas: int
    seconds: float
    output_tokens_per_second: float
    hit_rate: float
    computed_tokens: int
    worst_share: float
    first_token: dict[str, float]
    request: dict[str, float]

    def values(self) -> dict[str, Any]:
        return asdict(self)


def fleet_workload(name: str, count: int, rate: float | None, seed: int, vocab_size: int, max_len: int, replicas: int) -> Workload:
    """A mix by its name. Conversations (chats) and system prompts (shared_prompt) are as many as for one engine, or
    SHARED for each replica if that is more: with fewer there would be nothing to route by."""
    shared = max(8, SHARED * replicas)
    if name == "chats":
        return chats(count, rate, seed, vocab_size, max_len, num_open=shared)
    if name == "shared_prompt":
        return shared_prompt(count, rate, seed, vocab_size, max_len, num_heads=shared)
    return make(name, count, rate, seed, vocab_size, max_len)


def simulate_fleet(workload: Workload, setup: Setup, replicas: int, routing: str, cost: Cost | None = None, seed: int = 0) -> FleetReport:
    """Serve a workload on equal replicas. Raises ConfigError for a routing or number of them that makes no sense."""
    setup = setup.decided()
    router = Router(routing, replicas, setup.block_size, seed)
    per_step = cost or setup.roofline()
    engines = [Simulator(setup.scheduler(), per_step) for _ in range(replicas)]
    served = [0] * replicas
    busy: set[int] = set()
    for request in workload.requests:
        for number in sorted(busy):
            _advance(engines[number], request.arrival)
            router.load[number] = _load(engines[number])
            if not router.load[number]:
                busy.discard(number)
        chosen = router.route(request.prompt)
        engines[chosen].now = max(engines[chosen].now, request.arrival)
        engines[chosen].add(request)
        router.load[chosen] += 1
        served[chosen] += 1
        busy.add(chosen)
    for engine in engines:
        _advance(engine, float("inf"))
    times = [t for engine in engines for t in engine.times]
    return FleetReport(
        routing=routing,
        replicas=replicas,
        seconds=max(engine.now for engine in engines),
        output_tokens_per_second=metrics.throughput(times).output_tokens,
        hit_rate=sum(engine.cached_tokens for engine in engines) / sum(t.num_prompt for t in times),
        computed_tokens=sum(engine.computed_tokens for engine in engines),
        worst_share=max(served) * replicas / len(workload.requests),
        first_token=metrics.percentiles([t.ttft for t in times]),
        request=metrics.percentiles([t.latency for t in times]),
    )


def _advance(engine: Simulator, until: float) -> None:
    while engine.now < until and engine.scheduler.has_unfinished():
        engine.step()


def _load(engine: Simulator) -> int:
    return len(engine.scheduler.running) + len(engine.scheduler.waiting)
