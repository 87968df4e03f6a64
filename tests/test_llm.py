"""LLM around the engine: what counts as one prompt or many, and that no output is lost, whoever steps the engine."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.errors import ConfigError, HubError, RequestError
from cupaged.llm import LLM
from cupaged.outputs import RequestOutput
from cupaged.params import SamplingParams
from cupaged.sequence import Request
from tests.support.scripted import ScriptedModel, make_engine

FIVE = SamplingParams(max_tokens=5)


def scripted() -> LLM:
    llm = LLM.__new__(LLM)
    llm.engine = make_engine(ScriptedModel(default=[1, 2, 3]))
    return llm


@pytest.mark.parametrize("prompts", ["a", [1], ["a"], [[1]]])
def test_one_prompt(prompts: Any) -> None:
    (output,) = scripted().generate(prompts, FIVE)
    assert (output.prompt_token_ids, output.outputs[0].text, output.finished) == ([1], "abcab", True)


def test_many_prompts_with_parameters_of_their_own_come_back_in_order() -> None:
    outputs = scripted().generate(["a", [2], "c"], [FIVE, SamplingParams(max_tokens=1), FIVE])
    assert [(o.prompt_token_ids, len(o.outputs[0].token_ids)) for o in outputs] == [([1], 5), ([2], 1), ([3], 5)]


def test_no_prompt_no_output() -> None:
    assert scripted().generate([], FIVE) == []


@pytest.mark.parametrize("prompts", [None, 5, b"a", ["a", None], ["a", []]])
def test_what_is_no_prompt_is_refused_and_nothing_is_left_behind(prompts: Any) -> None:
    llm = scripted()
    with pytest.raises(RequestError):
        llm.generate(prompts, FIVE)
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize("params", [{"temperature": 0}, [FIVE, FIVE], 3])
def test_parameters_that_do_not_fit_are_refused(params: Any) -> None:
    with pytest.raises(ConfigError, match="sampling parameters"):
        scripted().generate("a", params)


@pytest.mark.parametrize("messages", [[], {}, {"role": "user", "content": "a"}, "a", None])
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(RequestError, match="a conversation is a list"):
        scripted().chat(messages)


def test_a_path_is_a_model_name() -> None:
    with pytest.raises(HubError, match="no such file or folder"):
        LLM(Path("/nonexistent/model"))


@pytest.mark.parametrize("model", [None, 5, b"model"])
def test_what_is_no_model_name_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="model must be a name or a path"):
        LLM(model)


@pytest.mark.parametrize("prompt", [np.array(3), np.zeros((2, 2, 2), int)])
def test_an_array_that_is_no_prompt_is_refused(prompt: Any) -> None:
    llm = scripted()
    with pytest.raises(RequestError, match=r"not an array of \d dimensions"):
        llm.generate(prompt, FIVE)
    assert not llm.engine.has_unfinished()


def test_ctrl_c_while_requests_are_added_leaves_none_behind() -> None:
    llm = scripted()
    add = llm.engine._scheduler.add

    def press(request: Request) -> object:
        if request.request_id == "1":
            signal.raise_signal(signal.SIGINT)
        return add(request)

    llm.engine._scheduler.add = press
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], FIVE)
    assert not llm.engine.has_unfinished()
    llm.engine._scheduler.check_invariants()


def test_an_answer_aborted_from_within_ends_the_call() -> None:
    llm = scripted()

    def stop_first(output: RequestOutput) -> None:
        if len(output.outputs[0].token_ids) == 2 and output.prompt_token_ids == [1]:
            llm.engine.abort(output.request_id)

    first, second = llm.generate(["a", "b"], FIVE, on_output=stop_first)
    assert (first.outputs[0].text, first.outputs[0].finish_reason) == ("ab", "abort")
    assert second.outputs[0].text == "abcab"


def test_outputs_of_somebody_elses_steps_are_not_lost() -> None:
    llm = scripted()
    texts: list[str] = []

    def step_again(output: RequestOutput) -> None:
        texts.append(output.outputs[0].text)
        llm.engine.step()

    (output,) = llm.generate("a", FIVE, on_output=step_again)
    assert output.outputs[0].text == "abcab"
    assert texts == ["a", "ab", "abc", "abca", "abcab"]
