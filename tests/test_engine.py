"""The engine around the model: text, stop strings, checks at the door, aborts, streams and faults."""

from __future__ import annotations

import signal
import threading
from itertools import pairwise

import numpy as np
import pytest

from cupaged.engine import Engine
from cupaged.errors import RequestError
from cupaged.outputs import RequestOutput
from cupaged.params import SamplingParams
from cupaged.step_plan import StepPlan, StepRecord
from tests.support import scripted
from tests.support.integer_model import IntegerModel, expected_output
from tests.support.scripted import EOS, ScriptedModel, finish, make_engine


@pytest.fixture(autouse=True, params=[False, True], ids=["one by one", "overlapped"])
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setitem(scripted.DEFAULTS, "overlap", request.param)
    return request.param


def answer(script: list[int], pieces: list[str], **params: object) -> RequestOutput:
    engine = make_engine(ScriptedModel(default=script), ["p", *pieces])
    engine.add_request("p", SamplingParams(**{"max_tokens": len(script), **params}))
    outputs = finish(engine)
    for before, after in pairwise(output.outputs[0].text for output in outputs):
        assert after.startswith(before), "text that was shown must not change"
    assert engine._scheduler.cache.num_used == 0
    return outputs[-1]


def test_an_answer_grows_by_a_token_a_step() -> None:
    engine = make_engine(ScriptedModel(default=[1, 2, 3]))
    request_id = engine.add_request("ab", SamplingParams(max_tokens=3))
    outputs = finish(engine)
    assert [o.outputs[0].text for o in outputs] == ["a", "ab", "abc"]
    assert [o.outputs[0].token_ids for o in outputs] == [[1], [1, 2], [1, 2, 3]]
    assert [o.finished for o in outputs] == [False, False, True]
    last = outputs[-1]
    assert (last.request_id, last.prompt, last.prompt_token_ids) == (request_id, "ab", [1, 2])
    assert last.outputs[0].finish_reason == "length"
    assert last.num_cached_tokens == 0
    assert last.metrics.arrival <= last.metrics.first_token <= last.metrics.finished


def test_eos_ends_an_answer_and_is_not_in_its_text() -> None:
    output = answer([2, EOS], ["hello"], max_tokens=9).outputs[0]
    assert (output.text, output.token_ids, output.finish_reason, output.stop_reason) == ("hello", [2, EOS], "stop", None)


def test_a_stop_token_ends_an_answer_and_is_not_in_its_text() -> None:
    output = answer([2, 3], ["hello", "STOP"], max_tokens=9, stop_token_ids=[3]).outputs[0]
    assert (output.text, output.token_ids, output.finish_reason, output.stop_reason) == ("hello", [2, 3], "stop", 3)


def test_a_stop_token_is_shown_when_asked_for() -> None:
    params = {"max_tokens": 9, "stop_token_ids": [3], "include_stop_str_in_output": True}
    assert answer([2, 3], ["hello", "STOP"], **params).outputs[0].text == "helloSTOP"


# stop strings


def test_a_stop_string_over_several_tokens_is_never_shown() -> None:
    output = answer([2, 3, 4, 5, 6], ["abcDEF", "G", "HI", "Jrest", "more"], stop="DEFGHIJ").outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("abc", "stop", "DEFGHIJ")
    assert output.token_ids == [2, 3, 4, 5]


def test_text_held_for_a_stop_string_that_fails_is_shown() -> None:
    output = answer([2, 3, 4], ["abcDEF", "G", "X"], stop="DEFGHIJ").outputs[0]
    assert (output.text, output.finish_reason) == ("abcDEFGX", "length")


def test_text_held_at_the_end_is_shown() -> None:
    output = answer([2, 3], ["abcDEF", "G"], stop="DEFGHIJ").outputs[0]
    assert (output.text, output.finish_reason) == ("abcDEFG", "length")


def test_a_stop_string_in_the_last_token_is_still_a_stop() -> None:
    output = answer([2, 3], ["abc", "xSTOPy"], stop=["STOP"]).outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("abcx", "stop", "STOP")


def test_a_stop_string_is_kept_when_asked_for() -> None:
    output = answer([2], ["abSTOPy"], stop=["STOP"], include_stop_str_in_output=True).outputs[0]
    assert output.text == "abSTOP"


