"""Runner: executes a StepPlan. Plan -> batch -> forward -> sampled tokens; it decides nothing and allocates no block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cupaged.backends.base import Array, Backend, BatchLimits
from cupaged.backends.download import Download
from cupaged.model import batch as batches
from cupaged.model import sampler
from cupaged.model.kv_store import KVStore
from cupaged.model.late_output import LateCandidates, LateLogprobs, LateOutput
from cupaged.model.llama import Buffers, Llama, forward, head
from cupaged.step_plan import IntArray, ModelOutput, SampleSpec, StepPlan

LOGPROB_ROWS = 64
"""Prompt logprobs are computed in chunks of so many rows: logits of a whole prompt would not fit in memory."""


class Runner:
    """A model, its KV memory and the buffers of the largest step, on one backend.

    overlap    whether a plan may come before the tokens are read that the plan before it has chosen
    """

    def __init__(self, backend: Backend, model: Llama, kv: KVStore, *, max_rows: int, max_seqs: int, overlap: bool = False) -> None:
        self._backend = backend
        self._model = model
        self._kv = kv
        config = model.config
        buffers = Buffers.allocate(backend, config, max_rows)
        positions = len(model.cos)
        self._chosen = backend.empty((max_seqs,), np.int32) if overlap else None
        self._packer = sampler.Packer()
        self._batch = backend.new_batch(
            BatchLimits(
                rows=max_rows,
                sequences=max_seqs,
                table_width=-(-positions // kv.block_size),
                vocab_size=config.vocab_size,
                positions=positions,
                num_blocks=kv.num_blocks,
                block_size=kv.block_size,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                window=config.window_of_all,
            ),
            self._chosen,
        )
        self._hidden = buffers.hidden
        logit_rows = max(max_seqs, LOGPROB_ROWS)
        self._rows, self._normed = (backend.empty((logit_rows, config.hidden_size), backend.activations) for _ in range(2))
        self._logits = backend.empty((logit_rows, config.vocab_size), np.float32)
        batch, logits = self._batch, self._logits  # and not self: a runner that is dropped must give its memory back at once

        def forward_and_head(rows: int) -> None:
            mine = buffers.first(rows)
            forward(backend, model, kv, batch, mine)
            head(backend, model, mine.hidden, mine.normed, logits[:rows])

        self._forward = backend.record(lambda rows: forward(backend, model, kv, batch, buffers.first(rows)), max_rows)
        # where the host waits for every call, a step whose rows all choose a token is one call
        self._forward_and_head = None if backend.asynchronous else backend.record(forward_and_head, max_seqs)

    def run(self, plan: StepPlan) -> ModelOutput:
        """Compute a (non-empty) plan."""
        return self.submit(plan).collect()

    def submit(self, plan: StepPlan) -> LateOutput:
        """Ask for all that a (non-empty) plan computes: copies first, then KV writes, then the sampled tokens.

        Plans are computed in the order in which they are submitted. With `overlap` the next one may be submitted before
        this one is collected, and take its tokens unread.
        """
        self._kv.move_blocks(plan)
        batch = batches.build(plan)
        self._backend.set_batch(self._batch, batch.token_ids, batch.attention, batch.sources)
        if self._forward_and_head is not None and _all_choose(plan):
            self._forward_and_head(plan.num_tokens)
            return LateOutput(*self._sample(plan.samples, self._logits[: plan.num_tokens]), {}, None)
        self._forward(plan.num_tokens)
        hidden, rows = self._hidden[: plan.num_tokens], batch.sample_rows
        prompt_logprobs = self._prompt_logprobs(plan, batch.attention.query_start, hidden)
        candidates = self._candidates(plan, batch.attention.query_start, hidden)
        token_ids, logprobs = self._sample(plan.samples, self._head(hidden, rows)) if len(rows) else (None, None)
        return LateOutput(token_ids, logprobs, prompt_logprobs, candidates)

    def _head(self, hidden: Array, rows: IntArray) -> Array:
        """Logits [len(rows), V] of some rows, in the one logits buffer."""
        chosen, logits = self._rows[: len(rows)], self._logits[: len(rows)]
        if len(rows) == len(hidden) and (rows == np.arange(len(rows))).all():
            chosen = hidden
        else:
            self._backend.gather_rows(hidden, self._backend.upload(rows), out=chosen)
        head(self._backend, self._model, chosen, self._normed[: len(rows)], logits)
        return logits

    def _sample(self, specs: Sequence[SampleSpec], logits: Array) -> tuple[Download, LateLogprobs | None]:
        """The chosen tokens, and their logprobs if anybody wants them."""
        backend = self._backend
        wanted = max(-1 if spec.params.needed_logprobs is None else spec.params.needed_logprobs for spec in specs)
        untouched = None
        if wanted >= 0:  # sampling works in place, and logprobs are the model's own
            untouched = backend.empty(logits.shape, np.float32)
            backend.gather_rows(logits, backend.upload(np.arange(len(specs), dtype=np.int32)), out=untouched)
        sampler.send_histories(specs, backend)
        token_ids = backend.sample(logits, self._packer.pack(specs), None if self._chosen is None else self._chosen[: len(specs)])
        logprobs = None if untouched is None else self._logprobs(untouched, token_ids, wanted)
        return backend.download_later(token_ids), logprobs

    def _candidates(self, plan: StepPlan, query_start: IntArray, hidden: Array) -> LateCandidates | None:
        """The likeliest next tokens of the beams."""
        beams = [(row, item) for row, item in zip(query_start[1:] - 1, plan.sequences, strict=True) if item.num_candidates]
        if not beams:
            return None
        logits = self._head(hidden, np.array([row for row, _ in beams], np.int32))
        most = min(max(item.num_candidates for _, item in beams), logits.shape[1])
        ids, logprobs = (self._backend.download_later(array) for array in self._backend.beam_candidates(logits, most))
        return LateCandidates(ids, logprobs, [(item.seq_id, item.num_candidates) for _, item in beams])

    def _prompt_logprobs(self, plan: StepPlan, query_start: IntArray, hidden: Array) -> dict[int, list[LateLogprobs]]:
        reports: dict[int, list[LateLogprobs]] = {}
        for first_row, item in zip(query_start[:-1], plan.sequences, strict=True):
            if item.prompt_targets is None or item.prompt_logprobs is None or not len(item.prompt_targets):
                continue
            chunks = []
            for start in range(0, len(item.prompt_targets), LOGPROB_ROWS):
                targets = item.prompt_targets[start : start + LOGPROB_ROWS]
                rows = np.arange(first_row + start, first_row + start + len(targets), dtype=np.int32)
                logits = self._head(hidden, rows)
                chunks.append(self._logprobs(logits, self._backend.upload(targets), item.prompt_logprobs))
            reports[item.seq_id] = chunks
        return reports

    def _logprobs(self, logits: Array, token_ids: Array, k: int) -> LateLogprobs:
        found = self._backend.token_logprobs(logits, token_ids, k)
        return LateLogprobs(*(self._backend.download_later(array) for array in (token_ids, *found)))


def _all_choose(plan: StepPlan) -> bool:
    """Whether every row of the step chooses one token; nothing else is wanted of it then."""
    return all(item.num_tokens == len(item.samples) == 1 for item in plan.sequences)
