"""The exact integer model: a stand-in for a language model that shows every wrong block, bit for bit.

Its KV store holds, per slot, the token and the position that were written there. The next token is a hash of
everything read back through the block table, in order. Whatever reads a wrong block, a stale slot, a wrong position
or a token in the wrong order gives another hash, and there are no float ties to hide behind. It goes through
model/batch.py, so slots, tables and row order are tested as the real model uses them.
"""

from __future__ import annotations

import numpy as np

from cupaged.beam import BeamSearch
from cupaged.cache.manager import CacheManager
from cupaged.model import batch as batches
from cupaged.params import BeamSearchParams
from cupaged.step_plan import UNREAD, IntArray, ModelOutput, StepPlan

VOCABULARY = 1 << 20
SWAP_BLOCKS = 12
POISON = np.int64(-1)
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def hash_context(entries: np.ndarray, index: int = 0) -> int:
    """A token from int64 [context] (token, position) entries; order, content and the answer's index all matter."""
    state = 14695981039346656037 + index
    for value in entries.tolist():
        state = ((state ^ value) * _MULTIPLIER) & _MASK
        state ^= state >> 29
    return state % VOCABULARY


def entry(token: int | np.ndarray, position: int | np.ndarray) -> np.ndarray:
    return np.asarray(token, np.int64) << 32 | np.asarray(position, np.int64)


def expected_output(prompt: IntArray, count: int, index: int = 0, window: int = 0) -> list[int]:
    """What the model answers when nothing goes wrong: no cache, no blocks, no batch."""
    tokens = [int(t) for t in prompt]
    for _ in range(count):
        tokens.append(hash_context(entry(np.array(tokens), np.arange(len(tokens)))[-window:], index))
    return tokens[len(prompt) :]


def likely_tokens(entries: np.ndarray, count: int) -> tuple[IntArray, np.ndarray]:
    """Candidates of a beam: `count` different tokens with descending logprobs, all a function of the context."""
    ids = np.array([hash_context(entries, 100 + i) * 64 % VOCABULARY + i % 64 for i in range(count)], np.int32)
    logprobs = -np.cumsum(np.array([1 + hash_context(entries, 1000 + i) % 997 for i in range(count)])) / np.float32(997)
    return ids, logprobs.astype(np.float32)


def expected_beams(
    prompt: IntArray, params: BeamSearchParams, eos: frozenset[int] = frozenset(), window: int = 0
) -> list[tuple[int, ...]]:
    """The answers of a beam search when nothing goes wrong: no cache, no blocks, no batch."""
    search = BeamSearch(params, params.max_tokens, eos)
    beams, scores = [()], [0.0]
    while beams:
        contexts = [np.array([*prompt.tolist(), *beam]) for beam in beams]
        offered = [likely_tokens(entry(c, np.arange(len(c)))[-window:], search.num_candidates) for c in contexts]
        chosen = search.advance(beams, scores, offered)
        beams, scores = [(*beams[c.beam], c.token_id) for c in chosen], [c.score for c in chosen]
    return [answer.token_ids for answer in search.hypotheses]


class LateOutput:
    """What a submitted plan will have computed. `abandoned`: nobody waits for it any more, and what it reads may be gone."""

    def __init__(self, model: IntegerModel, plan: StepPlan) -> None:
        self.plan, self.abandoned = plan, False
        self.output: ModelOutput | None = None
        self._model = model

    def collect(self) -> ModelOutput:
        while self.output is None:
            self._model.compute_next()
        return self.output