def test_nothing_is_shown_behind_a_stop_string() -> None:
    engine = make_engine(ScriptedModel(default=[2]), ["p", "?"])
    engine.tokenizer.token_bytes = lambda token: b"abSTOP\xe2"  # the character that it begins is never finished
    engine.add_request("p", SamplingParams(max_tokens=3, stop="STOP"))
    assert finish(engine)[-1].outputs[0].text == "ab"


def test_stop_strings_wait_for_min_tokens() -> None:
    output = answer([2, 2, 2, 2], ["xS"], stop=["S"], min_tokens=2).outputs[0]
    assert (output.text, output.token_ids) == ("xSxSx", [2, 2, 2])


# logprobs


def test_logprobs_name_the_chosen_token_and_the_likely_ones() -> None:
    output = answer([3, 1], ["q", "r"], logprobs=2).outputs[0]
    first, second = output.logprobs
    assert list(first) == [3, 1, 2]
    assert (first[3].logprob, first[3].rank, first[3].decoded_token) == (-3.0, 2, "r")
    assert (first[1].rank, first[2].rank) == (1, 2)
    assert list(second) == [1, 2], "the chosen token is not named twice"
    assert output.cumulative_logprob == -4.0


def test_logprobs_zero_names_the_chosen_token_alone() -> None:
    output = answer([3], ["q", "r"], logprobs=0).outputs[0]
    assert [list(position) for position in output.logprobs] == [[3]]


def test_no_logprobs_unless_asked_for() -> None:
    output = answer([3], ["q", "r"]).outputs[0]
    assert output.logprobs is None
    assert output.cumulative_logprob is None


def test_prompt_logprobs_begin_with_none() -> None:
    engine = make_engine(ScriptedModel())
    engine.add_request([3, 2, 1], SamplingParams(max_tokens=1, prompt_logprobs=1))
    reported = finish(engine)[-1].prompt_logprobs
    assert reported[0] is None
    assert [next(iter(position)) for position in reported[1:]] == [2, 1]
    assert reported[1][2].logprob == -2.0


# requests that can never be served


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        ([1] * 128, {}, "128 tokens, but prompt and output together may have 128"),
        ([64], {}, "64, which is no token id: those are 0 .. 63"),
        ([-1], {}, "-1, which is no token id"),
        ([1.5], {}, "1.5, which is no token id"),
        ([1], {"logit_bias": {64: 1.0}}, "logit_bias names token 64"),
        ([1], {"stop_token_ids": [99]}, "stop_token_ids names token 99"),
        ([1], {"logprobs": 65}, "logprobs asks for 65 candidates of 64"),
        (b"ab", {}, "a text or a list of token ids, not bytes"),
        (5, {}, "a text or a list of token ids, not int"),
        (None, {}, "a text or a list of token ids, not NoneType"),
        ([1], {"min_tokens": 1, "stop_token_ids": range(64)}, "leave no token to choose from"),
    ],
)
def test_a_bad_request_is_refused_and_the_next_one_is_served(prompt: object, params: dict, message: str) -> None:
    engine = make_engine(ScriptedModel())
    with pytest.raises(RequestError, match=message) as raised:
        engine.add_request(prompt, SamplingParams(**{k: list(v) if isinstance(v, range) else v for k, v in params.items()}))
    assert isinstance(raised.value, ValueError)
    assert not engine.has_unfinished()
    engine.add_request("a", SamplingParams(max_tokens=1))
    assert finish(engine)[-1].finished


def test_an_empty_text_with_a_bos_token_is_a_prompt() -> None:
    engine = make_engine(ScriptedModel(default=[2]))
    engine.tokenizer.encode = lambda text: [1]  # what a tokenizer that adds BOS makes of ""
    engine.add_request("", SamplingParams(max_tokens=1))
    output = finish(engine)[-1]
    assert (output.prompt_token_ids, output.outputs[0].token_ids) == ([1], [2])


def test_a_request_that_the_pool_can_never_hold_is_refused_and_others_finish() -> None:
    engine = make_engine(ScriptedModel(), num_blocks=4, max_model_len=100)
    first = engine.add_request("a", SamplingParams(max_tokens=4))
    with pytest.raises(RequestError, match="the pool has 4"):
        engine.add_request([1] * 30, SamplingParams(max_tokens=4))
    later = engine.add_request("b", SamplingParams(max_tokens=4))
    assert {o.request_id for o in finish(engine) if o.finished} == {first, later}


