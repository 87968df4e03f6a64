"""Answer: one growing answer as text and values. Token ids come in, text that may be shown comes out."""

from __future__ import annotations

from collections.abc import Sequence as Many

from cupaged.outputs import CompletionOutput, Logprob, TokenCandidates
from cupaged.sequence import Sequence, TokenCandidate
from cupaged.text.detokenizer import Detokenizer
from cupaged.text.stop import StopChecker
from cupaged.text.tokenizer import Tokenizer


class Answer:
    """Follows a Sequence. Without a tokenizer the text stays empty."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer | None) -> None:
        params = sequence.request.params
        self._sequence = sequence
        self._tokenizer = tokenizer
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(tokenizer, sequence.request.prompt_token_ids.tolist(), params.skip_special_tokens)
        self._stop = StopChecker(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._token_ids: list[int] = []
        self._logprobs: list[TokenCandidates] = []
        self._text = ""
        self._complete = False

    def follow(self) -> str | None:
        """Take over the tokens that the sequence got since the last call; the stop string that they complete, if any.

        Where there are stop strings, it has to follow every token. All else is the same however many come at once.
        """
        if self._complete:
            return None
        sequence = self._sequence
        new = sequence.output_ids[len(self._token_ids) :].tolist()
        self._token_ids += new
        if sequence.candidates:
            self._logprobs += [token_candidates(c, self._tokenizer) for c in sequence.candidates[len(self._logprobs) :]]
        if self._detokenizer is None:
            return None
        shown = new[:-1] if self._hides_last_token() else new
        matched = self._show(self._detokenizer.push(shown))
        if matched is None and sequence.finish_reason is not None:
            matched = self._show(self._detokenizer.flush())
            self._text += "" if self._stop is None else self._stop.flush()
        self._complete = matched is not None or sequence.finish_reason is not None
        return matched

    def _hides_last_token(self) -> bool:
        """A token that ended the answer is not part of its text, as a stop string is not."""
        sequence = self._sequence
        return sequence.finish_reason == "stop" and not sequence.request.params.include_stop_str_in_output

    def _show(self, text: str) -> str | None:
        if self._stop is None:
            self._text += text
            return None
        may_stop = len(self._token_ids) > self._sequence.request.params.min_tokens
        shown, matched = self._stop.push(text, may_stop)
        self._text += shown
        return matched

    def output(self) -> CompletionOutput:
        """The answer so far, as a value of its own."""
        self.follow()
        sequence, params = self._sequence, self._sequence.request.params
        return CompletionOutput(  # by position: by name takes twice as long
            sequence.index,
            self._text,
            self._token_ids.copy(),
            None if params.needed_logprobs is None else sequence.cumulative_logprob,
            None if params.logprobs is None else self._logprobs.copy(),
            None,
            sequence.finish_reason,
            sequence.stop_reason,
        )


def token_candidates(candidate: TokenCandidate, tokenizer: Tokenizer | None) -> TokenCandidates:
    """The chosen token first, then the most likely ones, with their text."""
    result = {candidate.token_id: _logprob(candidate.token_id, candidate.logprob, candidate.rank, tokenizer)}
    for rank, (token, logprob) in enumerate(zip(candidate.top_ids, candidate.top_logprobs, strict=True), 1):
        result.setdefault(token, _logprob(token, logprob, rank, tokenizer))
    return result


def prompt_candidates(reported: Many[TokenCandidate], tokenizer: Tokenizer | None) -> list[TokenCandidates | None]:
    """One entry a prompt token; the first has nothing before it."""
    return [None, *(token_candidates(c, tokenizer) for c in reported)]


def _logprob(token: int, logprob: float, rank: int, tokenizer: Tokenizer | None) -> Logprob:
    return Logprob(logprob, rank, tokenizer.token_text(token) if tokenizer else "")
