"""The exact integer model: a stand-in for a language model that shows every wrong block, bit for bit.

Its KV store holds, per slot, the token and the position that were written there. The next token is a hash of
everything read back through the block table, in order. Whatever reads a wrong block, a stale slot, a wrong position
or a token in the wrong order gives another hash, and there are no float ties to hide behind. It goes through
model/batch.py, so slots, tables and row order are tested as the real model uses them.
"""

from __future__ import annotations

import numpy as np

from cupaged.model import batch as batches
from cupaged.step_plan import IntArray, ModelOutput, StepPlan

VOCABULARY = 1 << 20
POISON = np.int64(-1)
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def hash_context(entries: np.ndarray) -> int:
    """A token from int64 [context] (token, position) entries; order and content both matter."""
    state = 14695981039346656037
    for value in entries.tolist():
        state = ((state ^ value) * _MULTIPLIER) & _MASK
        state ^= state >> 29
    return state % VOCABULARY


def entry(token: int | np.ndarray, position: int | np.ndarray) -> np.ndarray:
    return np.asarray(token, np.int64) << 32 | np.asarray(position, np.int64)


def expected_output(prompt: IntArray, count: int) -> list[int]:
    """What the model answers when nothing goes wrong: no cache, no blocks, no batch."""
    tokens = [int(t) for t in prompt]
    for _ in range(count):
        tokens.append(hash_context(entry(np.array(tokens), np.arange(len(tokens)))))
    return tokens[len(prompt) :]


class IntegerModel:
    """Runs StepPlans as model.runner.Runner does. `computed` counts the tokens that it was asked to compute."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.store = np.full((num_blocks, block_size), POISON)
        self.computed = 0

    def run(self, plan: StepPlan) -> ModelOutput:
        if len(plan.copies):
            self.store[plan.copies[:, 1]] = self.store[plan.copies[:, 0]]
        batch = batches.build(plan)
        rows = batch.attention
        assert len(np.unique(rows.slots)) == len(rows.slots), "two rows of one step write one slot"
        assert (np.diff(rows.query_start)[: rows.num_decode] == 1).all(), "decode rows come first"
        self.store.reshape(-1)[rows.slots] = entry(batch.token_ids, rows.positions)
        self.computed += len(batch.token_ids)
        sampled_rows = set(batch.sample_rows.tolist())
        tokens = [
            self._next_token(rows.block_tables[s], int(rows.context_lens[s]))
            for s in range(len(rows.context_lens))
            if int(rows.query_start[s + 1]) - 1 in sampled_rows
        ]
        return ModelOutput(np.array(tokens, np.int32))

    def _next_token(self, table: IntArray, context: int) -> int:
        block_size = self.store.shape[1]
        blocks = table[: -(-context // block_size)]
        assert (blocks >= 0).all(), "an unused table entry is read"
        entries = self.store[blocks].reshape(-1)[:context]
        assert (entries != POISON).all(), "a slot is read that nobody wrote"
        return hash_context(entries)
