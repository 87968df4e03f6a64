"""The benchmarks' runner and their arithmetic: arrivals in real time, every figure against a case worked out by hand."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from cupaged.bench.baseline import StatesWatch, contiguous, system
from cupaged.bench.hits import _alone, _waiting
from cupaged.bench.lab import Choices, Lab
from cupaged.bench.memory import shares_of
from cupaged.bench.runner import Moment, Run, serve, serve_one_by_one
from cupaged.bench.serving import rates, sustained_rate
from cupaged.bench.sharing import articles_example, blocks_saved
from cupaged.bench.stand_in import stand_in
from cupaged.cache.states import MemoryStates
from cupaged.errors import RequestError, WorkloadError
from cupaged.step_plan import StepRecord
from cupaged.workloads.generators import make
from cupaged.workloads.metrics import RequestTimes
from cupaged.workloads.request import TraceRequest, Workload
from tests.support.scripted import ScriptedModel, make_engine


def record(**changes: int | float) -> StepRecord:
    names = StepRecord.__slots__  # type: ignore[attr-defined]
    return StepRecord(**(dict.fromkeys(names, 0) | changes))  # type: ignore[arg-type]


def workload(*requests: TraceRequest) -> Workload:
    return Workload.of("mine", 3, requests)


def request(arrival: float = 0.0, prompt: int = 3, output: int = 4, **more: int) -> TraceRequest:
    return TraceRequest(arrival, np.arange(1, prompt + 1, dtype=np.int32), output, None, **more)


# Runs


def test_everybody_is_served_in_full_whatever_the_model_says() -> None:
    engine = make_engine(ScriptedModel(default=[1, 0]))  # 0 is the end of text, and ignored
    seen: list[tuple[int, int]] = []
    run = serve(engine, workload(request(output=4), request(prompt=5, output=2)), lambda done, total: seen.append((done, total)))
    assert [(t.num_prompt, t.num_output) for t in run.times] == [(3, 4), (5, 2)]
    assert sorted(map(len, run.answers)) == [2, 4]
    assert len(run.gaps) == 3 + 1
    assert run.prompt == 8
    assert run.computed == 3 + 5 + 3 + 1 - run.cached
    assert seen == [(1, 2), (2, 2)]
    assert not engine.observers
    assert not engine.has_unfinished()


def test_a_requests_clock_starts_when_it_was_meant_to_arrive() -> None:
    model = ScriptedModel()
    model.before_run = lambda plan: time.sleep(0.06)
    run = serve(make_engine(model), workload(request(0.0, output=2), request(0.03, output=1)))
    first, second = run.times
    assert (first.arrival, second.arrival) == (0.0, 0.03)
    assert 0.06 <= first.ttft < 0.11
    assert 0.08 <= second.ttft < 0.14  # the rest of the first step, and a step of its own
    assert run.moments[0].record.num_waiting == 0


def test_nothing_is_done_before_the_first_arrival() -> None:
    started = time.perf_counter()
    run = serve(make_engine(ScriptedModel()), workload(request(0.08)))
    assert time.perf_counter() - started >= 0.08
    assert run.times[0].ttft < 0.05
    assert run.seconds < 0.08


def test_samples_and_beams_are_served() -> None:
    run = serve(make_engine(ScriptedModel(), pieces=None), workload(request(n=3), request(beams=2)))
    assert [t.num_answers for t in run.times] == [3, 2]
    assert run.gaps == []
    assert run.moments[-1].record.blocks_total == 64


def test_a_request_longer_than_the_longest_sequence_is_refused_before_anything_runs() -> None:
    model = ScriptedModel()
    with pytest.raises(WorkloadError, match=r"132 tokens is longer than the longest sequence \(128 tokens\)"):
        serve(make_engine(model), workload(request(), request(5.0, prompt=128)))
    assert model.plans == []


def test_a_run_that_fails_leaves_nothing_behind() -> None:
    engine = make_engine(ScriptedModel(), num_blocks=2, block_size=4)
    with pytest.raises(RequestError, match="the pool has 2"):
        serve(engine, workload(request(), request(prompt=9)))
    assert not engine.has_unfinished()
    assert not engine.observers
    assert len(serve(engine, workload(request())).times) == 1


def test_one_by_one_nobody_waits_for_another() -> None:
    run = serve_one_by_one(make_engine(ScriptedModel()), workload(request(0.0), request(99.0)))
    assert [m.record.num_running + m.record.num_finished for m in run.moments] == [1] * len(run.moments)
    assert [t.arrival for t in run.times] == [0.0, 0.0]
    assert run.cached == 2  # all but the last token of the prompt
    assert run.hit_rate == 2 / 6


# Figures


def test_a_runs_figures() -> None:
    run = Run(
        times=[RequestTimes(0.0, 0.5, 2.0, 3, 4), RequestTimes(1.0, 2.0, 5.0, 3, 3, num_answers=2)],
        moments=[
            Moment(1.0, record(num_tokens=6, num_running=1, blocks_used=2, slots_used=6, num_preempted=1)),
            Moment(5.0, record(num_tokens=2, num_running=2, blocks_used=3, slots_used=9, blocks_shared=5, num_finished=1)),
        ],
    )
    assert run.seconds == 5.0
    assert run.output_rate == (4 + 6) / 5
    assert run.computed == 8
    assert run.preemptions == 1
    assert run.mean_running == 2.0  # who finished in a step was running in it
    assert run.token_share(4) == 15 / 20
    assert blocks_saved(run) == 5 / 10


@pytest.mark.parametrize(("limit", "expected"), [(0.5, 1.0), (1.0, 1.0), (2.0, 2.0), (3.0, 2.5), (4.0, 3.0), (9.0, 3.0)])
def test_sustained_rate_is_interpolated(limit: float, expected: float) -> None:
    assert sustained_rate([1.0, 2.0, 3.0], [1.0, 2.0, 4.0], limit) == pytest.approx(expected)


def test_the_articles_beams() -> None:
    of_prompt, of_all = articles_example(0, prompt=128, output=32)
    assert of_prompt == 3 / 4  # three of four copies of each of the prompt's blocks
    assert of_all == pytest.approx(24 / (8 + 4 * 2 + 24))


# Stand-ins and baselines


def test_a_stand_in_says_the_same_for_a_seed() -> None:
    answers = [serve(stand_in(64, seed, max_model_len=128), workload(request(output=20))).answers for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize(("name", "running"), [("paged", 8), ("oracle", 8), ("pow2", 4), ("max", 2)])
def test_a_contiguous_engine_runs_what_its_reservations_let_it(name: str, running: int) -> None:
    engine = system(make_engine(ScriptedModel(), num_blocks=16, block_size=4, max_model_len=32, prefix_cache=False), name)
    run = serve(engine, workload(*(request(prompt=3, output=5) for _ in range(10))))
    assert max(m.record.num_running + m.record.num_finished for m in run.moments) == running
    assert len(run.times) == 10


def test_the_states_of_the_pool_add_up_in_every_step() -> None:
    for name in ("paged", "max", "pow2", "oracle"):
        engine = system(make_engine(ScriptedModel(), num_blocks=16, block_size=4, max_model_len=32), name)
        with StatesWatch(engine) as watch:
            run = serve(engine, workload(*(request(prompt=3 + i, output=5 + i) for i in range(6))))
        assert len(watch.states) == len(run.moments)
        for states in watch.states:
            assert states.token_states + states.reservation + states.internal + states.external + states.cached == states.pool == 64
        states_after = len(watch.states)
        serve(engine, workload(request()))
        assert len(watch.states) == states_after  # it watches no longer


def test_the_states_of_one_request_step_by_step() -> None:
    engine = system(make_engine(ScriptedModel(), num_blocks=16, block_size=4, max_model_len=32), "max")
    with StatesWatch(engine) as watch:
        serve(engine, workload(request(prompt=3, output=3)))
    # 32 of 64 slots are reserved for 3 + 3 tokens, of which the last is never computed
    assert [(s.token_states, s.reservation, s.internal, s.external) for s in watch.states] == [(3, 2, 27, 32), (4, 1, 27, 32), (5, 0, 27, 32)]


def test_shares_of_the_pool() -> None:
    states = [MemoryStates(100, 30, 10, 10, 50), MemoryStates(100, 50, 0, 20, 30)]
    assert shares_of(states) == pytest.approx({"token_states": 40, "reservation": 5, "internal": 15, "external": 40, "of held": 80 / 1.2})


def test_hits_are_counted_with_the_policy_that_is_named() -> None:
    mine = lab(engine={"max_model_len": 256})
    hostile = make("adversarial_prefixes", 60, None, 0, 1000, 256)
    assert _alone(mine, hostile, 80, "weighted").hit_rate > 2 * _alone(mine, hostile, 80, "lru").hit_rate
    trees = make("few_shot_trees", 32, None, 0, 1000, 256)
    runs = {order: _waiting(mine, trees, 32, order) for order in ("fcfs", "dfs")}
    assert runs["dfs"].hit_rate > 1.2 * runs["fcfs"].hit_rate
    assert {m.record.num_running + m.record.num_finished for m in runs["dfs"].moments} == {1}


def test_a_contiguous_engine_computes_what_the_paged_one_does() -> None:
    model = ScriptedModel(default=[1, 2, 3])
    asked = workload(*(request(prompt=3 + i, output=6) for i in range(4)))
    paged = serve(make_engine(model, prefix_cache=False), asked)
    other = serve(contiguous(make_engine(model, prefix_cache=False), "pow2"), asked)
    assert paged.answers == other.answers


# The lab


def lab(**chosen: object) -> Lab:
    defaults = Choices(requests=5, rate=2.0, values=(1.0, 2.0), engine={"max_model_len": 64, "num_blocks": 32, "block_size": 4})
    return Lab(lambda options: make_engine(ScriptedModel(), **options), Choices(**chosen), defaults)  # type: ignore[arg-type]


def test_the_user_wins_over_the_benchmark_and_what_is_varied_over_both() -> None:
    mine = lab(engine={"num_blocks": 48, "block_size": 8}, requests=7)
    engine = mine.engine(block_size=2, num_blocks=40)
    assert (engine.config.block_size, engine.config.num_blocks, engine.config.max_model_len) == (2, 40, 64)
    assert mine.requests == 7
    assert len(mine.workload(50).requests) == 7
    assert mine.workload(50).describe()["name"] == "sharegpt"


def test_an_engine_is_warm_and_its_cache_is_cold() -> None:
    engine = lab().engine()
    assert serve(engine, workload(TraceRequest(0.0, np.ones(8, np.int32), 1))).cached == 0


def test_bursts_move_the_same_requests() -> None:
    calm, bursty = lab(requests=400).workload(50), lab(requests=400, bursts=4.0).workload(50)
    assert [r.prompt.tolist() for r in calm.requests] == [r.prompt.tolist() for r in bursty.requests]
    spreads = [np.std(gaps) / np.mean(gaps) for gaps in (np.diff([r.arrival for r in w.requests]) for w in (calm, bursty))]
    assert spreads[0] < 1.3
    assert spreads[1] > 2.5


def test_a_trace_arrives_at_a_rate_that_is_given_and_else_at_its_own_times(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(f'{{"prompt_tokens": 3, "output": {1 + i % 4}, "arrival": {5 * i}}}\n' for i in range(400)))

    def found(rate: float | None = None, at_once: bool = False, **chosen: object) -> list[float]:
        made = lab(trace=path, **chosen).workload(50, rate, at_once)
        assert [r.num_output for r in made.requests] == [1 + i % 4 for i in range(400)]
        return [r.arrival for r in made.requests]

    own = [5.0 * i for i in range(400)]
    assert found() == own
    assert found(at_once=True) == [0.0] * 400
    assert 400 / found(rate=8.0)[-1] == pytest.approx(8.0, rel=0.15)
    assert found(rate=8.0) == found(rate=8.0) != found(rate=9.0)


def test_the_users_rate_moves_a_trace_and_the_capacity_has_none(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt_tokens": 3, "output": 2, "arrival": 40}\n' * 6)
    mine = lab(trace=path, rate=50.0)
    assert 0 < mine.workload(50).requests[-1].arrival < 1
    assert mine.workload(50, at_once=True).requests[-1].arrival == 0
    assert lab(rate=50.0).workload(50, at_once=True).requests[-1].arrival == 0


def test_rates_of_a_trace_are_rates(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt_tokens": 3, "output": 2, "arrival": 40}\n' * 6)
    mine = lab(trace=path, values=(1.0, 4.0))
    report = rates(mine)
    capacity, *offered = mine.workloads
    assert capacity.requests[-1].arrival == 0
    assert report.figures["offered"] == pytest.approx([report.figures["capacity"], 4 * report.figures["capacity"]])
    ends = [w.requests[-1].arrival for w in offered]
    assert ends[0] == pytest.approx(4 * ends[1])
    assert ends[:2] == ends[2:]


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ({"requests": 0}, "--requests must be above 0, not 0"),
        ({"rate": 0.0}, "--rate must be above 0, not 0"),
        ({"rate": float("nan")}, "--rate must be above 0"),
    ],
)
def test_a_choice_of_nothing_is_refused(chosen: dict[str, object], says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        lab(**chosen)


def test_a_pool_smaller_than_a_request_is_refused() -> None:
    with pytest.raises(WorkloadError, match="the pool is smaller than a request: 3 blocks of 4 tokens against 64"):
        lab(engine={"num_blocks": 3}).engine()


def test_values_are_whole_where_they_must_be() -> None:
    assert lab(values=(4.0, 8.0)).whole_values == (4, 8)
    with pytest.raises(WorkloadError, match=r"whole numbers from 1 on here, not 1\.5"):
        _ = lab(values=(1.5,)).whole_values
