"""take_step: a step's rows are checked, copied to a batch's own arrays, and cut into the tasks of attention (cpu_batch.py)."""

from __future__ import annotations

from typing import Any

from numba import carray

from cupaged.backends.cpu_batch import (
    BLOCK_SIZE,
    BLOCKS,
    CONTEXT_LENS,
    COSTS,
    GIVEN_CONTEXTS,
    GIVEN_DECODE,
    GIVEN_IDS,
    GIVEN_LONGEST,
    GIVEN_POSITIONS,
    GIVEN_ROWS,
    GIVEN_SEQUENCES,
    GIVEN_SLOTS,
    GIVEN_START,
    GIVEN_TABLES,
    GIVEN_WIDTH,
    LARGEST,
    LISTED,
    NUM_BLOCKS,
    NUM_TASKS,
    OWN,
    POOL,
    POSITIONS,
    QUERY_START,
    SLOTS,
    SOUND,
    TABLE_STRIDE,
    TABLES,
    TASK_ROWS,
    TASK_WORDS,
    TASKS,
    THREADS,
    TOKEN_IDS,
    VOCAB,
    WINDOW,
    WRITERS,
)
from cupaged.backends.cpu_kernels.arrays import int32s, int64s, uint8s
from cupaged.backends.cpu_kernels.ir import pointer_to_int32, set_word, word
from cupaged.backends.cpu_kernels.jit import kernel, operation_kernel

_FEW_ROWS = 16
_MEMBER = 1 << 40
"""More than any cost: tasks are in the order of the members first."""
_ROW_COST = 8
"""A task's keys are read once: that costs as much as so many rows of arithmetic."""


@operation_kernel
def take_step(member: int, given: int) -> None:
    """Take over the step that is given (cpu_batch.GIVEN_ROWS and on) if it is sound, and say whether it was."""
    sound = _rows_are_sound(given) and _slots_are_sound(given) and _sequences_are_sound(given)
    set_word(given, SOUND, 1 if sound else 0)
    if sound:
        _copy(given)
        tasks = _plan(given)
        set_word(word(given, OWN), NUM_TASKS, tasks)
        set_word(word(given, OWN), NUM_BLOCKS, _list_blocks(given, tasks))


# ---- what checks.check_batch checks, but for the capacity of the arrays


@kernel
def _rows_are_sound(given: int) -> bool:
    rows, sequences = word(given, GIVEN_ROWS), word(given, GIVEN_SEQUENCES)
    query_start = int32s(given, GIVEN_START, sequences + 1)
    if query_start[0] != 0 or query_start[sequences] > rows:
        return False
    token_ids, positions = int32s(given, GIVEN_IDS, rows), int32s(given, GIVEN_POSITIONS, rows)
    for r in range(rows):
        if token_ids[r] < 0 or token_ids[r] >= word(given, VOCAB) or positions[r] < 0 or positions[r] >= word(given, LARGEST):
            return False
    return True


@kernel
def _slots_are_sound(given: int) -> bool:
    """`writers` [slots] is zero before and after."""
    rows, pool = word(given, GIVEN_ROWS), word(given, POOL) * word(given, BLOCK_SIZE)
    slots, writers = int64s(given, GIVEN_SLOTS, rows), uint8s(given, WRITERS, pool)
    for r in range(rows):
        if slots[r] < -1 or slots[r] >= pool:
            return False
    twice = False
    for r in range(rows):
        if slots[r] >= 0:
            twice = twice or writers[slots[r]] != 0
            writers[slots[r]] = 1
    for r in range(rows):
        if slots[r] >= 0:
            writers[slots[r]] = 0
    return not twice