def test_an_id_is_used_once() -> None:
    engine = make_engine(ScriptedModel())
    engine.add_request("a", request_id="mine")
    with pytest.raises(RequestError, match="'mine' is already running"):
        engine.add_request("a", request_id="mine")


def test_ids_of_the_callers_choice_are_stepped_over() -> None:
    engine = make_engine(ScriptedModel())
    assert [engine.add_request("a", request_id=own) for own in ("1", None, "2", None, None)] == ["1", "0", "2", "3", "4"]


def test_parameters_of_another_kind_are_refused() -> None:
    with pytest.raises(RequestError, match="must be SamplingParams or BeamSearchParams, not dict"):
        make_engine(ScriptedModel()).add_request("a", {"temperature": 0})


def test_ids_that_the_model_does_not_have_are_never_banned() -> None:
    engine = make_engine(ScriptedModel(default=[1]), ["a", "b", " "], vocab_size=2, eos_token_ids=(EOS, -1, 2))
    engine.add_request([1], SamplingParams(max_tokens=1, min_tokens=1, bad_words=["b"]))
    engine.step()
    assert engine._runner.plans[0].sequences[0].samples[0].banned == (EOS,)


@pytest.mark.parametrize(("prompt", "params"), [("text", {}), ([1], {"stop": "x"}), ([1], {"bad_words": ["x"]})])
def test_without_a_tokenizer_text_is_refused(prompt: object, params: dict) -> None:
    engine = make_engine(ScriptedModel(), pieces=None)
    with pytest.raises(RequestError, match="this model has none: give token ids"):
        engine.add_request(prompt, SamplingParams(**params))


def test_without_a_tokenizer_token_ids_are_served() -> None:
    engine = make_engine(ScriptedModel(default=[5]), pieces=None)
    engine.add_request([1], SamplingParams(max_tokens=2, logprobs=0))
    output = finish(engine)[-1].outputs[0]
    assert (output.text, output.token_ids) == ("", [5, 5])


def test_an_answer_ends_at_the_longest_sequence() -> None:
    engine = make_engine(ScriptedModel(), max_model_len=10)
    engine.add_request([1] * 7, SamplingParams(max_tokens=None))
    output = finish(engine)[-1].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (3, "length")


def test_bad_words_are_banned_at_the_start_and_after_a_space() -> None:
    engine = make_engine(ScriptedModel(default=[1]), ["a", "bad", " bad", " "])
    engine.add_request("a", SamplingParams(max_tokens=1, bad_words=["bad"]))
    engine.step()
    assert engine._runner.plans[0].sequences[0].samples[0].banned == (2, 3)


def test_a_request_without_a_seed_gets_one_of_its_own() -> None:
    model = ScriptedModel()
    engine = make_engine(model)
    for seed in (None, None, 7):
        engine.add_request("a", SamplingParams(seed=seed, max_tokens=1))
    engine.step()
    seeds = [item.samples[0].seed for item in model.plans[0].sequences]
    assert len(set(seeds)) == 3
    assert seeds[2] == 7


# only the finished answer


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 7},
        {"max_tokens": 9, "stop_token_ids": [6]},
        {"max_tokens": 9, "stop_token_ids": [6], "include_stop_str_in_output": True},
        {"max_tokens": 9, "stop": ["fgh", "de"], "min_tokens": 4},
        {"max_tokens": 5, "stop": ["efg"]},
        {"max_tokens": 4, "logprobs": 2},
        {"max_tokens": 4, "n": 2, "best_of": 3},
        {"max_tokens": 4, "prompt_logprobs": 1},
    ],
)
def test_the_finished_output_alone_is_the_last_of_the_growing_ones(params: dict) -> None:
    last = []
    for only_finished in (False, True):
        engine = make_engine(ScriptedModel(default=[2, 3, 4, 5, 6, 7, 8, 9]), ["ab", "b", "c", "d", "e", "f", "g", "h", "i"])
        engine.add_request([1, 2], SamplingParams(**params), only_finished=only_finished)
        outputs = finish(engine)
        assert len(outputs) == 1 or not only_finished
        last.append(outputs[-1])
    grown, alone = last
    assert alone.finished
    assert (alone.outputs, alone.prompt_logprobs) == (grown.outputs, grown.prompt_logprobs)
    assert alone.metrics.first_token < alone.metrics.finished


