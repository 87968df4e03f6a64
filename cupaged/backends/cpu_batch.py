"""CpuBatch: the rows of one step at fixed addresses, checked once, with the tasks of attention planned.

A program reads everything that changes from step to step through `words`, a table of int64: counts and the addresses of
the arrays. A task is a few consecutive rows of one sequence; how rows are cut into tasks has no influence on results.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.backends.base import AttentionBatch, BatchLimits
from cupaged.backends.checks import check_batch
from cupaged.backends.cpu_jit import kernel
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

_FEW_ROWS = 16
_ROW_COST = 8
"""A task's keys are read once: that costs as much as so many rows of arithmetic."""


class CpuBatch:
    """The step that `set` was last given.

    words       int64, see above
    token_ids   int32 [limits.rows]
    """

    def __init__(self, limits: BatchLimits, threads: int, chosen: I32 | None = None) -> None:
        self.limits, self.chosen = limits, chosen
        self._threads = threads
        self.rows = 0
        """Rows of the step."""
        self.token_ids: I32 = _zeros(limits.rows, np.int32)
        self._positions, self._slots = _zeros(limits.rows, np.int32), _zeros(limits.rows, np.int64)
        self._slots.fill(-1)
        self._tables = aligned((limits.sequences, limits.table_width), np.int32)
        self._query_start, self._contexts = _zeros(limits.sequences + 1, np.int32), _zeros(limits.sequences, np.int32)
        self._tasks, self._costs = _zeros((limits.rows, TASK_WORDS), np.int64), _zeros(limits.rows, np.int64)
        self._blocks, self._listed = _zeros(limits.sequences * limits.table_width, np.int32), _zeros(limits.sequences, np.uint8)
        self._writers = _zeros(limits.num_blocks * limits.block_size, np.int32)
        self._bounds = np.array([limits.vocab_size, limits.positions, limits.num_blocks, limits.block_size, limits.window, threads], np.int64)
        self.words = _zeros(16, np.int64)
        arrays = self.token_ids, self._positions, self._slots, self._tables
        self.words[TOKEN_IDS : TABLES + 1] = [array.ctypes.data for array in arrays]
        self.words[TABLE_STRIDE] = self._tables.strides[0]
        self.words[QUERY_START : TASKS + 1] = [array.ctypes.data for array in (self._query_start, self._contexts, self._tasks)]
        self.words[BLOCKS] = self._blocks.ctypes.data

    def set(self, token_ids: I32, attention: AttentionBatch) -> None:
        """Take over a step (token_ids int32 [T]). Raises InvariantError as backends.base says and keeps the one before."""
        limits = self.limits
        rows, sequences = len(token_ids), len(attention.context_lens)
        given = (
            *(np.ascontiguousarray(token_ids, np.int32), np.ascontiguousarray(attention.positions, np.int32)),
            *(np.ascontiguousarray(attention.slots, np.int64), np.ascontiguousarray(attention.block_tables, np.int32)),
            *(np.ascontiguousarray(attention.query_start, np.int32), np.ascontiguousarray(attention.context_lens, np.int32)),
        )
        fits = rows <= limits.rows and sequences <= limits.sequences and given[3].shape[1] <= limits.table_width
        if not (fits and _is_sound(*given, attention.num_decode, attention.max_context, self._bounds, self._writers)):
            check_batch(limits, token_ids, attention)  # says what is wrong
            raise InvariantError("the rows of a step do not belong to its sequences")
        own = self.token_ids, self._positions, self._slots, self._tables, self._query_start, self._contexts
        _copy(*given, *own, limits.block_size)
        tasks = _plan(self._query_start, self._contexts, self._positions, sequences, rows, self._bounds, self._tasks, self._costs)
        self.words[NUM_ROWS], self.words[NUM_SEQUENCES], self.words[NUM_TASKS] = rows, sequences, tasks
        self.words[NUM_BLOCKS] = _list_blocks(self._tasks[:tasks], self._tables, self._query_start, self._positions, self._bounds, self._listed, self._blocks)
        self.rows = rows


