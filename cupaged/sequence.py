"""Request and Sequence: what was asked for, and one answer to it as it grows.

A sequence has no phase. It has tokens, of which the first `num_computed` have KV in the cache, and `num_scheduled`
more are on their way in plans that are not applied yet. Prefill, chunks of it, decode and resuming after a preemption
are all "compute some of the rest".

    tokens        | prompt ......................... | output ........ |
    KV            | num_computed | num_scheduled |    remaining      |

While a plan that chooses its next token is in flight, the next plan may count on that token without knowing it: it is
promised. Nothing is done with a promised token but to compute it; `tokens` never holds one.

A request begins with one sequence. Others fork from it once the prompt is computed: the further samples of n > 1, the
beams of a beam search. All live sequences of a request are preempted and resumed together.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from enum import Enum
from typing import NamedTuple

import numpy as np

from cupaged.beam import BeamSearch
from cupaged.params import SamplingParams
from cupaged.step_plan import IntArray, TokenLogprobs


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class TokenCandidate(NamedTuple):
    """The model's view of one token: its logprob and rank, and the most likely tokens beside it."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


def candidates(logprobs: TokenLogprobs, rows: range, k: int) -> list[TokenCandidate]:
    """Rows of TokenLogprobs as values, with at most `k` likely tokens each."""
    return [
        TokenCandidate(
            int(logprobs.token_ids[r]),
            float(logprobs.logprobs[r]),
            int(logprobs.ranks[r]),
            logprobs.top_ids[r, :k].tolist(),
            logprobs.top_logprobs[r, :k].tolist(),
        )
        for r in rows
    ]