def test_an_aborted_answer_is_whole_though_nobody_watched_it_grow() -> None:
    engine = make_engine(ScriptedModel(default=[1, 2, 3]), ["ab", "c", "d"])
    request_id = engine.add_request("ab", SamplingParams(max_tokens=100, stop="dX"), only_finished=True)
    assert [engine.step() for _ in range(3)] == [[], [], []]
    output = engine.abort(request_id)
    assert (output.outputs[0].text, output.outputs[0].token_ids, output.outputs[0].finish_reason) == ("abcd", [1, 2, 3], "abort")


# abort


def test_abort_gives_what_there_is_and_frees_everything() -> None:
    engine = make_engine(ScriptedModel(default=[1, 2]))
    kept = engine.add_request("a", SamplingParams(max_tokens=6))
    gone = engine.add_request("b", SamplingParams(max_tokens=100))
    engine.step()
    engine.step()
    output = engine.abort(gone)
    assert (output.outputs[0].text, output.outputs[0].finish_reason, output.finished) == ("ab", "abort", True)
    assert engine.abort(gone) is None
    assert engine.abort("never seen") is None
    assert {o.request_id for o in finish(engine)} == {kept}
    assert engine._scheduler.cache.num_used == 0


def test_abort_from_another_thread_waits_for_the_step() -> None:
    model = ScriptedModel(default=[1])
    engine = make_engine(model)
    request_id = engine.add_request("a", SamplingParams(max_tokens=100))
    running, aborted = threading.Event(), threading.Event()
    seen: list[RequestOutput | None] = []

    def abort() -> None:
        running.wait(10)
        seen.append(engine.abort(request_id))
        aborted.set()

    def hold(plan: StepPlan) -> None:
        running.set()
        assert not aborted.wait(0.05), "abort must not pull a running step's blocks away"

    model.before_run = hold
    thread = threading.Thread(target=abort)
    thread.start()
    engine.step()
    thread.join(10)
    assert seen[0].outputs[0].token_ids == [1]
    assert not engine.has_unfinished()
    engine._scheduler.check_invariants()


def test_an_observer_may_abort_in_the_middle_of_a_step() -> None:
    engine = make_engine(ScriptedModel(default=[1]))
    ids = [engine.add_request("a", SamplingParams(max_tokens=5)) for _ in range(3)]
    engine.observers.append(lambda record: engine.abort(ids[1]))
    assert {o.request_id for o in finish(engine) if o.finished} == {ids[0], ids[2]}
    assert engine._scheduler.cache.num_used == 0


@pytest.mark.parametrize("fault", [RuntimeError("boom"), KeyboardInterrupt()])
def test_a_step_that_fails_never_happened(fault: BaseException) -> None:
    model = ScriptedModel({0: [1, 2, 3]})
    engine = make_engine(model)
    engine.add_request("a", SamplingParams(max_tokens=3))
    engine.step()

    def fail(plan: StepPlan) -> None:
        model.before_run = lambda plan: None
        raise fault

    model.before_run = fail
    with pytest.raises(type(fault)):
        engine.step()
    engine._scheduler.check_invariants()
    assert finish(engine)[-1].outputs[0].token_ids == [1, 2, 3]


@pytest.mark.parametrize("method", ["reserve", "unpin"])
def test_ctrl_c_waits_for_the_bookkeeping(method: str) -> None:
    model = ScriptedModel({0: [1, 2, 3]})
    engine = make_engine(model)
    engine.add_request("a", SamplingParams(max_tokens=3))
    original = getattr(engine._scheduler.cache, method)

    def press(*args: object) -> object:
        setattr(engine._scheduler.cache, method, original)
        signal.raise_signal(signal.SIGINT)
        return original(*args)

    setattr(engine._scheduler.cache, method, press)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine._scheduler.check_invariants()
    assert [len(output.outputs[0].token_ids) for output in finish(engine)] == [2, 3]
    assert engine._scheduler.cache.num_used == 0


def test_ctrl_c_ends_a_long_model_run_at_once() -> None:
    model = ScriptedModel({0: [1, 2]})
    engine = make_engine(model)
    engine.add_request("a", SamplingParams(max_tokens=2))

    def press(plan: StepPlan) -> None:
        model.before_run = lambda plan: None
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the run went on")

    model.before_run = press
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert finish(engine)[-1].outputs[0].token_ids == [1, 2]


# streams


