"""CpuBatch: the rows of one step at fixed addresses, checked once, with the tasks of attention planned.

A program reads everything that changes from step to step through `words`, a table of int64: counts and the addresses of
the arrays. A task is a few consecutive rows of one sequence; how rows are cut into tasks has no influence on results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.backends.base import AttentionBatch, BatchLimits
from cupaged.backends.checks import check_batch
from cupaged.backends.cpu_code import function
from cupaged.backends.cpu_program import aligned
from cupaged.errors import InvariantError

I32 = npt.NDArray[np.int32]

NUM_ROWS, NUM_SEQUENCES, NUM_TASKS, TOKEN_IDS, POSITIONS, SLOTS, TABLES, TABLE_STRIDE, QUERY_START, CONTEXT_LENS, TASKS, NUM_BLOCKS, BLOCKS = range(13)
"""Words of a batch. TABLE_STRIDE is in bytes."""

SEQUENCE, FIRST_ROW, ROW_COUNT = range(3)
"""Words of a task; sequence -1: rows that see nothing."""

TASK_WORDS = 4

TASK_ROWS = 32
"""Most rows of a task: the more, the less often keys and values are read."""

GIVEN_ROWS, GIVEN_SEQUENCES, GIVEN_DECODE, GIVEN_LONGEST, GIVEN_WIDTH, GIVEN_IDS, GIVEN_POSITIONS, GIVEN_SLOTS, GIVEN_TABLES, GIVEN_START, GIVEN_CONTEXTS = range(11)
"""Words of a step that is given: its sizes, and its arrays. GIVEN_WIDTH is the tables'."""

OWN, VOCAB, LARGEST, POOL, BLOCK_SIZE, WINDOW, THREADS, WRITERS, COSTS, LISTED, SOUND = range(11, 22)
"""Words behind them: the batch's, its limits, arrays to work in, and whether the step was taken over."""


class CpuBatch:
    """The step that `set` was last given.

    words       int64, see above
    token_ids   int32 [limits.rows]
    """

    def __init__(self, limits: BatchLimits, threads: int, chosen: I32 | None = None) -> None:
        self.limits, self.chosen = limits, chosen
        self.rows = 0
        """Rows of the step."""
        self.token_ids: I32 = _zeros(limits.rows, np.int32)
        self._positions, self._slots = _zeros(limits.rows, np.int32), _zeros(limits.rows, np.int64)
        self._slots.fill(-1)
        self._tables = aligned((limits.sequences, limits.table_width), np.int32)
        self._query_start, self._contexts = _zeros(limits.sequences + 1, np.int32), _zeros(limits.sequences, np.int32)
        self._tasks, self._costs = _zeros((limits.rows, TASK_WORDS), np.int64), _zeros(limits.rows, np.int64)
        self._blocks, self._listed = _zeros(limits.sequences * limits.table_width, np.int32), _zeros(limits.sequences, np.uint8)
        self._writers = _zeros(limits.num_blocks * limits.block_size, np.uint8)
        self.words = _zeros(16, np.int64)
        arrays = self.token_ids, self._positions, self._slots, self._tables
        self.words[TOKEN_IDS : TABLES + 1] = [array.ctypes.data for array in arrays]
        self.words[TABLE_STRIDE] = self._tables.strides[0]
        self.words[QUERY_START : TASKS + 1] = [array.ctypes.data for array in (self._query_start, self._contexts, self._tasks)]
        self.words[BLOCKS] = self._blocks.ctypes.data
        self._take, self._given = function("take_step"), _zeros(22, np.int64)
        bounds = limits.vocab_size, limits.positions, limits.num_blocks, limits.block_size, limits.window, threads
        work = self._writers, self._costs, self._listed
        self._given[OWN:SOUND] = [self.words.ctypes.data, *bounds, *(array.ctypes.data for array in work)]

    def set(self, token_ids: I32, attention: AttentionBatch) -> None:
        """Take over a step (token_ids int32 [T]). Raises InvariantError as backends.base says and keeps the one before."""
        rows, sequences = len(token_ids), len(attention.context_lens)
        arrays = (
            *(np.ascontiguousarray(token_ids, np.int32), np.ascontiguousarray(attention.positions, np.int32)),
            *(np.ascontiguousarray(attention.slots, np.int64), np.ascontiguousarray(attention.block_tables, np.int32)),
            *(np.ascontiguousarray(attention.query_start, np.int32), np.ascontiguousarray(attention.context_lens, np.int32)),
        )
        if not (self._fits(*arrays) and self._take_over(arrays, attention)):
            check_batch(self.limits, token_ids, attention)  # says what is wrong
            raise InvariantError("the rows of a step do not belong to its sequences")
        self.words[NUM_ROWS], self.words[NUM_SEQUENCES], self.rows = rows, sequences, rows

    def _fits(self, token_ids: I32, positions: I32, slots: Any, tables: I32, query_start: I32, contexts: I32) -> bool:
        rows, sequences, limits = len(token_ids), len(contexts), self.limits
        alike = len(positions) == len(slots) == rows and len(query_start) == sequences + 1 and len(tables) >= sequences
        return alike and rows <= limits.rows and sequences <= limits.sequences and tables.shape[1] <= limits.table_width

    def _take_over(self, arrays: Sequence[npt.NDArray[Any]], attention: AttentionBatch) -> bool:
        """Copy a step that is sound, and plan its tasks."""
        sizes = len(arrays[0]), len(arrays[-1]), attention.num_decode, attention.max_context, arrays[3].shape[1]
        self._given[:OWN] = [*sizes, *(array.ctypes.data for array in arrays)]
        self._take(0, self._given.ctypes.data)
        return bool(self._given[SOUND])


def _zeros(shape: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    array = aligned((shape,) if isinstance(shape, int) else shape, dtype)
    array.fill(0)
    return array