@kernel
def _is_sound(
    token_ids: Any, positions: Any, slots: Any, tables: Any, query_start: Any, contexts: Any, num_decode: int, max_context: int, bounds: Any, writers: Any
) -> bool:
    """What checks.check_batch checks, but for the capacity of the arrays. `writers` [slots] is zero before and after."""
    vocab, largest, num_blocks, block_size, window = bounds[0], bounds[1], bounds[2], bounds[3], bounds[4]
    rows, sequences = token_ids.shape[0], contexts.shape[0]
    if positions.shape[0] != rows or slots.shape[0] != rows or query_start.shape[0] != sequences + 1 or tables.shape[0] < sequences:
        return False
    if query_start[0] != 0 or query_start[sequences] > rows:
        return False
    for r in range(rows):
        if token_ids[r] < 0 or token_ids[r] >= vocab or positions[r] < 0 or positions[r] >= largest:
            return False
        if slots[r] < -1 or slots[r] >= num_blocks * block_size:
            return False
    twice = False
    for r in range(rows):
        if slots[r] >= 0:
            twice = twice or writers[slots[r]] != 0
            writers[slots[r]] = 1
    for r in range(rows):
        if slots[r] >= 0:
            writers[slots[r]] = 0
    if twice:
        return False
    for s in range(sequences):
        first, last, context = query_start[s], query_start[s + 1], contexts[s]
        if last < first or last > rows or (s < num_decode and last != first + 1):
            return False
        if context < 0 or context > max_context or context > tables.shape[1] * block_size:
            return False
        if context == 0 or first == last:
            continue
        for r in range(first, last):
            if positions[r] != positions[first] + r - first:
                return False
        if positions[last - 1] >= context:
            return False
        oldest = max(0, positions[first] - window + 1) if window > 0 else 0
        for i in range(oldest // block_size, positions[last - 1] // block_size + 1):
            if tables[s, i] < 0 or tables[s, i] >= num_blocks:
                return False
    return True


@kernel
def _copy(
    token_ids: Any, positions: Any, slots: Any, tables: Any, query_start: Any, contexts: Any,
    own_ids: Any, own_positions: Any, own_slots: Any, own_tables: Any, own_start: Any, own_contexts: Any, block_size: int,
) -> None:  # fmt: skip
    for r in range(token_ids.shape[0]):
        own_ids[r], own_positions[r], own_slots[r] = token_ids[r], positions[r], slots[r]
    own_start[0] = 0
    for s in range(contexts.shape[0]):
        own_start[s + 1], own_contexts[s] = query_start[s + 1], contexts[s]
        for i in range((contexts[s] + block_size - 1) // block_size):
            own_tables[s, i] = tables[s, i]


@kernel
def _plan(query_start: Any, contexts: Any, positions: Any, sequences: int, rows: int, bounds: Any, tasks: Any, costs: Any) -> int:
    """Cut the rows into tasks, the dearest first; returns how many there are."""
    many = rows - sequences >= 4 * TASK_ROWS * bounds[5]
    step = TASK_ROWS if many else _FEW_ROWS
    count = 0
    for s in range(sequences + 1):  # the last one: rows of no sequence
        stop = rows if s == sequences else query_start[s + 1]
        seen = s < sequences and contexts[s] > 0
        for row in range(query_start[s], stop, step):
            part = min(step, stop - row)
            tasks[count, 0], tasks[count, 1], tasks[count, 2] = s if seen else -1, row, part
            costs[count] = (positions[row] + part) * (part + _ROW_COST) if seen else 0
            count += 1
    order = np.argsort(-costs[:count], kind="mergesort")
    tasks[:count] = tasks[:count][order]
    return count


@kernel
def _list_blocks(tasks: Any, tables: Any, query_start: Any, positions: Any, bounds: Any, listed: Any, blocks: Any) -> int:
    """The blocks that the tasks read, in their order, each sequence's once; returns how many there are."""
    block_size, window = bounds[3], bounds[4]
    count = 0
    listed[:] = 0
    for t in range(tasks.shape[0]):
        s = tasks[t, 0]
        if s < 0 or listed[s]:
            continue
        listed[s] = 1
        first, last = positions[query_start[s]], positions[query_start[s + 1] - 1]
        oldest = max(0, first - window + 1) if window > 0 else 0
        for i in range(oldest // block_size, last // block_size + 1):
            blocks[count] = tables[s, i]
            count += 1
    return count


def _zeros(shape: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    array = aligned((shape,) if isinstance(shape, int) else shape, dtype)
    array.fill(0)
    return array
