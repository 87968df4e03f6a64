"""Beam search as decisions: which beams go on with which token, which answers are complete, and when it is over.

The search is Hugging Face's (`generate` with num_beams), so that scores and answers can be compared with it:

- a beam's score is the sum of its tokens' log-probabilities; an answer's is that sum / length ** length_penalty, where
  the length counts generated tokens, EOS among them
- of all continuations of all beams the best max(2, 1 + number of EOS tokens) * width are looked at. Those that end
  become answers if they are among the best `width`; of those that do not, the best `width` go on
- the search is over when the best beam cannot improve on the worst of `width` answers. How good it could get is
  judged by its present length; with early_stopping "never" and a positive penalty by the longest length instead;
  with early_stopping true, `width` answers are enough

Nothing here knows blocks or models: the scheduler forks and drops sequences accordingly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cupaged.params import BeamSearchParams
from cupaged.step_plan import FloatArray, IntArray


class Continuation(NamedTuple):
    """A beam, as a place in the list of beams, and the token it goes on with."""

    beam: int
    token_id: int
    score: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete beam: its generated tokens, EOS among them, the sum of their logprobs, and its score."""

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float
    finish_reason: str


class BeamSearch:
    """The state of one search. `max_tokens`: the most tokens that an answer can get."""

    def __init__(self, params: BeamSearchParams, max_tokens: int, eos_ids: frozenset[int]) -> None:
        self.params = params
        self.hypotheses: list[Hypothesis] = []
        """Best first, at most beam_width."""
        self._max_tokens = max_tokens
        self._eos_ids = eos_ids
        self._improvable = True

    @property
    def num_candidates(self) -> int:
        """How many of its likeliest next tokens each beam must offer."""
        return max(2, 1 + len(self._eos_ids)) * self.params.beam_width

    def advance(
        self, beams: list[tuple[int, ...]], scores: list[float], candidates: list[tuple[IntArray, FloatArray]]
    ) -> list[Continuation]:
        """Take one step: the beams that go on, best first; none when the search is over.

        beams        the generated tokens of each beam
        scores       the sum of their logprobs
        candidates   for each beam int32 token ids and float32 logprobs, best first
        """
        best = self._best_continuations(scores, candidates)
        length = len(beams[0]) + 1
        ends = [c.token_id in self._eos_ids or length >= self._max_tokens for c in best]
        self._collect([c for c, end in list(zip(best, ends, strict=True))[: self.params.beam_width] if end], beams)
        going_on = [c for c, end in zip(best, ends, strict=True) if not end][: self.params.beam_width]
        return going_on if going_on and self._worth_going_on(going_on[0].score, length) else []

    def _best_continuations(self, scores: list[float], candidates: list[tuple[IntArray, FloatArray]]) -> list[Continuation]:
        every = [
            Continuation(beam, int(token), score + float(logprob))
            for beam, (score, (ids, logprobs)) in enumerate(zip(scores, candidates, strict=True))
            for token, logprob in zip(ids, logprobs, strict=True)
        ]
        return sorted(every, key=lambda c: (-c.score, c.beam, c.token_id))[: self.num_candidates]

    def _collect(self, ended: list[Continuation], beams: list[tuple[int, ...]]) -> None:
        """Add complete answers and keep the best."""
        width = self.params.beam_width
        if not self._improvable or (self.params.early_stopping is True and len(self.hypotheses) == width):
            return
        for c in ended:
            tokens = (*beams[c.beam], c.token_id)
            reason = "stop" if c.token_id in self._eos_ids else "length"
            self.hypotheses.append(Hypothesis(tokens, c.score, self._score(c.score, len(tokens)), reason))
        self.hypotheses = sorted(self.hypotheses, key=lambda a: -a.score)[:width]

    def _worth_going_on(self, best_score: float, length: int) -> bool:
        """Whether beams of `length` tokens, the best of which has this sum, may still give a better answer."""
        if len(self.hypotheses) < self.params.beam_width:
            return True
        longest = self.params.early_stopping == "never" and self.params.length_penalty > 0
        best_possible = self._score(best_score, self._max_tokens if longest else length)
        self._improvable = self._improvable and best_possible > self.hypotheses[-1].score
        return self._improvable and self.params.early_stopping is not True

    def _score(self, cumulative_logprob: float, length: int) -> float:
        penalty: float = float(length) ** self.params.length_penalty
        return cumulative_logprob / penalty
