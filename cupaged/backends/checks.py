"""What the host checks before an operation reads or writes through indices: the same for every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.backends.base import AttentionBatch, BatchLimits
from cupaged.errors import InvariantError


def check_within(what: str, indices: npt.NDArray[Any], low: int, high: int) -> None:
    """Raises InvariantError unless all are in low .. high - 1."""
    if indices.size and (indices.min() < low or indices.max() >= high):
        raise InvariantError(f"{what} out of bounds: {indices.min()} .. {indices.max()} is not within {low} .. {high - 1}")


_NOTHING_TO_CHOOSE = {
    -1: "the logits hold NaN or infinity; the weights or the KV cache are damaged",
    -2: "no token is left to choose from, every one is banned",
}


def check_chosen(answers: npt.NDArray[np.int32]) -> None:
    """Raises InvariantError for a row without an answer.

    Where a device computes behind the host's back, `sample` returns -1 or -2 for such a row, `token_logprobs` a rank and
    `beam_candidates` a first id of these: whoever downloads them looks.
    """
    if answers.size and answers.min() < 0:
        row = int(np.flatnonzero(answers < 0)[0])
        raise InvariantError(f"row {row}: {_NOTHING_TO_CHOOSE[int(answers[row])]}")


def check_block_pairs(pairs: npt.NDArray[np.int32], num_sources: int, num_targets: int, within_one_pool: bool) -> None:
    """Raises InvariantError for a block that is not there, and for copies whose order would matter."""
    sources, targets = pairs[:, 0], pairs[:, 1]
    check_within("block", sources, 0, num_sources)
    check_within("block", targets, 0, num_targets)
    if len(np.unique(targets)) != len(targets):
        raise InvariantError("two blocks are copied into one")
    if within_one_pool and np.intersect1d(sources, targets).size:
        raise InvariantError("a block is both the source and the target of copies")


def check_batch(limits: BatchLimits, token_ids: npt.NDArray[np.int32], batch: AttentionBatch) -> None:
    """Raise InvariantError for a step that is larger than the limits or points outside of what they bound."""
    rows, sequences = len(token_ids), len(batch.context_lens)
    sizes = (rows, limits.rows), (sequences, limits.sequences), (batch.block_tables.shape[1], limits.table_width)
    if any(size > limit for size, limit in sizes) or len(batch.positions) != rows or len(batch.slots) != rows:
        raise InvariantError(f"a step of {rows} rows and {sequences} sequences does not fit its batch")
    check_within("token id", token_ids, 0, limits.vocab_size)
    check_within("position", batch.positions, 0, limits.positions)
    slots = batch.slots[batch.slots != -1]
    check_within("slot", slots, 0, limits.num_blocks * limits.block_size)
    if len(np.unique(slots)) != len(slots):
        raise InvariantError("two rows of one step write the same slot")
    if len(batch.query_start) != sequences + 1 or batch.query_start[0] != 0 or batch.query_start[-1] > rows or len(batch.block_tables) < sequences:
        raise InvariantError("the rows of a step do not belong to its sequences")
    for s in range(sequences):
        _check_sequence(limits, batch, s)


def _check_sequence(limits: BatchLimits, batch: AttentionBatch, s: int) -> None:
    first, last, context = int(batch.query_start[s]), int(batch.query_start[s + 1]), int(batch.context_lens[s])
    if last < first or (s < batch.num_decode and last != first + 1):
        raise InvariantError(f"sequence {s} of the step has {last - first} rows")
    if not 0 <= context <= min(batch.max_context, batch.block_tables.shape[1] * limits.block_size):
        raise InvariantError(f"sequence {s} of the step: its block table does not hold a context of {context}")
    if context == 0 or first == last:
        return
    positions = batch.positions[first:last]
    if positions[-1] >= context or (np.diff(positions) != 1).any():
        raise InvariantError(f"sequence {s} of the step: its positions are not a run within its context")
    oldest = max(0, int(positions[0]) - limits.window + 1) if limits.window else 0
    check_within("block", batch.block_tables[s, oldest // limits.block_size : int(positions[-1]) // limits.block_size + 1], 0, limits.num_blocks)