@kernel
def _sequences_are_sound(given: int) -> bool:
    rows, sequences, width, block_size = word(given, GIVEN_ROWS), word(given, GIVEN_SEQUENCES), word(given, GIVEN_WIDTH), word(given, BLOCK_SIZE)
    query_start, contexts = int32s(given, GIVEN_START, sequences + 1), int32s(given, GIVEN_CONTEXTS, sequences)
    positions, tables = int32s(given, GIVEN_POSITIONS, rows), int32s(given, GIVEN_TABLES, sequences * width)
    for s in range(sequences):
        first, last, context = query_start[s], query_start[s + 1], contexts[s]
        if last < first or last > rows or (s < word(given, GIVEN_DECODE) and last != first + 1):
            return False
        if context < 0 or context > word(given, GIVEN_LONGEST) or context > width * block_size:
            return False
        if context == 0 or first == last:
            continue
        for r in range(first, last):
            if positions[r] != positions[first] + r - first:
                return False
        if positions[last - 1] >= context:
            return False
        for i in range(_oldest(positions[first], word(given, WINDOW)) // block_size, positions[last - 1] // block_size + 1):
            if tables[s * width + i] < 0 or tables[s * width + i] >= word(given, POOL):
                return False
    return True


@kernel
def _oldest(position: int, window: int) -> int:
    """The first position that a row sees."""
    return max(0, position - window + 1) if window > 0 else 0


# ---- taking it over


@kernel
def _copy(given: int) -> None:
    rows, sequences, width, own = word(given, GIVEN_ROWS), word(given, GIVEN_SEQUENCES), word(given, GIVEN_WIDTH), word(given, OWN)
    token_ids, positions, slots = int32s(given, GIVEN_IDS, rows), int32s(given, GIVEN_POSITIONS, rows), int64s(given, GIVEN_SLOTS, rows)
    own_ids, own_positions, own_slots = int32s(own, TOKEN_IDS, rows), int32s(own, POSITIONS, rows), int64s(own, SLOTS, rows)
    for r in range(rows):
        own_ids[r], own_positions[r], own_slots[r] = token_ids[r], positions[r], slots[r]
    query_start, contexts = int32s(given, GIVEN_START, sequences + 1), int32s(given, GIVEN_CONTEXTS, sequences)
    own_start, own_contexts = int32s(own, QUERY_START, sequences + 1), int32s(own, CONTEXT_LENS, sequences)
    tables, stride = int32s(given, GIVEN_TABLES, sequences * width), word(own, TABLE_STRIDE)
    own_start[0] = 0
    for s in range(sequences):
        own_start[s + 1], own_contexts[s] = query_start[s + 1], contexts[s]
        own_table = carray(pointer_to_int32(word(own, TABLES) + s * stride), stride // 4)
        for i in range((contexts[s] + word(given, BLOCK_SIZE) - 1) // word(given, BLOCK_SIZE)):
            own_table[i] = tables[s * width + i]


@kernel
def _plan(given: int) -> int:
    """Cut the rows into tasks, member after member, the dearest of its rows first; returns how many there are."""
    rows, sequences, own = word(given, GIVEN_ROWS), word(given, GIVEN_SEQUENCES), word(given, OWN)
    query_start, contexts, positions = int32s(own, QUERY_START, sequences + 1), int32s(own, CONTEXT_LENS, sequences), int32s(own, POSITIONS, rows)
    tasks, costs = int64s(own, TASKS, rows * TASK_WORDS), int64s(given, COSTS, rows)
    many = rows - sequences >= 4 * TASK_ROWS * word(given, THREADS)
    step = TASK_ROWS if many else _FEW_ROWS
    count = 0
    for s in range(sequences + 1):  # the last one: rows of no sequence
        stop = rows if s == sequences else query_start[s + 1]
        seen = s < sequences and contexts[s] > 0
        for row in range(query_start[s], stop, step):
            part = min(step, stop - row)
            cost = (positions[row] + part) * (part + _ROW_COST) if seen else 0
            tasks[count * TASK_WORDS], tasks[count * TASK_WORDS + 1], tasks[count * TASK_WORDS + 2] = s if seen else -1, row, part
            costs[count] = cost + (word(given, THREADS) - 1 - row * word(given, THREADS) // rows) * _MEMBER
            count += 1
    _sort(tasks, costs, count)
    return count


@kernel
def _sort(tasks: Any, costs: Any, count: int) -> None:
    """By cost, the largest first (Shell's method)."""
    gap = count // 2
    while gap > 0:
        for i in range(gap, count):
            j = i
            while j >= gap and costs[j - gap] < costs[j]:
                costs[j - gap], costs[j] = costs[j], costs[j - gap]
                for k in range(j * TASK_WORDS, j * TASK_WORDS + TASK_WORDS):
                    other = k - gap * TASK_WORDS
                    tasks[other], tasks[k] = tasks[k], tasks[other]
                j -= gap
        gap //= 2


@kernel
def _list_blocks(given: int, num_tasks: int) -> int:
    """The blocks that the tasks read, in their order, each sequence's once; returns how many there are."""
    rows, sequences, own, block_size = word(given, GIVEN_ROWS), word(given, GIVEN_SEQUENCES), word(given, OWN), word(given, BLOCK_SIZE)
    tasks, positions, query_start = int64s(own, TASKS, rows * TASK_WORDS), int32s(own, POSITIONS, rows), int32s(own, QUERY_START, sequences + 1)
    listed, stride, count = uint8s(given, LISTED, sequences), word(own, TABLE_STRIDE), 0
    for s in range(sequences):
        listed[s] = 0
    for t in range(num_tasks):
        s = tasks[t * TASK_WORDS]
        if s < 0 or listed[s]:
            continue
        listed[s] = 1
        table = carray(pointer_to_int32(word(own, TABLES) + s * stride), stride // 4)
        blocks = int32s(own, BLOCKS, count + stride // 4)
        for i in range(_oldest(positions[query_start[s]], word(given, WINDOW)) // block_size, positions[query_start[s + 1] - 1] // block_size + 1):
            blocks[count] = table[i]
            count += 1
    return count