class IntegerModel:
    """Runs StepPlans as model.runner.Runner does. `computed` counts the tokens that it was asked to compute.

    Submitted plans are computed in their order, as late as possible: when one is collected, or `run`. Until then its
    tokens are nowhere; the plan behind it gets them from `_chosen`, where the one computed last has left them.
    """

    def __init__(self, num_blocks: int, block_size: int, window: int = 0) -> None:
        self.window = window
        self.store = np.full((num_blocks, block_size), POISON)
        self.host = np.full((SWAP_BLOCKS, block_size), POISON)
        self.computed = self.swapped = 0
        self.submitted: list[LateOutput] = []
        self._chosen: IntArray = np.empty(0, np.int32)

    def run(self, plan: StepPlan) -> ModelOutput:
        return self.submit(plan).collect()

    def submit(self, plan: StepPlan) -> LateOutput:
        self.submitted.append(LateOutput(self, plan))
        return self.submitted[-1]

    def compute_next(self) -> None:
        late = self.submitted.pop(0)
        late.output = self._compute(late.plan, late.abandoned)
        self._chosen = late.output.token_ids

    def _compute(self, plan: StepPlan, abandoned: bool) -> ModelOutput:
        self.host[plan.swap_out[:, 1]] = self.store[plan.swap_out[:, 0]]
        self.store[plan.swap_in[:, 1]] = self.host[plan.swap_in[:, 0]]
        self.swapped += len(plan.swap_in)
        if len(plan.copies):
            assert not set(plan.copies[:, 0]) & set(plan.copies[:, 1]), "a block is both source and destination of copies"
            assert len(set(plan.copies[:, 1])) == len(plan.copies), "two copies go to one block"
            self.store[plan.copies[:, 1]] = self.store[plan.copies[:, 0]]
        batch = batches.build(plan)
        rows = batch.attention
        assert len(np.unique(rows.slots)) == len(rows.slots), "two rows of one step write one slot"
        assert (np.diff(rows.query_start)[: rows.num_decode] == 1).all(), "decode rows come first"
        self.store.reshape(-1)[rows.slots] = entry(self._read(batch), rows.positions)
        self.computed += len(batch.token_ids)
        if abandoned:
            return ModelOutput(np.full(len(plan.samples), UNREAD, np.int32))
        owner = np.searchsorted(rows.query_start, batch.sample_rows, side="right") - 1
        tokens = [
            self._next_token(rows.block_tables[s], int(rows.context_lens[s]), spec.index)
            for s, spec in zip(owner, plan.samples, strict=True)
        ]
        found = {
            item.seq_id: likely_tokens(self._context(rows.block_tables[s], int(rows.context_lens[s])), item.num_candidates)
            for s, item in enumerate(plan.sequences)
            if item.num_candidates
        }
        return ModelOutput(np.array(tokens, np.int32), candidates=found)

    def _read(self, batch: batches.Batch) -> IntArray:
        """The rows' tokens, those that the host does not know included."""
        if batch.sources is None:
            assert (batch.token_ids >= 0).all(), "a token has no value"
            return batch.token_ids
        return np.array([token if source < 0 else self._chosen[source] for token, source in zip(batch.token_ids, batch.sources, strict=True)])

    def poison(self, cache: CacheManager) -> None:
        """Overwrite every slot whose content nobody may rely on: of free blocks, and past the published end of cached ones."""
        idle = cache._pool.counts == 0
        for late in self.submitted:
            idle[late.plan.swap_out[:, 0]] = False  # to be read first of all
        offsets = np.arange(self.store.shape[1])
        self.store[idle[:, None] & (offsets[None, :] >= cache._tree.fill[:, None])] = POISON

    def _next_token(self, table: IntArray, context: int, index: int) -> int:
        return hash_context(self._context(table, context), index)

    def _context(self, table: IntArray, context: int) -> np.ndarray:
        block_size = self.store.shape[1]
        oldest = max(0, context - self.window) if self.window else 0
        first = oldest // block_size
        blocks = table[first : -(-context // block_size)]
        assert (blocks >= 0).all(), "an unused table entry is read"
        entries = self.store[blocks].reshape(-1)[oldest - first * block_size : context - first * block_size]
        assert (entries != POISON).all(), "a slot is read that nobody wrote"
        return entries
