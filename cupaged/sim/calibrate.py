"""Calibrate: the cost of a step on this computer, fitted to one real run, to predict others.

    real run, all at once     -> seconds of every step
    the same run, simulated   -> the Work of every step: the scheduler is the same, so the steps are
    seconds ~ fixed + a x tokens + b x sampled + c x context + d x sequences        (none of them negative)

The fit minimises relative errors, so that short steps count as much as long ones. A prediction is a simulation with the
fitted cost; it is worth something only for another workload than the one it was fitted to.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cupaged.engine import Engine
from cupaged.errors import CupagedError, WorkloadError
from cupaged.params import SamplingParams
from cupaged.presets import DEVICES, ModelShape
from cupaged.sim.cost import Work
from cupaged.sim.report import Report, simulate
from cupaged.sim.setup import Setup
from cupaged.sim.simulator import Simulator, Step
from cupaged.step_plan import StepRecord
from cupaged.workloads.lengths import Lengths
from cupaged.workloads.request import TraceRequest, Workload

FEATURES = ("fixed", "tokens", "sampled", "context", "sequences")


@dataclass(frozen=True)
class FittedCost:
    """Seconds of a step as a sum: fixed, and for each token, each row of logits, each token of context, each sequence."""

    fixed: float
    tokens: float
    sampled: float
    context: float
    sequences: float

    def seconds(self, work: Work) -> float:
        return self.fixed + self.tokens * work.tokens + self.sampled * work.sampled + self.context * work.context + self.sequences * work.sequences


@dataclass(frozen=True)
class Comparison:
    """A workload as it was predicted and as it went. Seconds, and output tokens a second."""

    predicted_seconds: float
    measured_seconds: float
    output_tokens: int

    @property
    def predicted(self) -> float:
        return self.output_tokens / self.predicted_seconds

    @property
    def measured(self) -> float:
        return self.output_tokens / self.measured_seconds

    @property
    def error(self) -> float:
        """Of the predicted throughput, as a share of the measured one; above 0: the prediction was too fast."""
        return self.predicted / self.measured - 1


def calibration_workload(vocab_size: int, max_len: int, max_num_seqs: int, seed: int = 1) -> Workload:
    """What is measured: a full batch of short requests, so that steps of every size occur in some seconds."""
    rng = np.random.default_rng(seed)
    prompts = Lengths(min(64.0, max_len / 4)).draw(max_num_seqs, max(1, max_len // 2), rng)
    outputs = np.linspace(2, max(2, min(48, max_len // 4)), max_num_seqs).astype(int)
    requests = [TraceRequest(0.0, rng.integers(0, vocab_size, int(p), np.int32), int(o)) for p, o in zip(prompts, outputs, strict=True)]
    return Workload.of("calibration", seed, requests, max_len)


def setup_of(engine: Engine) -> Setup:
    """The engine's own limits, to be simulated."""
    config = engine.config
    return Setup(
        ModelShape.of(engine.model_name, engine.model_config), DEVICES["cpu"], num_blocks=config.num_blocks, block_size=config.block_size,
        max_len=config.max_model_len, max_num_seqs=config.step_seqs, max_num_batched_tokens=config.step_tokens,
        prefix_cache=config.prefix_cache, eviction=config.eviction, queue=config.queue,
    )  # fmt: skip


def run_really(engine: Engine, workload: Workload) -> tuple[float, list[float]]:
    """Serve a workload on an engine, all at once: seconds in all, and of each step with what lies between it and the next."""
    ends: list[float] = []

    def observe(record: StepRecord) -> None:
        ends.append(time.perf_counter())

    if any(request.width > 1 for request in workload.requests):
        raise WorkloadError("a run to compare with has one answer a request: leave n and beams out of the workload")
    engine.reset_prefix_cache()  # as cold as the simulated one
    for request in workload.requests:
        params = SamplingParams(temperature=0, max_tokens=request.num_output, ignore_eos=True)
        engine.add_request(request.prompt.tolist(), params)
    engine.observers.append(observe)
    started = time.perf_counter()
    while engine.has_unfinished():
        engine.step()
    engine.observers.remove(observe)
    return time.perf_counter() - started, np.diff([started, *ends]).tolist()


def steps_of(setup: Setup, workload: Workload) -> list[Work]:
    """The work of every step, when all requests are there at the start."""
    steps: list[Step] = []
    simulator = Simulator(setup.scheduler(), FittedCost(1.0, 0.0, 0.0, 0.0, 0.0), steps.append)
    simulator.run(workload.at_once().requests)
    return [step.work for step in steps]


def fit(works: Sequence[Work], seconds: Sequence[float]) -> FittedCost:
    """Least squares of the relative errors over costs that are not negative. Raises CupagedError for too few steps."""
    if len(works) != len(seconds) or len(works) < len(FEATURES):
        raise CupagedError(f"a cost cannot be fitted to {len(seconds)} measured and {len(works)} simulated steps")
    rows = np.array([[1.0, w.tokens, w.sampled, w.context, w.sequences] for w in works]) / np.array(seconds)[:, None]
    kept, found = list(range(len(FEATURES))), np.zeros(len(FEATURES))
    while kept:
        scale = np.abs(rows[:, kept]).max(axis=0)
        values = np.linalg.lstsq(rows[:, kept] / scale, np.ones(len(rows)), rcond=None)[0] / scale
        if (values >= 0).all():
            found[kept] = values
            break
        kept.pop(int((values * scale).argmin()))
    return FittedCost(*found.tolist())


def calibrate(engine: Engine, seed: int = 1, repeat: int = 3) -> FittedCost:
    """Measure this computer with an engine, which takes some seconds.

    The run is repeated, and of each step its fastest time counts: what else the computer did is not a step's cost.
    """
    setup = setup_of(engine).decided()
    assert setup.max_len is not None
    warm_up = TraceRequest(0.0, np.zeros(min(32, setup.max_len - 2), np.int32), 2)  # compiles, and touches all weights once
    run_really(engine, Workload.of("warm-up", seed, [warm_up]))
    workload = calibration_workload(setup.model.vocab_size, setup.max_len, setup.max_num_seqs, seed)
    runs = [run_really(engine, workload)[1] for _ in range(repeat)]
    return fit(steps_of(setup, workload), np.min(runs, axis=0).tolist())


def compare(engine: Engine, cost: FittedCost, workload: Workload) -> tuple[Comparison, Report]:
    """Predict a workload, all at once, then run it."""
    report = simulate(workload.at_once(), setup_of(engine), cost, states_every=0)
    seconds, _ = run_really(engine, workload)
    return Comparison(report.seconds, seconds, sum(r.num_output for r in workload.requests)), report
