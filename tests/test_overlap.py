"""Overlapped steps: the same tokens as one by one, whatever is asked for and whatever goes wrong."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupaged import LLM, BeamSearchParams, EngineConfig, SamplingParams
from cupaged.engine import Engine
from cupaged.errors import ConfigError
from cupaged.step_plan import StepPlan, StepRecord
from tests.family_models import ROOT
from tests.support.integer_model import IntegerModel, LateOutput, expected_output
from tests.support.kernels import skip_without_compiler
from tests.support.life import Life
from tests.support.scripted import EOS, ScriptedModel, finish, make_engine

# ---- what happens when


class Watched(IntegerModel):
    """Notes what it was asked for."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.events: list[str] = []

    def submit(self, plan: StepPlan) -> LateOutput:
        self.events.append(f"submit {plan.step}")
        return super().submit(plan)

    def compute_next(self) -> None:
        self.events.append(f"compute {self.submitted[0].plan.step}")
        super().compute_next()


def life(num_blocks: int = 64, **options: Any) -> Life:
    made = Life(num_blocks, overlap=True, **options)
    made.model = made.engine._steps._runner = Watched(num_blocks, 4)
    return made


def test_the_next_step_is_asked_for_before_this_one_is_waited_for() -> None:
    it = life()
    it.add([1, 2, 3], 4)
    it.finish()
    assert it.model.events == [
        "submit 0", "submit 1", "compute 0", "submit 2", "compute 1", "submit 3", "compute 2", "compute 3",
    ]  # fmt: skip


def test_beams_are_computed_one_step_at_a_time() -> None:
    it = life()
    it.search([1, 2, 3], beam_width=2, max_tokens=3)
    it.finish()
    assert it.model.events == [f"{what} {step}" for step in range(3) for what in ("submit", "compute")]


def test_records_count_every_step_once() -> None:
    it = life()
    it.add([1, 2, 3], 4)
    it.finish()
    assert [(r.step, r.num_tokens, r.num_sampled, r.num_finished) for r in it.records] == [(0, 3, 1, 0), (1, 1, 1, 0), (2, 1, 1, 0), (3, 1, 1, 1)]
    assert [r.slots_used for r in it.records] == [3, 4, 5, 6]


def test_when_nobody_is_left_nothing_is_in_flight() -> None:
    model = ScriptedModel(default=[1, 2, EOS])
    engine = make_engine(model, overlap=True)
    for _ in range(3):
        engine.add_request("a", SamplingParams(max_tokens=50))
        assert finish(engine)[-1].outputs[0].token_ids == [1, 2, EOS]
        assert engine._scheduler.cache.num_used == 0
        engine._scheduler.check_invariants()
    assert len(model.plans) == 9  # the steps that were asked for in vain are not waited for
    name = engine.add_request("a", SamplingParams(max_tokens=50))
    engine.step()
    assert engine.abort(name).outputs[0].token_ids == [1]
    assert engine._scheduler.cache.num_used == 0


# ---- the same tokens


def mixture(seed: int) -> list[tuple[list[int], SamplingParams | BeamSearchParams]]:
    """Prompts with beginnings in common, asked for in many ways."""
    random = np.random.default_rng(seed)
    stem = random.integers(0, 5, 40).tolist()
    found: list[tuple[list[int], SamplingParams | BeamSearchParams]] = []
    for i in range(14):
        prompt = [*stem[: random.integers(0, 20)], i]
        if i % 5 == 4:
            found.append((prompt, BeamSearchParams(beam_width=int(random.integers(1, 4)), max_tokens=int(random.integers(1, 9)))))
        else:
            found.append((prompt, SamplingParams(max_tokens=int(random.integers(6, 20)), n=int(random.choice([1, 1, 1, 2, 3])))))
    return found


