"""SamplingParams: how the tokens of one request are chosen. Names, ranges and meanings are vLLM's.

Everything is checked at construction, so a wrong value never reaches a running batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from cupaged.errors import ParameterError, shown

GREEDY_BELOW = 1e-5
"""A temperature under this is greedy decoding."""

MAX_LOGPROBS = 100
"""Most candidates a step reports per token."""

_LARGEST = 1e30
"""A number beyond this, or a divisor below its inverse, could turn float32 logits into infinities."""

_LARGEST_INT = 2**31 - 1
"""Token ids and top_k are int32 in a batch."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose and when to stop. Raises ParameterError for a value out of range.

    n                   answers to the prompt, each with its own random stream
    best_of             answers to make, of which the n with the highest mean logprob a token are given; default n
    temperature         0 is greedy; otherwise logits are divided by it; up to 1e30
    top_k               keep the k most likely tokens (ties with the k-th stay); 0 or -1: all
    top_p               keep the smallest set whose probability reaches top_p, 0 < top_p <= 1
    min_p               keep tokens at least min_p times as likely as the most likely one, 0..1
    repetition_penalty  1e-30..1e30, 1 for none; counts prompt and output (CTRL, arXiv 1909.05858)
    presence_penalty    -2..2; once for a token that is in the output
    frequency_penalty   -2..2; times the token's count in the output
    logit_bias          token id -> number added to its logit, -100..100
    seed                the stream of random numbers; None: one is drawn for the request
    stop                strings that end the answer; not part of it unless include_stop_str_in_output
    stop_token_ids      tokens that end the answer, beside the model's own
    bad_words           strings that are never produced
    min_tokens          no EOS and no stop token before this many tokens
    max_tokens          most tokens to produce; None: up to the longest sequence the engine takes
    ignore_eos          go on after the model's EOS
    logprobs            None, or how many most likely tokens to report for each output token (0: the chosen one alone)
    prompt_logprobs     the same for each prompt token
    skip_special_tokens leave special tokens out of the text
    include_stop_str_in_output  keep the matched stop string in the text

    Logprobs are the model's own: before bias, penalties and temperature.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        set_ = object.__setattr__  # frozen: normalise once, here
        set_(self, "stop", _strings("stop", self.stop))
        set_(self, "bad_words", _strings("bad_words", self.bad_words))
        set_(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        set_(self, "logit_bias", _logit_bias(self.logit_bias))
        _whole("n", self.n, 1, None)
        if self.best_of is not None:
            _whole("best_of", self.best_of, self.n, None)
        _number("temperature", self.temperature, 0.0, _LARGEST)
        _whole("top_k", self.top_k, -1, _LARGEST_INT)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 1 / _LARGEST, _LARGEST)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _whole("seed", self.seed, 0, 2**64 - 1)
        _whole("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, None)
            if self.min_tokens > self.max_tokens:
                raise ParameterError(f"min_tokens ({self.min_tokens}) must not be above max_tokens ({self.max_tokens})")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(f"{name} must be true or false, not {shown(getattr(self, name))}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping such as a JSON object, refusing unknown names. Raises ParameterError."""
        _known("sampling", values, [f.name for f in fields(cls)])
        return cls(**values)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def num_samples(self) -> int:
        """Answers to make for the prompt."""
        return self.best_of or self.n

    @property
    def needed_logprobs(self) -> int | None:
        """How many likely tokens a step must report beside each chosen one; None: not even the chosen one's logprob."""
        return 0 if self.logprobs is None and self.num_samples > 1 else self.logprobs

    @property
    def has_penalties(self) -> bool:
        """Whether the choice depends on which tokens came before (so that the backend must count them)."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True)
class BeamSearchParams:
    """Beam search, with Hugging Face's meanings. Raises ParameterError for a value out of range.

    beam_width       beams, and answers in the result
    max_tokens       most tokens of an answer
    length_penalty   an answer's score is its logprob sum / length ** length_penalty: above 0 prefers long ones
    early_stopping   True: `beam_width` answers are enough; False: until the best beam cannot improve, by its present
                     length; "never": by the longest length it could get
    ignore_eos       go on after the model's EOS
    """

    beam_width: int = 4
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _whole("beam_width", self.beam_width, 1, 256)
        _whole("max_tokens", self.max_tokens, 1, None)
        _number("length_penalty", self.length_penalty, -100.0, 100.0)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ParameterError(f"early_stopping must be true, false or 'never', not {shown(self.early_stopping)}")
        if not isinstance(self.ignore_eos, bool):
            raise ParameterError(f"ignore_eos must be true or false, not {shown(self.ignore_eos)}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> BeamSearchParams:
        """Build from a mapping such as a JSON object, refusing unknown names. Raises ParameterError."""
        _known("beam search", values, [f.name for f in fields(cls)])
        return cls(**values)


def _known(kind: str, values: Mapping[str, Any], known: list[str]) -> None:
    for name in values:
        if name not in known:
            raise ParameterError(f"unknown {kind} parameter {shown(name)}; the parameters are {', '.join(known)}")


def _whole(name: str, value: object, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(f"{name} must be a whole number, not {shown(value)}")
    if value < low or (high is not None and value > high):
        raise ParameterError(f"{name} must be at least {low}{'' if high is None else f' and at most {high}'}, not {shown(value)}")


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise ParameterError(f"{name} must be a finite number, not {shown(value)}")
    if value < low or (open_low and value == low) or value > high:
        raise ParameterError(f"{name} must be {'above' if open_low else 'at least'} {low:g} and at most {high:g}, not {shown(value)}")


def _strings(name: str, value: object) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if items is None:
        return ()
    if not isinstance(items, (list, tuple)) or not all(isinstance(s, str) for s in items):
        raise ParameterError(f"{name} must be a string or a list of strings, not {shown(value)}")
    if "" in items:
        raise ParameterError(f"{name} must not hold an empty string")
    return tuple(items)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(_is_token_id(i) for i in value):
        raise ParameterError(f"{name} must be a list of token ids, not {shown(value)}")
    return tuple(value)


def _logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ParameterError(f"logit_bias must map token ids to numbers, not {shown(value)}")
    bias: dict[int, float] = {}
    for key, number in value.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() else key  # JSON object keys are strings
        if not _is_token_id(token):
            raise ParameterError(f"logit_bias must map token ids to numbers; {shown(key)} is no token id")
        if token in bias:
            raise ParameterError(f"logit_bias names token {token} twice")
        _number(f"logit_bias[{token}]", number, -100.0, 100.0)
        bias[token] = float(number)
    return bias


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST_INT
