"""StepPlan -> flat arrays: one row a token, with where it reads and writes the paged cache.

    plan            A: 1 token      B: 1 token      C: 3 tokens
    token_ids       [ a17           b5              c0   c1   c2 ]        one row a token
    positions       [ 17            5               0    1    2  ]
    slots           [ A's block 1   B's block 0     C's block 0 ...]      block * block_size + offset
    query_start     [ 0             1               2              5 ]
    context_lens    [ 18            6               3 ]
    num_decode      2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cupaged.backends.base import AttentionBatch
from cupaged.errors import InvariantError
from cupaged.step_plan import UNREAD, Decodes, IntArray, ScheduledSequence, StepPlan, as_matrix


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A step's rows on the host.

    token_ids           int32 [T]
    attention           where the rows read and write (NumPy arrays; see AttentionBatch)
    sample_rows         int32 [num_samples], the last row of the sequence, for every token to choose
    sample_positions    int32 [num_samples], where these tokens will stand
    sources             int32 [T], which sample of the plan before chooses the row's token, or -1; None: all tokens are known
    """

    token_ids: IntArray
    attention: AttentionBatch
    sample_rows: IntArray
    sample_positions: IntArray
    sources: IntArray | None


def build(plan: StepPlan) -> Batch:
    """Flatten a plan. Raises InvariantError for a plan whose tables do not cover its rows, or with unread tokens that have no source."""
    items = plan.sequences
    if isinstance(items, Decodes):
        return _of_decodes(items, plan.block_size)
    lengths = np.array([item.num_tokens for item in items], np.int32)
    starts = np.array([item.start for item in items], np.int32)
    query_start = np.zeros(len(items) + 1, np.int32)
    np.cumsum(lengths, out=query_start[1:])
    context_lens = starts + lengths
    tables = as_matrix([item.blocks for item in items])

    sequence_of_row = np.repeat(np.arange(len(items)), lengths)
    positions = np.arange(query_start[-1], dtype=np.int32) + np.repeat(starts - query_start[:-1], lengths)
    samples = np.array([len(item.samples) for item in items], np.int32)
    token_ids = np.concatenate([item.token_ids for item in items])
    return Batch(
        token_ids=token_ids,
        attention=AttentionBatch(
            positions=positions,
            slots=_slots(tables, sequence_of_row, positions, plan.block_size),
            block_tables=tables,
            query_start=query_start,
            context_lens=context_lens,
            num_decode=plan.num_decode,
            max_context=int(context_lens.max()),
        ),
        sample_rows=np.repeat(query_start[1:] - 1, samples),
        sample_positions=np.repeat(context_lens, samples),
        sources=_sources(items, token_ids, lengths),
    )


def _of_decodes(decodes: Decodes, block_size: int) -> Batch:
    """The same where every sequence has one row."""
    count, starts, tables = len(decodes), decodes.starts, decodes.block_tables
    rows = np.arange(count + 1, dtype=np.int32)
    context_lens = starts + np.int32(1)
    return Batch(
        token_ids=decodes.token_ids,
        attention=AttentionBatch(
            positions=starts,
            slots=_slots(tables, rows[:-1], starts, block_size),
            block_tables=tables,
            query_start=rows,
            context_lens=context_lens,
            num_decode=count,
            max_context=int(context_lens.max()),
        ),
        sample_rows=rows[:-1],
        sample_positions=context_lens,
        sources=decodes.token_sources,
    )


def _slots(tables: IntArray, sequence_of_row: npt.NDArray[np.signedinteger], positions: IntArray, block_size: int) -> npt.NDArray[np.int64]:
    """Where the rows write."""
    logical, offset = np.divmod(positions, block_size)
    if logical.max() >= tables.shape[1]:
        raise InvariantError("a block table is too short for the tokens that its sequence computes")
    blocks = tables[sequence_of_row, logical].astype(np.int64)
    if blocks.min() < 0:
        raise InvariantError("a block table is too short for the tokens that its sequence computes")
    slots: npt.NDArray[np.int64] = blocks * block_size + offset
    return slots


def _sources(items: Sequence[ScheduledSequence], token_ids: IntArray, lengths: IntArray) -> IntArray | None:
    of_items = [item.token_source for item in items]
    if max(of_items) < 0:
        return None  # set_batch refuses a token without a value
    sources = np.repeat(np.array(of_items, np.int32), lengths)
    if ((token_ids == UNREAD) != (sources >= 0)).any():
        raise InvariantError("a token has no value and no source, or both")
    return sources