OPTIONS = [
    {},
    {"num_blocks": 20},
    {"num_blocks": 20, "prefix_cache": False},
    {"num_blocks": 60, "max_num_batched_tokens": 7, "max_num_seqs": 6},
    {"num_blocks": 30, "max_num_batched_tokens": 8, "max_num_seqs": 8, "eviction": "weighted"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_a_mixture_of_requests_in_a_pool_of_any_size(options: dict[str, Any], seed: int) -> None:
    answers = []
    for overlap in (False, True):
        it = Life(**{"num_blocks": 200, **options}, overlap=overlap)
        names = [it.add(prompt, params.max_tokens, n=params.n) if isinstance(params, SamplingParams) else it.engine.add_request(prompt, params) for prompt, params in mixture(seed)]
        it.finish()
        answers.append([[answer.token_ids for answer in it.done[name].outputs] for name in names])
        assert it.preemptions > 0 or options.get("num_blocks") != 20
    assert answers[0] == answers[1]


@pytest.mark.parametrize("options", OPTIONS[1:4], ids=str)
def test_aborts_at_every_step(options: dict[str, Any]) -> None:
    """Each of the requests ends at another step, between two steps of the engine; the others do not notice."""
    for victim in range(6):
        it = Life(**options, overlap=True)
        names = [it.add(list(range(i, i + 5)), 12, n=1 + (i == 2)) for i in range(6)]
        for step in range(100):
            if not it.engine.has_unfinished():
                break
            if step == 2 * victim:
                gone = it.engine.abort(names[victim])
                it.engine._scheduler.check_invariants()
                for answer in gone.outputs if gone else ():
                    assert answer.token_ids == expected_output(np.arange(victim, victim + 5), len(answer.token_ids), answer.index)
            if step == 7:
                it.engine.reset_prefix_cache()
            it.step()
        it.finish()
        for name in set(names) - {names[victim]}:
            it.check(name)
            assert all(len(answer.token_ids) == 12 for answer in it.done[name].outputs)


TEXTS: list[dict[str, Any]] = [
    {"max_tokens": 9},
    {"max_tokens": 9, "stop": ["bc", "ca"]},
    {"max_tokens": 9, "stop": "c", "min_tokens": 4},
    {"max_tokens": 9, "stop": "cab", "include_stop_str_in_output": True},
    {"max_tokens": 30},
    {"max_tokens": 30, "min_tokens": 6, "stop_token_ids": [3]},
    {"max_tokens": 9, "bad_words": ["ab", "c"]},
    {"max_tokens": 9, "logprobs": 2, "n": 2},
    {"max_tokens": 9, "prompt_logprobs": 1},
    {"max_tokens": 1},
]


def test_texts_stop_strings_and_reports_grow_alike() -> None:
    seen = []
    for overlap in (False, True):
        engine = make_engine(ScriptedModel({i: [1, 2, 3, 1, 1, 2, 3, EOS][i % 4 :] for i in range(20)}), ["a", "b", "c", " "], overlap=overlap)
        names = [engine.add_request("abc" * (1 + i % 3), SamplingParams(**params)) for i, params in enumerate(TEXTS)]
        outputs = finish(engine)
        seen.append([[(o.outputs, o.prompt_logprobs, o.finished) for o in outputs if o.request_id == name] for name in names])
    assert seen[0] == seen[1]


# ---- when something goes wrong


def fail(engine: Engine, model: ScriptedModel, where: str, fault: BaseException | None) -> Callable[[], None]:
    """Let the model's next call at this place fail, or be interrupted."""

    def strike(plan: StepPlan) -> None:
        model.before_run = model.before_submit = lambda plan: None
        if fault is None:
            signal.raise_signal(signal.SIGINT)
            pytest.fail("the model went on")
        raise fault

    setattr(model, where, strike)
    return engine.step


@pytest.mark.parametrize("where", ["before_run", "before_submit"])
@pytest.mark.parametrize("fault", [RuntimeError("boom"), KeyboardInterrupt(), None])
@pytest.mark.parametrize("step", range(4))
def test_plans_in_flight_of_a_step_that_fails_never_happened(where: str, fault: BaseException | None, step: int) -> None:
    model = ScriptedModel(default=[1, 2, 3, 1, 2])
    engine = make_engine(model, overlap=True)
    engine.add_request("a", SamplingParams(max_tokens=5, presence_penalty=1.0))
    for _ in range(step):
        engine.step()
    with pytest.raises(type(fault or KeyboardInterrupt())):
        fail(engine, model, where, fault)()
    assert not engine._scheduler._in_flight
    engine._scheduler.check_invariants()
    done = len(model.plans)
    assert finish(engine)[-1].outputs[0].token_ids == [1, 2, 3, 1, 2]
    assert model.plans[done].samples[0].history is not None  # the counts may hold tokens that nobody got
    assert engine._scheduler.cache.num_used == 0


def test_a_fault_in_a_tight_pool_loses_nothing() -> None:
    it = Life(16, overlap=True)
    names = [it.add(list(range(i, i + 9)), 14) for i in range(8)]
    submit, calls = it.model.submit, 0

    def often(plan: StepPlan) -> LateOutput:
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            raise RuntimeError("boom")
        return submit(plan)

    it.model.submit = often  # type: ignore[method-assign]
    faults = 0
    while it.engine.has_unfinished():
        try:
            it.step()
        except RuntimeError:
            faults += 1
            it.engine._scheduler.check_invariants()
    assert faults > 5
    assert it.preemptions > 0
    for name in names:
        it.check(name)


# ---- on emulated kernels

MODEL = str(ROOT / "llama_tied")
SMALL: dict[str, Any] = {"device": "emu", "num_blocks": 200, "block_size": 4, "max_model_len": 40}
REQUESTS: list[SamplingParams | BeamSearchParams] = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(seed=2, max_tokens=12, ignore_eos=True, temperature=1.5, top_k=20, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=1.7, frequency_penalty=0.5, logprobs=2),
    SamplingParams(seed=3, n=3, max_tokens=8, ignore_eos=True, presence_penalty=1.5, repetition_penalty=1.3),
    SamplingParams(seed=4, max_tokens=14, stop_token_ids=list(range(40, 80)), min_tokens=5),
    BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True),
]


