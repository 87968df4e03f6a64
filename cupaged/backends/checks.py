"""What the host checks before an operation reads or writes through indices: the same for every backend."""

from __future__ import annotations

from collections.abc import Callable
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


def fill_tokens(token_ids: npt.NDArray[np.int32], sources: npt.NDArray[np.int32] | None, chosen: npt.NDArray[np.int32] | None) -> npt.NDArray[np.int32]:
    """The tokens of Backend.set_batch where the chosen ones are there already. Raises InvariantError for a source that is not."""
    if sources is None:
        return token_ids
    check_sources(token_ids, sources, 0 if chosen is None else len(chosen))
    return token_ids if chosen is None else np.where(sources >= 0, chosen[sources], token_ids)


def check_sources(token_ids: npt.NDArray[np.int32], sources: npt.NDArray[np.int32], num_chosen: int) -> None:
    """Raises InvariantError for sources that are not there."""
    if sources.shape != token_ids.shape:
        raise InvariantError(f"{len(sources)} sources for {len(token_ids)} tokens")
    check_within("token source", sources, -1, num_chosen)


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
    _check_sequences(limits, batch, np.diff(batch.query_start.astype(np.int64)))  # in int32 a difference may overflow


def _check_sequences(limits: BatchLimits, batch: AttentionBatch, lengths: npt.NDArray[np.int64]) -> None:
    """All sequences at once: a loop over them would cost a device more than the launch of its step."""
    numbers, contexts = np.arange(len(lengths)), batch.context_lens
    _refuse((lengths < 0) | ((numbers < batch.num_decode) & (lengths != 1)), lambda s: f"has {lengths[s]} rows")
    most = min(batch.max_context, batch.block_tables.shape[1] * limits.block_size)
    _refuse((contexts < 0) | (contexts > most), lambda s: f"its block table does not hold a context of {contexts[s]}")

    live = np.flatnonzero((contexts > 0) & (lengths > 0))
    begin, count = batch.query_start[live], lengths[live]
    first, last = batch.positions[begin], batch.positions[begin + count - 1]
    of_row = np.repeat(np.arange(len(live)), count)
    place = np.arange(len(of_row)) - np.repeat(np.cumsum(count) - count, count)  # of a row in its sequence
    wrong = last >= contexts[live]
    wrong[of_row[batch.positions[begin[of_row] + place] != first[of_row] + place]] = True
    _refuse_of(live, wrong, lambda s: "its positions are not a run within its context")

    oldest = np.maximum(first - limits.window + 1, 0) if limits.window else np.zeros_like(first)
    columns, tables = np.arange(batch.block_tables.shape[1]), batch.block_tables[live]
    needed = (columns >= oldest[:, None] // limits.block_size) & (columns <= last[:, None] // limits.block_size)
    outside = needed & ((tables < 0) | (tables >= limits.num_blocks))
    _refuse_of(live, outside.any(axis=1), lambda s: f"a block of its context is out of bounds: not within 0 .. {limits.num_blocks - 1}")


def _refuse(wrong: npt.NDArray[np.bool_], reason: Callable[[int], str]) -> None:
    _refuse_of(np.arange(len(wrong)), wrong, reason)


def _refuse_of(sequences: npt.NDArray[np.signedinteger], wrong: npt.NDArray[np.bool_], reason: Callable[[int], str]) -> None:
    """Raises InvariantError for the first of these sequences that is wrong."""
    if wrong.any():
        s = int(sequences[np.argmax(wrong)])
        raise InvariantError(f"sequence {s} of the step: {reason(s)}")