def test_a_stream_yields_every_growth_and_ends() -> None:
    engine = make_engine(ScriptedModel(default=[1, 2, 3]))
    texts = [o.outputs[0].text for o in engine.stream("a", SamplingParams(max_tokens=3))]
    assert texts == ["a", "ab", "abc"]


def test_two_streams_share_the_steps_and_lose_nothing() -> None:
    model = ScriptedModel({0: [1], 1: [2]})
    engine = make_engine(model)
    params = SamplingParams(max_tokens=4)
    one, two = engine.stream("a", params), engine.stream("b", params)
    texts = [(x.outputs[0].text, y.outputs[0].text) for x, y in zip(one, two, strict=True)]
    assert texts[-1] == ("aaaa", "bbbb")
    assert len(texts) == 4
    assert len(model.plans) == 4


def test_closing_a_stream_aborts_its_request() -> None:
    engine = make_engine(ScriptedModel())
    stream = engine.stream("a", SamplingParams(max_tokens=100))
    next(stream)
    stream.close()
    assert not engine.has_unfinished()
    assert engine._scheduler.cache.num_used == 0


def test_a_stream_that_is_never_started_leaves_nothing_behind_when_closed() -> None:
    engine = make_engine(ScriptedModel())
    engine.stream("a", SamplingParams(max_tokens=100)).close()
    assert not engine.has_unfinished()


def test_a_stream_dropped_in_the_middle_of_planning_ends_at_the_next_step() -> None:
    engine = make_engine(ScriptedModel(default=[1]))
    kept = engine.add_request("a", SamplingParams(max_tokens=9))
    streams = [engine.stream("b", SamplingParams(max_tokens=9))]
    reserve = engine._scheduler.cache.reserve

    def collect(seq_id: int, start: int, stop: int) -> object:
        if seq_id == 1:
            streams.clear()  # as the garbage collector would
        return reserve(seq_id, start, stop)

    engine._scheduler.cache.reserve = collect
    assert {output.request_id for output in engine.step()} == {kept, "1"}
    assert {output.request_id for output in finish(engine)} == {kept}
    engine._scheduler.check_invariants()
    assert engine._scheduler.cache.num_used == 0


def test_a_stream_checks_its_request_at_once() -> None:
    with pytest.raises(RequestError, match="empty"):
        make_engine(ScriptedModel()).stream("")


def test_an_aborted_stream_ends_with_what_it_has() -> None:
    engine = make_engine(ScriptedModel())
    stream = engine.stream("a", SamplingParams(max_tokens=100))
    request_id = next(stream).request_id
    engine.abort(request_id)
    assert [o.outputs[0].finish_reason for o in stream] == ["abort"]


# what observers see


def test_a_step_record_counts_what_happened() -> None:
    engine = make_engine(ScriptedModel(), num_blocks=8)
    records: list[StepRecord] = []
    engine.observers.append(records.append)
    engine.add_request([1] * 6, SamplingParams(max_tokens=2))
    engine.add_request([1] * 3, SamplingParams(max_tokens=1))
    finish(engine)
    first, second = records
    assert (first.num_tokens, first.num_decode, first.num_sampled, first.num_finished) == (9, 0, 2, 1)
    assert (first.num_running, first.num_waiting) == (1, 0)
    assert (first.blocks_total, first.blocks_used, first.slots_used) == (8, 3, 9)
    assert (second.num_tokens, second.num_decode, second.num_finished, second.blocks_used) == (1, 1, 1, 2)
    assert first.run_seconds >= 0


def test_an_idle_engine_does_nothing() -> None:
    engine = make_engine(ScriptedModel())
    assert engine.step() == []


# the integer model through the whole engine


def test_a_crowd_gets_the_answers_of_an_unlimited_pool() -> None:
    """Preempted or not, in chunks or not, each answer is the one that the request gets alone."""
    engine: Engine = make_engine(
        IntegerModel(24, 2), pieces=None, num_blocks=24, block_size=2, max_model_len=48, vocab_size=1 << 20,
        max_num_batched_tokens=16, max_num_seqs=8,
    )
    records: list[StepRecord] = []
    engine.observers.append(records.append)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 9, random.integers(1, 20)).tolist() for _ in range(25)]
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    done = {o.request_id: o for o in finish(engine) if o.finished}
    assert sum(r.num_preempted for r in records) > 0
    assert sum(o.metrics.num_preemptions for o in done.values()) == sum(r.num_preempted for r in records)
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert done[request_id].outputs[0].token_ids == expected_output(np.array(prompt), 25)