def answers(engine: Engine) -> list[Any]:
    stem = np.random.default_rng(5).integers(1, 100, 20).tolist()
    names = [engine.add_request([*stem[: 3 * i], 7 + i], params) for i, params in enumerate(REQUESTS)]
    done = {o.request_id: o for o in finish(engine) if o.finished}
    engine._scheduler.check_invariants()
    return [[(answer.token_ids, answer.logprobs and [list(p) for p in answer.logprobs]) for answer in done[name].outputs] for name in names]


@pytest.fixture(scope="module")
def one_by_one() -> list[Any]:
    skip_without_compiler()
    return answers(LLM(MODEL, **SMALL).engine)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"enforce_eager": True}, {"num_blocks": 14}, {"num_blocks": 14, "preemption": "swap", "swap_space": 1 << 20, "prefix_cache": False},
        {"max_num_batched_tokens": 9, "max_num_seqs": 9},
    ],
    ids=str,
)  # fmt: skip
def test_the_kernels_choose_the_same_tokens(one_by_one: list[Any], options: dict[str, Any]) -> None:
    engine = LLM(MODEL, **{**SMALL, **options}, overlap=True).engine
    records: list[StepRecord] = []
    engine.observers.append(records.append)
    ahead = 0
    submit = engine._runner.submit

    def count(plan: StepPlan) -> Any:
        nonlocal ahead
        ahead += sum(item.token_source >= 0 for item in plan.sequences)
        return submit(plan)

    engine._runner.submit = count  # type: ignore[method-assign]
    for _ in range(2):  # the second time from the cache
        assert answers(engine) == one_by_one
    assert ahead > 20
    assert sum(record.num_preempted for record in records) > 0 or options.get("num_blocks") != 14


# ---- the option


def test_who_overlaps() -> None:
    for device in ("cpu", "reference"):
        with pytest.raises(ConfigError, match=f"device {device} computes in the host's own time, so nothing can overlap"):
            EngineConfig(device=device, overlap=True)
        assert EngineConfig(device=device, overlap=False).overlap is False
    with pytest.raises(ConfigError, match="overlap must be true or false, not 'yes'"):
        EngineConfig(overlap="yes")  # type: ignore[arg-type]  # the test
    assert LLM(MODEL, device="reference").engine.config.overlap is False
