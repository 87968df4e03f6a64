"""LateOutput: what a submitted plan will have computed, on its way to the host. It is checked when it is read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupaged.backends.checks import check_chosen
from cupaged.backends.download import Download
from cupaged.step_plan import FloatArray, IntArray, ModelOutput, TokenLogprobs


@dataclass(frozen=True, slots=True, eq=False)
class LateLogprobs:
    """TokenLogprobs on their way."""

    token_ids: Download
    logprobs: Download
    ranks: Download
    top_ids: Download
    top_logprobs: Download

    def collect(self) -> TokenLogprobs:
        ranks = self.ranks.wait()
        check_chosen(ranks)
        return TokenLogprobs(self.token_ids.wait(), self.logprobs.wait(), ranks, self.top_ids.wait(), self.top_logprobs.wait())


@dataclass(frozen=True, slots=True, eq=False)
class LateCandidates:
    """The likeliest next tokens of beams on their way, a row each. `wanted`: sequence number, and how many."""

    ids: Download
    logprobs: Download
    wanted: list[tuple[int, int]]

    def collect(self) -> dict[int, tuple[IntArray, FloatArray]]:
        ids, logprobs = self.ids.wait(), self.logprobs.wait()
        check_chosen(ids[:, 0])
        return {seq_id: (ids[i, :count], logprobs[i, :count]) for i, (seq_id, count) in enumerate(self.wanted)}


@dataclass(frozen=True, slots=True, eq=False)
class LateOutput:
    """A ModelOutput on its way; prompt_logprobs: seq_id -> its chunks."""

    token_ids: Download | None
    logprobs: LateLogprobs | None
    prompt_logprobs: dict[int, list[LateLogprobs]]
    candidates: LateCandidates | None

    def collect(self) -> ModelOutput:
        """Wait for it. Raises InvariantError where there was nothing to choose from, BackendError for a device that failed."""
        prompt_logprobs = {seq_id: _joined([chunk.collect() for chunk in chunks]) for seq_id, chunks in self.prompt_logprobs.items()}
        candidates = {} if self.candidates is None else self.candidates.collect()
        logprobs = None if self.logprobs is None else self.logprobs.collect()
        token_ids = np.empty(0, np.int32) if self.token_ids is None else self.token_ids.wait()
        check_chosen(token_ids)
        return ModelOutput(token_ids, logprobs, prompt_logprobs, candidates)


def _joined(chunks: list[TokenLogprobs]) -> TokenLogprobs:
    return TokenLogprobs(*(np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in TokenLogprobs.__slots__))
