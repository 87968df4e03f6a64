"""Runner: executes a StepPlan. Plan -> batch -> forward -> sampled tokens; it decides nothing and allocates no block."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cupaged.backends.base import Array, Backend, BatchLimits, SamplingBatch
from cupaged.backends.download import Download
from cupaged.model import batch as batches
from cupaged.model import sampler
from cupaged.model.kv_store import KVStore
from cupaged.model.late_output import LateCandidates, LateLogprobs, LateOutput
from cupaged.model.llama import Buffers, Llama, attend, finish, forward, head
from cupaged.step_plan import Decodes, IntArray, ModelOutput, SampleSpec, StepPlan

LogitsOf = Callable[[IntArray], Array]
"""Rows of a step -> their logits."""

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
        self._tokens = backend.empty((max_seqs,), np.int32)
        self._chosen = self._tokens if overlap else None
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
        logit_rows = max(max_seqs, LOGPROB_ROWS)
        self._all, self._few = buffers, Buffers.allocate(backend, config, logit_rows)
        self._logits = backend.empty((logit_rows, config.vocab_size), np.float32)
        batch, few, logits, tokens = self._batch, self._few, self._logits, self._tokens  # and not self: a runner that is dropped must give its memory back at once

        def forward_and_head(rows: int) -> None:
            mine = buffers.first(rows)
            forward(backend, model, kv, batch, mine)
            head(backend, model, mine.hidden, mine.normed, logits[:rows])

        def forward_and_choose(rows: int) -> None:
            forward_and_head(rows)
            backend.likeliest(logits[:rows], out=tokens[:rows])

        def rest(rows: int) -> None:
            mine = few.first(rows)
            finish(backend, model, mine)
            head(backend, model, mine.hidden, mine.normed, logits[:rows])

        self._attend = backend.record(lambda rows: attend(backend, model, kv, batch, buffers.first(rows)), max_rows)
        self._rest = backend.record(rest, logit_rows)
        self._forward = backend.record(lambda rows: forward(backend, model, kv, batch, buffers.first(rows)), max_rows)
        # of rows that all choose a token: one call, or graph (a device has graphs of both kinds where both kinds of steps come)
        self._forward_and_head = backend.record(forward_and_head, max_seqs)
        self._forward_and_choose = backend.record(forward_and_choose, max_seqs)

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
        parameters = self._packer.pack(plan.samples, batch.sample_positions)  # before the model makes the host's caches forget all this
        if _all_choose(plan) and self._packer.plain:
            self._forward_and_choose(plan.num_tokens)
            return LateOutput(self._backend.download_later(self._tokens[: plan.num_tokens]), None, {}, None)
        if _all_choose(plan):
            self._forward_and_head(plan.num_tokens)
            return LateOutput(*self._sample(plan.samples, parameters, self._logits[: plan.num_tokens]), {}, None)
        if plan.num_decode == plan.num_tokens:
            self._forward(plan.num_tokens)
            logits_of = self._head
        else:
            self._attend(plan.num_tokens)
            logits_of = self._finish
        prompt_logprobs = self._prompt_logprobs(plan, batch.attention.query_start, logits_of)
        candidates = self._candidates(plan, batch.attention.query_start, logits_of)
        token_ids, logprobs = self._sample(plan.samples, parameters, logits_of(batch.sample_rows)) if plan.samples else (None, None)
        return LateOutput(token_ids, logprobs, prompt_logprobs, candidates)

    def _head(self, rows: IntArray) -> Array:
        """Logits [len(rows), V] of some rows of a step that was computed to its end, in the one logits buffer."""
        count = len(rows)
        few, logits = self._few.first(count), self._logits[:count]
        self._backend.gather_rows(self._all.hidden, self._backend.upload(rows), out=few.hidden)
        head(self._backend, self._model, few.hidden, few.normed, logits)
        return logits

    def _finish(self, rows: IntArray) -> Array:
        """The same of a step that was computed up to the last layer's attention."""
        count = len(rows)
        few, uploaded = self._few.first(count), self._backend.upload(rows)
        self._backend.gather_rows(self._all.hidden, uploaded, out=few.hidden)
        self._backend.gather_rows(self._all.attention, uploaded, out=few.attention)
        self._rest(count)
        return self._logits[:count]

    def _sample(self, specs: tuple[SampleSpec, ...], parameters: SamplingBatch, logits: Array) -> tuple[Download, LateLogprobs | None]:
        """The chosen tokens, and their logprobs if anybody wants them."""
        backend, count, wanted = self._backend, len(specs), self._packer.logprobs
        untouched = None
        if wanted >= 0:  # sampling works in place, and logprobs are the model's own
            untouched = backend.empty(logits.shape, np.float32)
            backend.gather_rows(logits, backend.upload(np.arange(count, dtype=np.int32)), out=untouched)
        sampler.send_histories(specs, backend)
        token_ids = backend.sample(logits, parameters, None if self._chosen is None else self._chosen[:count])
        logprobs = None if untouched is None else self._logprobs(untouched, token_ids, wanted)
        return backend.download_later(token_ids), logprobs

    def _candidates(self, plan: StepPlan, query_start: IntArray, logits_of: LogitsOf) -> LateCandidates | None:
        """The likeliest next tokens of the beams."""
        beams = [(row, item) for row, item in zip(query_start[1:] - 1, plan.sequences, strict=True) if item.num_candidates]
        if not beams:
            return None
        logits = logits_of(np.array([row for row, _ in beams], np.int32))
        most = min(max(item.num_candidates for _, item in beams), logits.shape[1])
        ids, logprobs = (self._backend.download_later(array) for array in self._backend.beam_candidates(logits, most))
        return LateCandidates(ids, logprobs, [(item.seq_id, item.num_candidates) for _, item in beams])

    def _prompt_logprobs(self, plan: StepPlan, query_start: IntArray, logits_of: LogitsOf) -> dict[int, list[LateLogprobs]]:
        reports: dict[int, list[LateLogprobs]] = {}
        for first_row, item in zip(query_start[:-1], plan.sequences, strict=True):
            if item.prompt_targets is None or item.prompt_logprobs is None or not len(item.prompt_targets):
                continue
            chunks = []
            for start in range(0, len(item.prompt_targets), LOGPROB_ROWS):
                targets = item.prompt_targets[start : start + LOGPROB_ROWS]
                rows = np.arange(first_row + start, first_row + start + len(targets), dtype=np.int32)
                logits = logits_of(rows)
                chunks.append(self._logprobs(logits, self._backend.upload(targets), item.prompt_logprobs))
            reports[item.seq_id] = chunks
        return reports

    def _logprobs(self, logits: Array, token_ids: Array, k: int) -> LateLogprobs:
        found = self._backend.token_logprobs(logits, token_ids, k)
        return LateLogprobs(*(self._backend.download_later(array) for array in (token_ids, *found)))


def _all_choose(plan: StepPlan) -> bool:
    """Whether every row of the step chooses one token; nothing else is wanted of it then."""
    return isinstance(plan.sequences, Decodes) or all(item.num_tokens == len(item.samples) == 1 for item in plan.sequences)
