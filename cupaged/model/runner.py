"""Runner: executes a StepPlan. Plan -> batch -> forward -> sampled tokens; it decides nothing and allocates no block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cupaged.backends.base import Array, Backend, BatchLimits
from cupaged.backends.checks import check_chosen
from cupaged.model import batch as batches
from cupaged.model import sampler
from cupaged.model.kv_store import KVStore
from cupaged.model.llama import Buffers, Llama, forward
from cupaged.step_plan import FloatArray, IntArray, ModelOutput, SampleSpec, StepPlan, TokenLogprobs

LOGPROB_ROWS = 64
"""Prompt logprobs are computed in chunks of so many rows: logits of a whole prompt would not fit in memory."""


class Runner:
    """A model, its KV memory and the buffers of the largest step, on one backend."""

    def __init__(self, backend: Backend, model: Llama, kv: KVStore, *, max_rows: int, max_seqs: int) -> None:
        self._backend = backend
        self._model = model
        self._kv = kv
        config = model.config
        buffers = Buffers.allocate(backend, config, max_rows)
        positions = len(model.cos)
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
            )
        )
        self._forward = backend.record(lambda rows: forward(backend, model, kv, self._batch, buffers.first(rows)), max_rows)
        self._hidden = buffers.normed
        logit_rows = max(max_seqs, LOGPROB_ROWS)
        self._rows = backend.empty((logit_rows, config.hidden_size), backend.activations)
        self._logits = backend.empty((logit_rows, config.vocab_size), np.float32)

    def run(self, plan: StepPlan) -> ModelOutput:
        """Compute a (non-empty) plan: copies first, then KV writes, then the sampled tokens."""
        self._kv.move_blocks(plan)
        batch = batches.build(plan)
        self._backend.set_batch(self._batch, batch.token_ids, batch.attention)
        self._forward(plan.num_tokens)
        hidden = self._hidden[: plan.num_tokens]
        prompt_logprobs = self._prompt_logprobs(plan, batch.attention.query_start, hidden)
        candidates = self._candidates(plan, batch.attention.query_start, hidden)
        token_ids, logprobs = self._sample(plan.samples, batch.sample_rows, hidden)
        return ModelOutput(token_ids, logprobs, prompt_logprobs, candidates)

    def _head(self, hidden: Array, rows: IntArray) -> Array:
        """Logits [len(rows), V] of some rows, in the one logits buffer."""
        chosen, logits = self._rows[: len(rows)], self._logits[: len(rows)]
        if len(rows) == len(hidden) and (rows == np.arange(len(rows))).all():
            chosen = hidden
        else:
            self._backend.gather_rows(hidden, self._backend.upload(rows), out=chosen)
        self._backend.linear(chosen, self._model.weights.lm_head, out=logits)
        return logits

    def _sample(self, specs: Sequence[SampleSpec], rows: IntArray, hidden: Array) -> tuple[IntArray, TokenLogprobs | None]:
        """The chosen tokens, and their logprobs if anybody wants them."""
        if not specs:
            return np.empty(0, np.int32), None
        backend, logits = self._backend, self._head(hidden, rows)
        wanted = max(-1 if spec.params.needed_logprobs is None else spec.params.needed_logprobs for spec in specs)
        untouched = None
        if wanted >= 0:  # sampling works in place, and logprobs are the model's own
            untouched = backend.empty(logits.shape, np.float32)
            backend.gather_rows(logits, backend.upload(np.arange(len(specs), dtype=np.int32)), out=untouched)
        sampler.send_histories(specs, backend)
        token_ids = backend.sample(logits, sampler.pack(specs))
        logprobs = None if untouched is None else self._logprobs(untouched, token_ids, wanted)
        tokens = backend.download(token_ids)
        check_chosen(tokens)
        return tokens, logprobs

    def _candidates(self, plan: StepPlan, query_start: IntArray, hidden: Array) -> dict[int, tuple[IntArray, FloatArray]]:
        """The likeliest next tokens of the beams."""
        beams = [(row, item) for row, item in zip(query_start[1:] - 1, plan.sequences, strict=True) if item.num_candidates]
        if not beams:
            return {}
        logits = self._head(hidden, np.array([row for row, _ in beams], np.int32))
        most = min(max(item.num_candidates for _, item in beams), logits.shape[1])
        ids, logprobs = (self._backend.download(array) for array in self._backend.beam_candidates(logits, most))
        check_chosen(ids[:, 0])
        return {
            item.seq_id: (ids[i, : item.num_candidates], logprobs[i, : item.num_candidates])
            for i, (_, item) in enumerate(beams)
        }

    def _prompt_logprobs(self, plan: StepPlan, query_start: IntArray, hidden: Array) -> dict[int, TokenLogprobs]:
        reports: dict[int, TokenLogprobs] = {}
        for first_row, item in zip(query_start[:-1], plan.sequences, strict=True):
            if item.prompt_targets is None or item.prompt_logprobs is None or not len(item.prompt_targets):
                continue
            chunks = []
            for start in range(0, len(item.prompt_targets), LOGPROB_ROWS):
                targets = item.prompt_targets[start : start + LOGPROB_ROWS]
                rows = np.arange(first_row + start, first_row + start + len(targets), dtype=np.int32)
                logits = self._head(hidden, rows)
                chunks.append(self._logprobs(logits, self._backend.upload(targets), item.prompt_logprobs))
            reports[item.seq_id] = TokenLogprobs(
                *(np.concatenate([getattr(c, name) for c in chunks]) for name in TokenLogprobs.__slots__)
            )
        return reports

    def _logprobs(self, logits: Array, token_ids: Array, k: int) -> TokenLogprobs:
        backend = self._backend
        logprobs, ranks, top_ids, top_logprobs = backend.token_logprobs(logits, token_ids, k)
        downloaded_ranks = backend.download(ranks)
        check_chosen(downloaded_ranks)
        return TokenLogprobs(
            token_ids=backend.download(token_ids),
            logprobs=backend.download(logprobs),
            ranks=downloaded_ranks,
            top_ids=backend.download(top_ids),
            top_logprobs=backend.download(top_logprobs),
        )
