"""Lab: what a benchmark works with. It opens engines and makes workloads as the user wants them, and tells how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cupaged.bench.runner import Run, serve, serve_one_by_one
from cupaged.engine import Engine
from cupaged.errors import WorkloadError
from cupaged.params import SamplingParams
from cupaged.workloads import arrivals, generators, trace
from cupaged.workloads.lengths import ALPACA, SHAREGPT
from cupaged.workloads.request import Workload

PAPER_LONGEST = 2048
"""Longest sequence of the models in the PagedAttention paper: its lengths are scaled by max_model_len over this."""

DATASETS = {"sharegpt": SHAREGPT, "alpaca": ALPACA}

OpenEngine = Callable[[dict[str, Any]], Engine]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Choices:
    """What the user chose; None: the benchmark's default.

    requests   how many; values: what the benchmark varies
    rate       arrivals a second; bursts: the spread of the gaps between them, in mean gaps (1: Poisson)
    workload   a mix's name; trace: a file of one's own requests instead
    engine     EngineConfig's fields that were given
    """

    requests: int | None = None
    rate: float | None = None
    bursts: float | None = None
    seed: int = 0
    values: tuple[float, ...] | None = None
    workload: str | None = None
    trace: Path | None = None
    engine: dict[str, Any] = field(default_factory=dict)


class Lab:
    """`defaults` are the benchmark's; what the user chose wins over them, and what the benchmark varies wins over both."""

    def __init__(self, open_engine: OpenEngine, choices: Choices, defaults: Choices, progress: Progress | None = None) -> None:
        self._open, self.choices, self._defaults = open_engine, choices, defaults
        self._progress = progress or (lambda stage, done, total: None)
        self.workloads: list[Workload] = []
        for name in ("requests", "rate", "bursts"):
            value = getattr(choices, name)
            if value is not None and not value > 0:
                raise WorkloadError(f"--{name} must be above 0, not {value:g}")

    # ---- choices

    @property
    def requests(self) -> int:
        return self.choices.requests or self._defaults.requests or 1

    @property
    def rate(self) -> float | None:
        """Arrivals a second; None: all at once."""
        return self.choices.rate or self._defaults.rate

    @property
    def seed(self) -> int:
        return self.choices.seed

    @property
    def values(self) -> tuple[float, ...]:
        return self.choices.values or self._defaults.values or ()

    @property
    def whole_values(self) -> tuple[int, ...]:
        """Raises WorkloadError for a value that is no whole number from 1 on."""
        for value in self.values:
            if value < 1 or value != int(value):
                raise WorkloadError(f"--values takes whole numbers from 1 on here, not {value:g}")
        return tuple(int(value) for value in self.values)

    def option(self, name: str) -> Any:
        """An engine option as it stands before the benchmark varies anything."""
        return (self._defaults.engine | self.choices.engine).get(name)

    @property
    def max_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        return int(self.option("max_model_len"))

    # ---- engines

    def engine(self, **varied: Any) -> Engine:
        """A warm engine (its kernels are compiled, its cache is empty). Raises WorkloadError for a pool too small for it."""
        options = self._defaults.engine | self.choices.engine | varied
        pool = options.get("num_blocks")
        block, longest = options.get("block_size", 16), options.get("max_model_len")
        if isinstance(pool, int) and isinstance(longest, int) and 0 < pool * block < longest:
            raise WorkloadError(
                f"the pool is smaller than a request: {pool} blocks of {block} tokens against {longest} tokens"
                " (--max-model-len): raise --num-blocks or lower --max-model-len"
            )
        engine = self._open(options)
        engine.add_request([1] * 8, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        while engine.has_unfinished():
            engine.step()
        engine.reset_prefix_cache()
        return engine

    # ---- workloads

    def workload(self, vocab_size: int, rate: float | None = None, at_once: bool = False) -> Workload:
        """The user's workload, or the benchmark's; remembered for the result file.

        It arrives at `rate`, all at once, or as the user has it; a trace keeps its own times where no rate is given.
        """
        spread = self.choices.bursts
        if self.choices.trace is not None:
            rate, spread = rate or self.choices.rate, spread or 1.0
            made = trace.read_jsonl(self.choices.trace, vocab_size, self.seed)
        else:
            rate = None if at_once else rate or self.rate
            made = self._mix(vocab_size, rate)
        if at_once:
            made = made.at_once()
        elif rate and spread:
            made = made.arriving(arrivals.bursty(rate, len(made.requests), self.rng(), spread))
        self.remember(made)
        return made

    def _mix(self, vocab_size: int, rate: float | None) -> Workload:
        """Lengths of sharegpt and alpaca keep the paper's ratio to the longest sequence."""
        name = self.choices.workload or self._defaults.workload or "sharegpt"
        if name not in DATASETS:
            return generators.make(name, self.requests, rate, self.seed, vocab_size, self.max_len)
        dataset = DATASETS[name].scaled(self.max_len / PAPER_LONGEST)
        return generators.independent(name, dataset, self.requests, rate, self.seed, vocab_size, self.max_len)

    def remember(self, workload: Workload) -> None:
        """Save this workload with the result."""
        self.workloads.append(workload)

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    # ---- runs

    def serve(self, engine: Engine, workload: Workload, label: str) -> Run:
        """In real time, from a cache as it is."""
        return serve(engine, workload, lambda done, total: self._progress(label, done, total))

    def serve_one_by_one(self, engine: Engine, workload: Workload, label: str) -> Run:
        return serve_one_by_one(engine, workload, lambda done, total: self._progress(label, done, total))
