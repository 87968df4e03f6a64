"""The simulator: hand-computed times, the engine's own steps, slots that add up, the same result for a seed, one line for nonsense."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged.cli.main import run
from cupaged.errors import ConfigError, CupagedError, RequestError
from cupaged.presets import DEVICES, MODELS, Device, ModelShape
from cupaged.sim.cost import Roofline, Work
from cupaged.sim.report import simulate
from cupaged.sim.setup import ALLOCATIONS, BATCHINGS, Setup
from cupaged.sim.simulator import Simulator, Step
from cupaged.workloads.generators import make
from cupaged.workloads.request import TraceRequest, Workload

TINY = ModelShape("tiny", 100, 4, 6, 2, 2, 1, 2, 64)
SLOW = Device("slow", 1 << 20, bandwidth=1000.0, flops=1e9, dtype="bfloat16")


class OneSecond:
    """Every step takes a second."""

    def seconds(self, work: Work) -> float:
        return 1.0


def setup(**fields: Any) -> Setup:
    return Setup(**({"model": TINY, "device": SLOW, "num_blocks": 64, "block_size": 4, "max_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 32} | fields))


def workload(*requests: TraceRequest) -> Workload:
    return Workload.of("by hand", 0, requests, 64)


def asked(arrival: float, prompt: int, output: int, **fields: Any) -> TraceRequest:
    return TraceRequest(arrival, np.arange(prompt, dtype=np.int32) + round(1000 * arrival), output, **fields)


# ---- by hand


def test_times_of_three_requests_by_hand() -> None:
    """A second a step. The first has 3 tokens by 3.0; the second comes at 0.5, joins at 1.0 and has its 2 by 3.0; at 10.0 one
    more comes and finds nobody."""
    report = simulate(workload(asked(0.0, 4, 3), asked(0.5, 4, 2), asked(10.0, 4, 1)), setup(), OneSecond(), states_every=1)
    times = [(t.arrival, t.first_token, t.finished, t.num_output) for t in report.times]
    assert times == [(0.0, 1.0, 3.0, 3), (0.5, 2.0, 3.0, 2), (10.0, 11.0, 11.0, 1)]
    assert (report.seconds, report.busy_seconds, report.steps) == (11.0, 4.0, 4)
    assert report.requests_per_second == pytest.approx(3 / 11)
    assert report.output_tokens_per_second == pytest.approx(6 / 11)
    # under load (more is to come, until the last one has come): one, two and two requests in the first three seconds
    assert report.mean_batch == pytest.approx((1 + 2 + 2) / 3)
    assert report.computed_tokens == (4 + 2) + (4 + 1) + 4, "the last token of an answer is not computed"


def test_a_long_prompt_is_computed_in_pieces() -> None:
    report = simulate(workload(asked(0.0, 40, 2)), setup(max_num_batched_tokens=16), OneSecond())
    assert [(t.first_token, t.finished) for t in report.times] == [(3.0, 4.0)]


def test_the_roofline_by_hand() -> None:
    """Weights: (2 layers x 120 + 2 x 400) x 2 bytes. A token of KV: 2 x 2 x 1 x 2 x 2 = 16 bytes."""
    roofline = Roofline(TINY, SLOW, dtype="bfloat16", kv_cache_dtype="bfloat16", block_size=4, overhead=0.25)
    work = Work(tokens=3, sampled=1, sequences=2, context=10, looked_at=12, copied=1)
    parts = roofline.parts(work)
    assert parts["memory"] == pytest.approx((2080 + 16 * (10 + 3) + 2 * 4 * 16) / 1000)
    assert parts["compute"] == pytest.approx((2 * (3 * 2 * 120 + 400) + 4 * 2 * 2 * 2 * 12) / 1e9)
    assert roofline.seconds(work) == pytest.approx(parts["memory"] + 0.25)
    halved = Roofline(TINY, SLOW, dtype="bfloat16", kv_cache_dtype="bfloat16", block_size=4, gpus=2).parts(work)
    assert halved["memory"] == pytest.approx(parts["memory"] / 2)


def test_work_of_a_plan_by_hand() -> None:
    """Two requests whose prompts of 5 and 3 tokens are computed at once, then a token each."""
    steps: list[Step] = []
    Simulator(setup().scheduler(), OneSecond(), steps.append).run([asked(0.0, 5, 2), asked(0.0, 3, 2)])
    assert steps[0].work == Work(8, 2, 2, 8, 15 + 6, 0)
    assert steps[1].work == Work(2, 2, 2, 6 + 4, 6 + 4, 0)


def test_samples_share_their_prompt_and_beams_end() -> None:
    report = simulate(workload(asked(0.0, 8, 5, n=3), asked(0.0, 6, 4, beams=2)), setup(prefix_cache=False), OneSecond())
    assert sorted((t.num_answers, t.num_output) for t in report.times) == [(1, 4), (3, 5)]
    assert report.computed_tokens == 8 + 3 * 4 + 6 + 2 * 3


def test_a_prefix_is_computed_once_and_invented_tokens_share_nothing() -> None:
    same = [asked(0.0, 16, 4), TraceRequest(20.0, asked(0.0, 16, 4).prompt, 4)]
    assert simulate(workload(*same), setup(), OneSecond()).cached_tokens == 15
    assert simulate(workload(*same), setup(prefix_cache=False), OneSecond()).cached_tokens == 0
    longer = TraceRequest(20.0, np.concatenate([same[0].prompt, np.arange(50, 58, dtype=np.int32)]), 4)
    assert simulate(workload(same[0], longer), setup(), OneSecond()).cached_tokens == 16


# ---- for any workload


REQUESTS = st.lists(st.tuples(st.floats(0, 20), st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=20)


@settings(max_examples=40, deadline=None)
@given(REQUESTS, st.sampled_from(ALLOCATIONS), st.sampled_from(BATCHINGS), st.booleans())
def test_everybody_is_served_and_slots_add_up_at_every_step(requests: list[tuple[float, int, int]], allocation: str, batching: str, prefix_cache: bool) -> None:
    steps: list[Step] = []
    world = setup(allocation=allocation, batching=batching, prefix_cache=prefix_cache)
    simulator = Simulator(world.scheduler(), world.roofline(), steps.append, states_every=1)
    given_ = workload(*(asked(arrival, prompt, output) for arrival, prompt, output in requests))
    simulator.run(given_.requests)
    assert len(simulator.times) == len(requests)
    assert all(t.arrival <= t.first_token <= t.finished for t in simulator.times)
    for before, step in zip([None, *steps], steps, strict=False):
        assert before is None or step.started >= before.started + before.seconds
        assert step.states is not None
        parts = dataclasses.astuple(step.states)
        assert min(parts) >= 0
        assert sum(parts[1:]) == parts[0] == 64 * 4, "token states and waste are the pool"
    simulator.scheduler.check_invariants()
    assert simulator.scheduler.cache.num_used == 0


def test_the_same_seed_gives_the_same_result_and_another_another() -> None:
    first, again, other = (
        simulate(make("alpaca", 60, 40.0, seed, 50272, 2048), Setup(MODELS["opt-13b"], DEVICES["a100-40gb"])).values() for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_mean_batch_obeys_little_s_law() -> None:
    """Requests in the system = rate x time that each spends there, whatever the policy: nobody waits here, so all are in the batch."""
    report = simulate(make("alpaca", 400, 4.0, 0, 50272, 2048), Setup(MODELS["opt-13b"], DEVICES["a100-40gb"], prefix_cache=False))
    in_system = sum(t.latency for t in report.times) / report.seconds
    assert report.mean_batch == pytest.approx(in_system, rel=0.05)


def test_prompts_are_computed_in_steps_of_their_own() -> None:
    """The second comes while the first answers, which waits for its step; with a shared budget they go on together."""
    asks = workload(asked(0.0, 4, 4), asked(1.5, 4, 2))
    mixed, apart = (simulate(asks, setup(batching=batching), OneSecond()) for batching in ("continuous", "separate"))
    assert [(t.first_token, t.finished) for t in mixed.times] == [(1.0, 4.0), (3.0, 4.0)]
    assert [(t.first_token, t.finished) for t in apart.times] == [(3.0, 4.0), (1.0, 5.0)]
    scheduler = setup(batching="separate").scheduler()
    simulator = Simulator(scheduler, OneSecond())
    kinds = set()
    for number in range(12):
        simulator.add(asked(float(number), 3 + 5 * (number % 8), 6))
        plan = scheduler.schedule()
        kinds.add(tuple(sorted({item.stop > len(item.token_ids) and item.num_tokens == 1 for item in plan.sequences})))
        scheduler.apply(plan, simulator._model.run(plan))
        scheduler.check_invariants()
    assert kinds == {(False,), (True,)}, "never both in one step"


# ---- nonsense


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"allocation": "heap"}, "allocation must be one of paged, max, pow2, oracle, demand"),
        ({"batching": "none"}, "continuous, separate, static"),
        ({"num_blocks": 3}, "pool is too small"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": 1 << 30}, "1,073,741,824 blocks"),
        ({"max_num_seqs": 64}, "max_num_batched_tokens"),
        ({"overhead": -1.0}, "overhead"),
        ({"queue": "lifo"}, "queue"),
        ({"eviction": "mru"}, "eviction"),
    ],
)
def test_a_setup_that_makes_no_sense_is_one_line(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as refusal:
        simulate(workload(asked(0.0, 4, 3)), setup(**fields))
    assert len(str(refusal.value).splitlines()) == 1


def test_a_request_larger_than_the_pool_is_one_line() -> None:
    with pytest.raises(RequestError, match="the pool has 16"):
        simulate(workload(asked(0.0, 60, 40)), setup(num_blocks=16))
    with pytest.raises(CupagedError, match="one sequence a request"):
        simulate(workload(asked(0.0, 6, 4, n=2)), setup(allocation="oracle"))


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--gpu", "b52"], "no device preset 'b52'"),
        (["--model", "opt13b"], "did you mean opt-13b"),
        (["--workload", "poems"], "no workload 'poems'"),
        (["--rate", "0"], "must be a positive number"),
        (["--requests", "0"], "at least 1 request"),
        (["--seed", "-1"], "--seed"),
        (["--memory", "100000TB"], "can be simulated"),
        (["--block-size", "0"], "block_size"),
        (["--tensor-parallel", "3"], "8 KV heads"),
        (["--kv-cache-dtype", "int3"], "kv_cache_dtype"),
        (["--replicas", "0"], "at least 1 replica"),
        (["--replicas", "2", "--routing", "astrology"], "random, least, prefix"),
        (["--model", "llama-3-70b"], "pool is too small"),
        (["--calibrate", "--rate", "2"], "leave --rate out"),
        (["--calibrate", "--model", "opt-13b"], "the preset opt-13b has no weights"),
        (["--calibrate", "--num-blocks", "64"], "--calibrate has no use for --num-blocks"),
        (["--calibrate", "--no-prefix-cache"], "--calibrate has no use for --prefix-cache"),
        (["--calibrate", "--queue", "fcfs"], "--calibrate has no use for --queue"),
        (["--calibrate", "--replicas", "2"], "--calibrate has no use for --replicas"),
        (["--replicas", "2", "--allocation", "max"], "--replicas has no use for --allocation"),
        (["--routing", "random"], "no --replicas) has no use for --routing"),
        (["--paper", "--gpu", "h100"], "--paper has no use for --gpu"),
        (["--paper", "--calibrate"], "--paper has no use for --calibrate"),
        (["--workload", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_the_command_refuses_in_one_line(args: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", *args]) in (1, 2)
    shown = capsys.readouterr().err.splitlines()
    assert line in shown[-1]
    assert len(shown) == 1 or shown[0].startswith("Usage:"), "click's own refusals also show the usage"


def test_the_command_simulates_allocations_and_speaks_json(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["simulate", "--model", "opt-13b", "--gpu", "a100-40gb", "--workload", "alpaca", "--requests", "20", "--no-prefix-cache"]
    assert run([*args, "--allocation", "all", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["allocation"] for row in rows] == list(ALLOCATIONS)
    assert all(sum(row["memory"].values()) == pytest.approx(1) for row in rows)
    assert run(args) == 0
    out = capsys.readouterr().out
    assert "mean batch" in out
    assert "preemptions" in out


def test_the_command_takes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "mine.jsonl"
    trace.write_text('{"prompt_tokens": 10, "output": 3}\n{"arrival": 1.5, "prompt": [1, 2], "output": 2}\n')
    assert run(["simulate", "--workload", str(trace), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workload"]["output_tokens"] == 5
    trace.write_text('{"prompt_tokens": 10}\n')
    assert run(["simulate", "--workload", str(trace)]) == 1
    assert capsys.readouterr().err.startswith(f"error: {trace}, line 1: output is")
