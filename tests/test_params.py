"""SamplingParams: every range at its edges, wrong types, unknown names; one clear line each."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from cupaged.errors import ConfigError, ParameterError
from cupaged.params import MAX_LOGPROBS, BeamSearchParams, SamplingParams

# name -> (accepted edges, refused neighbours)
RANGES: dict[str, tuple[list[Any], list[Any]]] = {
    "n": ([1, 2, 64], [0, -1]),
    "best_of": ([None, 1, 64], [0, -1]),
    "temperature": ([0, 0.0, 1, 2.5, 1e30], [-1e-9, -1, 1.1e30]),
    "top_k": ([-1, 0, 1, 2**31 - 1], [-2, 2**31]),
    "top_p": ([1e-9, 0.5, 1, 1.0], [0, 0.0, -0.1, math.nextafter(1, 2)]),
    "min_p": ([0, 0.0, 0.5, 1, 1.0], [-1e-9, math.nextafter(1, 2)]),
    "repetition_penalty": ([1e-30, 0.5, 1, 2, 1e30], [0, 0.0, -1.0, 1e-31, 1.1e30]),
    "presence_penalty": ([-2, -2.0, 0, 2, 2.0], [-2.01, 2.01]),
    "frequency_penalty": ([-2, -2.0, 0, 2, 2.0], [-2.01, 2.01]),
    "seed": ([None, 0, 2**64 - 1], [-1, 2**64]),
    "min_tokens": ([0, 1, 16], [-1]),
    "max_tokens": ([None, 1, 2**40], [0, -1]),
    "logprobs": ([None, 0, MAX_LOGPROBS], [-1, MAX_LOGPROBS + 1]),
    "prompt_logprobs": ([None, 0, MAX_LOGPROBS], [-1, MAX_LOGPROBS + 1]),
}
WHOLE = ["n", "best_of", "top_k", "seed", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs"]
NUMBERS = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
FLAGS = ["ignore_eos", "skip_special_tokens", "include_stop_str_in_output"]


def refusal(**values: Any) -> str:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**values)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (good, _) in RANGES.items() for value in good])
def test_edges_are_accepted(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (_, bad) in RANGES.items() for value in bad])
def test_values_past_the_edges_are_refused_by_name(name: str, value: Any) -> None:
    message = refusal(**{name: value})
    assert name in message
    assert repr(value) in message


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, -(10**400), "0.5", True, [0.5], None, 1j], ids=lambda v: str(v)[:8])
def test_numbers_must_be_finite_numbers(name: str, value: Any) -> None:
    assert refusal(**{name: value}).startswith(f"{name} must be ")


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [1.0, 1.5, math.nan, "1", True, [1]], ids=str)
def test_whole_numbers_must_be_whole(name: str, value: Any) -> None:
    assert refusal(**{name: value}) == f"{name} must be a whole number, not {value!r}"


@pytest.mark.parametrize("name", ["n", "top_k", "min_tokens"])
def test_whole_numbers_must_be_given(name: str) -> None:
    assert refusal(**{name: None}) == f"{name} must be a whole number, not None"


def test_huge_whole_numbers_get_the_same_clear_line() -> None:
    for name in ("seed", "logprobs", "top_k"):
        assert f"{name} must be at least" in refusal(**{name: 10**400})
        assert refusal(**{name: 10**5000}).endswith("not <int too large to show>")


def test_a_wrong_value_is_shown_on_one_short_line() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    for value in (nested, np.eye(9), ["-1"] * 9000, {"a\nb": "c" * 9000}):
        line = refusal(stop_token_ids=value)
        assert line.startswith("stop_token_ids must be a list of token ids, not ")
        assert len(line) < 200
        assert "\n" not in line


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "true", None], ids=str)
def test_flags_must_be_booleans(name: str, value: Any) -> None:
    assert refusal(**{name: value}) == f"{name} must be true or false, not {value!r}"
    assert getattr(SamplingParams(**{name: True}), name) is True


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_strings_may_be_one_or_a_list(name: str) -> None:
    for given, kept in (("a", ("a",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ([], ()), (None, ())):
        assert getattr(SamplingParams(**{name: given}), name) == kept
    for wrong in (5, ["a", 5], {"a": 1}, b"a", [None]):
        assert refusal(**{name: wrong}) == f"{name} must be a string or a list of strings, not {wrong!r}"
    for empty in ("", ["a", ""]):
        assert refusal(**{name: empty}) == f"{name} must not hold an empty string"


def test_stop_token_ids_are_token_ids() -> None:
    for given, kept in (([], ()), ((0, 2**31 - 1), (0, 2**31 - 1)), (None, ())):
        assert SamplingParams(stop_token_ids=given).stop_token_ids == kept  # type: ignore[arg-type]  # None is taken too
    for wrong in ([-1], [2**31], ["1"], [True], [1.0], 5, "5", {1: 2}):
        assert refusal(stop_token_ids=wrong) == f"stop_token_ids must be a list of token ids, not {wrong!r}"


def test_logit_bias_maps_token_ids_to_bounded_numbers() -> None:
    assert SamplingParams(logit_bias=None).logit_bias is None
    bias = SamplingParams(logit_bias={5: 100, "7": -100.0}).logit_bias  # type: ignore[dict-item]  # JSON's keys are strings
    assert bias == {5: 100.0, 7: -100.0}
    assert all(isinstance(value, float) for value in bias.values())
    for wrong in ([1, 2], "5", 5):
        assert refusal(logit_bias=wrong) == f"logit_bias must map token ids to numbers, not {wrong!r}"
    for key in (-1, 2**31, 1.0, 1.7, True, None, "x", "-1", "1.5", "", " 1", "1_0", "²"):
        assert refusal(logit_bias={key: 1.0}) == f"logit_bias must map token ids to numbers; {key!r} is no token id"
    for value in (100.1, -100.1, math.nan, math.inf, "1", None, True):
        assert refusal(logit_bias={5: value}).startswith("logit_bias[5] must be ")
    assert refusal(logit_bias={5: 1.0, "5": 2.0}) == "logit_bias names token 5 twice"


def test_the_callers_collections_stay_the_callers() -> None:
    bias, stop = {1: 2.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[1], stop[0] = 50.0, "b"
    assert params.logit_bias == {1: 2.0}
    assert params.stop == ("a",)


def test_min_tokens_must_fit_under_max_tokens() -> None:
    assert SamplingParams(min_tokens=16).max_tokens == 16
    assert SamplingParams(min_tokens=1000, max_tokens=None).min_tokens == 1000
    assert refusal(min_tokens=17) == "min_tokens (17) must not be above max_tokens (16)"


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ParameterError, match=r"unknown sampling parameter 'temprature'; the parameters are n, best_of, temperature, "):
        SamplingParams.from_mapping({"temprature": 1.0})
    for name in ("beam_width", "length_penalty", "logits_processors", "greedy", "has_penalties", 5):
        with pytest.raises(ParameterError, match="unknown sampling parameter"):
            SamplingParams.from_mapping({name: 1})  # type: ignore[dict-item]  # 5 is not a string
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]
    assert SamplingParams.from_mapping({"top_p": 0.5, "stop": "x"}) == SamplingParams(top_p=0.5, stop=("x",))
    assert SamplingParams.from_mapping({}) == SamplingParams()


def test_best_of_is_at_least_n() -> None:
    assert SamplingParams(n=3, best_of=3).num_samples == 3
    assert SamplingParams(best_of=3).num_samples == 3
    assert SamplingParams(n=3).num_samples == 3
    assert refusal(n=3, best_of=2) == "best_of must be at least 3, not 2"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beam_width": 0}, "beam_width must be at least 1 and at most 256, not 0"),
        ({"beam_width": 257}, "beam_width must be at least 1 and at most 256, not 257"),
        ({"max_tokens": None}, "max_tokens must be a whole number, not None"),
        ({"length_penalty": math.nan}, "length_penalty must be a finite number, not nan"),
        ({"early_stopping": "soon"}, "early_stopping must be true, false or 'never', not 'soon'"),
        ({"early_stopping": 1}, "early_stopping must be true, false or 'never', not 1"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, not 1"),
        ({"temperature": 1}, "unknown beam search parameter 'temperature'; the parameters are beam_width, max_tokens, "),
    ],
    ids=str,
)
def test_beam_search_parameters_are_checked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as caught:
        BeamSearchParams.from_mapping(values)
    assert str(caught.value).startswith(message)


def test_beam_search_parameters_from_a_mapping() -> None:
    values = {"beam_width": 2, "early_stopping": "never", "length_penalty": -1}
    assert BeamSearchParams.from_mapping(values) == BeamSearchParams(2, 16, -1, "never")


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_k, params.top_p, params.min_p) == (1, 1.0, 0, 1.0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.logprobs, params.seed) == (16, 0, None, None)
    assert (params.skip_special_tokens, params.include_stop_str_in_output, params.ignore_eos) == (True, False, False)


def test_greedy_is_a_temperature_of_almost_zero() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=9.9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, False),
        ({"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}, False),
        ({"logit_bias": {1: 1.0}}, False),
        ({"repetition_penalty": 0.9}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
    ],
    ids=str,
)
def test_has_penalties(values: dict[str, Any], expected: bool) -> None:
    assert SamplingParams(**values).has_penalties is expected


def test_a_refused_value_is_a_config_and_a_value_error_and_values_are_final() -> None:
    assert issubclass(ParameterError, ConfigError)
    assert issubclass(ParameterError, ValueError)
    with pytest.raises(FrozenInstanceError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty", "top_p", "min_p"])
def test_accepted_numbers_survive_float32(name: str) -> None:
    for value in RANGES[name][0]:
        assert np.isfinite(np.float32(value))
        assert np.float32(value) > 0 or value == 0
