"""Calibration: the simulated steps are the engine's own, a known cost is found again, and a real prediction holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged import LLM
from cupaged.engine import Engine
from cupaged.errors import CupagedError, WorkloadError
from cupaged.sim.calibrate import (
    Comparison,
    FittedCost,
    calibrate,
    calibration_workload,
    compare,
    fit,
    run_really,
    setup_of,
    steps_of,
)
from cupaged.sim.cost import Work
from cupaged.step_plan import StepRecord
from cupaged.workloads.generators import make
from cupaged.workloads.request import TraceRequest, Workload
from tests.support.scripted import ScriptedModel, make_engine

COST = FittedCost(fixed=0.01, tokens=0.002, sampled=0.001, context=1e-5, sequences=0.0)


def stand_in(**options: Any) -> Engine:
    return make_engine(ScriptedModel(), pieces=None, num_blocks=40, block_size=4, max_model_len=100, eos_token_ids=(), **options)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8, "max_num_seqs": 4}, {"prefix_cache": False}])
def test_the_simulated_steps_are_the_engine_s(options: dict[str, Any]) -> None:
    """Chunked, preempted, cached: the same scheduler on the same workload takes the same steps, whatever they last."""
    engine = stand_in(**options)
    workload = make("few_shot_trees", 30, 5.0, 0, 64, 100)
    records: list[StepRecord] = []
    engine.observers.append(records.append)
    seconds, steps = run_really(engine, workload)
    works = steps_of(setup_of(engine), workload)
    assert [(w.tokens, w.sampled) for w in works] == [(r.num_tokens, r.num_sampled) for r in records]
    assert len(steps) == len(records)
    assert sum(steps) <= seconds


def test_a_known_cost_is_found_again() -> None:
    works = steps_of(setup_of(stand_in()), calibration_workload(64, 100, 16))
    found = fit(works, [COST.seconds(work) for work in works])
    assert found.fixed == pytest.approx(COST.fixed, rel=1e-3)
    assert found.tokens == pytest.approx(COST.tokens, rel=1e-3)
    assert found.context == pytest.approx(COST.context, rel=1e-2)


def test_a_part_that_would_come_out_negative_is_left_out() -> None:
    works = [Work(n, n, n, 100 - n, 0, 0) for n in range(1, 20)]
    found = fit(works, [0.001 * work.tokens for work in works])
    assert min(found.fixed, found.tokens, found.sampled, found.context, found.sequences) >= 0
    assert sum(found.seconds(work) for work in works) == pytest.approx(0.001 * sum(w.tokens for w in works), rel=0.05)


def test_too_few_steps_and_several_answers_are_refused() -> None:
    with pytest.raises(CupagedError, match="cannot be fitted"):
        fit([Work(1, 1, 1, 1, 1, 0)], [1.0])
    two = Workload.of("two", 0, [TraceRequest(0.0, np.arange(4, dtype=np.int32), 2, n=2)])
    with pytest.raises(WorkloadError, match="one answer"):
        run_really(stand_in(), two)


def test_an_error_is_of_the_throughput() -> None:
    found = Comparison(predicted_seconds=8.0, measured_seconds=10.0, output_tokens=100)
    assert (found.predicted, found.measured, found.error) == (12.5, 10.0, pytest.approx(0.25))


def test_an_engine_is_warmed_before_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[str] = []

    def watched(engine: Engine, workload: Workload) -> tuple[float, list[float]]:
        served.append(workload.name)
        return run_really(engine, workload)

    monkeypatch.setattr("cupaged.sim.calibrate.run_really", watched)
    calibrate(stand_in(), repeat=2)
    assert served == ["warm-up", "calibration", "calibration"]


@pytest.mark.slow
def test_this_computer_is_predicted(smollm2_path: Path) -> None:
    """Within 15 % when nothing else runs here; a busy machine is given twice as much."""
    llm = LLM(str(smollm2_path), max_model_len=1024)
    found, _ = compare(llm.engine, calibrate(llm.engine), make("sharegpt", 6, None, 3, 49152, 600))
    assert abs(found.error) < 0.3