class Request:
    """A prompt, its parameters, and what they mean for this model.

    eos_ids        tokens that end the answer by the model's own convention; empty for a request that ignores them
    bad_words      token sequences that must not be completed
    max_len        longest prompt + output, in tokens
    seed           key of the random stream: params.seed, or drawn for this request
    beam           the state of its beam search; None: its answers are sampled
    salt           requests with another salt never share cached blocks with this one
    width          most sequences that it runs at once
    sequences      its answers; the first is there from the start
    live           those of them that still grow; a list that is replaced, never changed
    rows           rows of per-sequence state in the backend, one a sequence, while it runs
    arrival        orders requests: a smaller one came earlier
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: IntArray,
        params: SamplingParams,
        *,
        max_len: int,
        seed: int,
        prompt: str | None = None,
        eos_ids: frozenset[int] = frozenset(),
        bad_words: Many[tuple[int, ...]] = (),
        salt: str = "",
        beam: BeamSearch | None = None,
        arrival_time: float = 0.0,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.num_prompt = len(prompt_token_ids)
        self.params = params
        self.max_len = max_len
        self.seed = seed
        self.eos_ids = eos_ids
        self.stop_ids = frozenset(params.stop_token_ids)
        self.bad_words = tuple(bad_words)
        self.salt = salt
        self.arrival_time = arrival_time
        self.arrival = -1
        self.status = Status.WAITING
        self.beam = beam
        self.width = beam.params.beam_width if beam else params.num_samples
        self.sequences: list[Sequence] = []
        self.live: list[Sequence] = []
        self.rows: list[int] = []
        self.prompt_candidates: list[TokenCandidate] = []
        self.num_cached: int | None = None
        self.num_preemptions = 0
        self.steps_waited = 0
        self.times_passed = 0

    @property
    def prompt_reported(self) -> bool:
        """Whether there is no prompt logprob (any more) to report."""
        return self.params.prompt_logprobs is None or len(self.prompt_candidates) >= self.num_prompt - 1


class Sequence:
    """One answer in progress.

    started         its table exists: it has begun to compute, or was forked
    token_source    which sample of the plan in flight is promised to it as its next token; -1: none
    """

    __slots__ = (
        "_tokens",
        "candidates",
        "cumulative_logprob",
        "finish_reason",
        "history_sent",
        "index",
        "num_computed",
        "num_scheduled",
        "num_tokens",
        "request",
        "seq_id",
        "started",
        "stop_reason",
        "token_source",
    )

    def __init__(self, seq_id: int, request: Request, index: int, tokens: IntArray) -> None:
        self.seq_id = seq_id
        self.request = request
        self.index = index
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.started = False
        self.num_computed = 0
        self.num_scheduled = 0
        self.token_source = -1
        self.history_sent = False
        self.candidates: list[TokenCandidate] = []
        self.cumulative_logprob = 0.0
        self.num_tokens = len(tokens)
        self._tokens = np.empty(self.num_tokens + 16, np.int32)
        self._tokens[: self.num_tokens] = tokens

    # ---- tokens

    @property
    def tokens(self) -> IntArray:
        """int32 [num_tokens], prompt and output; a view."""
        return self._tokens[: self.num_tokens]

    @property
    def output_ids(self) -> IntArray:
        return self._tokens[self.request.num_prompt : self.num_tokens]

    @property
    def num_promised(self) -> int:
        """Tokens, the promised one included."""
        return self.num_tokens + (self.token_source >= 0)

    @property
    def num_output(self) -> int:
        """Tokens of the answer, the promised one included."""
        return self.num_promised - self.request.num_prompt

    @property
    def remaining(self) -> int:
        """Tokens, the promised one included, that are neither computed nor on their way."""
        return self.num_tokens + (self.token_source >= 0) - self.num_computed - self.num_scheduled

    @property
    def reusable(self) -> IntArray:
        """The tokens whose KV may come from elsewhere: all but the last, which must be computed for its logits."""
        return self._tokens[: self.num_tokens - 1]

    def restart(self) -> None:
        """Its KV is gone (or elsewhere): nothing of it is computed, or on its way."""
        self.num_computed = self.num_scheduled = 0
        self.started = self.history_sent = False

    def append(self, token_id: int) -> None:
        if self.num_tokens == len(self._tokens):
            grown = np.empty(min(2 * self.num_tokens, max(self.request.max_len, self.num_tokens + 1)), np.int32)
            grown[: self.num_tokens] = self._tokens
            self._tokens = grown
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        self.token_source = -1

    def advance(self, token_id: int) -> None:
        """The one token that was on its way is computed, and has chosen the next."""
        self.num_scheduled -= 1
        self.num_computed += 1
        self.append(token_id)

    def note_logprobs(self, logprobs: TokenLogprobs, row: int) -> None:
        """What the model thought of the token that was appended last."""
        self.cumulative_logprob += float(logprobs.logprobs[row])
        k = self.request.params.logprobs
        if k is not None:
            self.candidates += candidates(logprobs, range(row, row + 1), k)

    # ---- rules of the request

    def banned_tokens(self) -> tuple[int, ...]:
        """Tokens that must not come next: what would end the answer too early, and what would complete a bad word."""
        if not self.request.bad_words and not self.request.params.min_tokens:
            return ()  # as nearly always
        banned: set[int] = set()
        if self.num_output < self.request.params.min_tokens:
            banned |= self.request.eos_ids | self.request.stop_ids
        output = self.output_ids
        for *prefix, last in self.request.bad_words:
            if len(prefix) <= len(output) and output[len(output) - len(prefix) :].tolist() == prefix:
                banned.add(last)
        return tuple(sorted(banned))

    @property
    def watches_words(self) -> bool:
        """Whether its own tokens decide which token is banned next."""
        return any(len(word) > 1 for word in self.request.bad_words)

    def ended_by(self, token_id: int) -> tuple[str, int | None] | None:
        """(finish_reason, stop_reason) if this token, just appended, ends the answer."""
        if token_id in self.request.eos_ids:
            return "stop", None
        if token_id in self.request.stop_ids:
            return "stop", token_id
        if self.num_tokens >= self.request.max_len:
            return "length", None
        return None

