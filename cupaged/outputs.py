"""What a user gets back, in vLLM's shape: RequestOutput holds CompletionOutputs, they hold Logprobs.

They are values: the engine changes none that it has handed out. Those that a step may make for every request are not frozen,
which would take several times as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate token: the model's log-probability, its rank (1: the most likely) and its text."""

    logprob: float
    rank: int
    decoded_token: str


TokenCandidates = dict[int, Logprob]
"""Token id -> Logprob for one position: the chosen token first, then the most likely ones."""


@dataclass(slots=True)
class CompletionOutput:
    """One answer. `text` and `token_ids` are everything so far; finish_reason is None while it grows.

    finish_reason   "stop" (EOS, a stop token or a stop string), "length" (max_tokens or the longest sequence), "abort"
    stop_reason     the stop string or stop token id that matched; None for EOS
    cumulative_logprob  sum of the chosen tokens' logprobs; None unless there are several answers or logprobs were asked for
    score           of a beam: its cumulative logprob over length ** length_penalty; None for a sampled answer
    logprobs        one TokenCandidates a token; None unless asked for
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenCandidates] | None = None
    score: float | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds since an arbitrary start (time.perf_counter); None: not reached yet."""

    arrival: float
    first_token: float | None = None
    finished: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """The state of a request after a step.

    prompt_logprobs   one entry a prompt token, the first None (nothing comes before it); None unless asked for
    num_cached_tokens prompt tokens whose KV was found in the cache instead of being computed
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenCandidates | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One answer of a beam search. `token_ids` are the generated ones, EOS among them; `text` is without it."""

    token_ids: list[int]
    text: str
    score: float
    cumulative_logprob: float
    finish_reason: str


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The result of a beam search: its answers, best first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence]
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))

    @classmethod
    def of(cls, output: RequestOutput) -> BeamSearchOutput:
        """From the finished output of a beam search request."""
        sequences = [
            BeamSearchSequence(a.token_ids, a.text, a.score or 0.0, a.cumulative_logprob or 0.0, a.finish_reason or "")
            for a in output.outputs
        ]
        return cls(output.request_id, output.prompt, output.prompt_token_ids, sequences, output.num_cached_tokens, output.metrics)
