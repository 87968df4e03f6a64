"""How a crew runs programs: the walk over a table, the barrier between its operations, and how its threads are woken."""

from __future__ import annotations

from llvmlite import ir
from numba import types

from cupaged.backends.cpu_kernels.ir import (
    I32,
    I64,
    Builder,
    Value,
    atomic_add,
    atomic_load,
    atomic_store,
    call_kernel,
    emitter,
    set_word,
    spin_hint,
    word,
)
from cupaged.backends.cpu_kernels.jit import kernel, operation_kernel
from cupaged.backends.cpu_program import COUNT, KERNEL, LINE, PART, PARTS, SYNC, TABLE, TURN, WORDS
from cupaged.backends.cpu_threads import (
    ARRIVED,
    CALL_COUNT,
    CALL_STOPS,
    CALL_TABLE,
    CALLS,
    CONDITION,
    GENERATION,
    LOCK,
    MUTEX,
    TAKEN,
    UNLOCK,
    WAIT,
    WAKE_ALL,
    YIELD,
)

_PATIENCE = 2000
"""Looks at the barrier before a member offers its core to others; about 20 us."""

_FOR_EVER, _PLAIN = -1, 0
"""What Windows' function wants to know beside the condition and the lock. POSIX' takes two arguments and ignores others."""


@emitter(returns=types.int64)
def _call_system(b: Builder, function: Value, first: Value, second: Value) -> Value:
    """Call a function of the system, by its address."""
    kind = ir.FunctionType(I32, [I64, I64, I32, I32])
    return b.zext(b.call(b.inttoptr(function, kind.as_pointer()), [first, second, I32(_FOR_EVER), I32(_PLAIN)]), I64)


@kernel
def share(number: int, part: int, parts: int) -> int:
    """The first of `number` things that belongs to a member; to the next one, the first that does not."""
    return number * part // parts


@kernel
def take_task(member: int, number: int) -> int:
    """The next of an operation's tasks 0 .. number - 1: of the member's own share, else of another's; -1 if there is none."""
    parts, taken = word(member, PARTS), word(member, SYNC) + TAKEN + 8 * word(member, TURN)
    for i in range(parts):
        part = (word(member, PART) + i) % parts
        first, end = share(number, part, parts), share(number, part + 1, parts)
        if first + atomic_load(taken + LINE * part) < end:
            task = first + atomic_add(taken + LINE * part, 1)
            if task < end:
                return task
    return -1


@kernel
def _begin_next(member: int) -> None:
    """Turn to the counters of the next operation. Nobody looks at the last one's until this one is over."""
    turn = word(member, TURN)
    atomic_store(word(member, SYNC) + TAKEN + LINE * word(member, PART) + 8 * turn, 0)
    set_word(member, TURN, 1 - turn)


@kernel
def wait_for_all(member: int) -> None:
    sync, parts = word(member, SYNC), word(member, PARTS)
    generation = atomic_load(sync + GENERATION)
    if atomic_add(sync + ARRIVED, 1) == parts - 1:
        atomic_store(sync + ARRIVED, 0)
        atomic_add(sync + GENERATION, 1)
        _begin_next(member)
        return
    looks = 0
    while atomic_load(sync + GENERATION) == generation:
        spin_hint()
        looks += 1
        if looks > _PATIENCE:
            _call_system(word(sync + YIELD, 0), 0, 0)
    _begin_next(member)


@kernel
def _run_table(member: int, table: int, count: int) -> None:
    for i in range(count):
        operation = table + 8 * WORDS * i
        call_kernel(word(operation, KERNEL), member, operation)
        wait_for_all(member)


@kernel
def _lock(sync: int) -> None:
    _call_system(word(sync + LOCK, 0), sync + MUTEX, 0)


@kernel
def _unlock(sync: int) -> None:
    _call_system(word(sync + UNLOCK, 0), sync + MUTEX, 0)


@kernel
def _wake(sync: int, table: int, count: int, stops: int) -> None:
    _lock(sync)
    set_word(sync + CALL_TABLE, 0, table)
    set_word(sync + CALL_COUNT, 0, count)
    set_word(sync + CALL_STOPS, 0, stops)
    atomic_add(sync + CALLS, 1)
    _call_system(word(sync + WAKE_ALL, 0), sync + CONDITION, 0)
    _unlock(sync)


@operation_kernel
def run(member: int, call: int) -> None:
    """Run a table by a member that is alone."""
    _run_table(member, word(call, TABLE), word(call, COUNT))


@operation_kernel
def lead(member: int, call: int) -> None:
    """Wake the others and run a table with them."""
    _wake(word(member, SYNC), word(call, TABLE), word(call, COUNT), 0)
    _run_table(member, word(call, TABLE), word(call, COUNT))


@operation_kernel
def serve(member: int, call: int) -> None:
    """Run whatever the crew is woken for, till it is dismissed. Nobody misses a call: each ends at a barrier of all."""
    sync, seen = word(member, SYNC), 0
    while True:
        _lock(sync)
        while atomic_load(sync + CALLS) == seen:
            _call_system(word(sync + WAIT, 0), sync + CONDITION, sync + MUTEX)
        table, count, stops = word(sync + CALL_TABLE, 0), word(sync + CALL_COUNT, 0), word(sync + CALL_STOPS, 0)
        _unlock(sync)
        seen += 1
        if stops:
            return
        _run_table(member, table, count)


@operation_kernel
def dismiss(member: int, call: int) -> None:
    """Let the threads of a crew end."""
    _wake(word(member, SYNC), 0, 0, 1)
