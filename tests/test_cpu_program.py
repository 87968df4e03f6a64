"""Programs of the CPU engine: aligned arrays, and tasks that a crew shares out."""

from __future__ import annotations

import numpy as np
import pytest

from cupaged.backends import cpu_code
from cupaged.backends.cpu_program import PART, aligned, operation
from cupaged.backends.cpu_threads import Crew


@pytest.mark.parametrize("shape", [(3,), (5, 7), (1 << 20, 3)])
def test_an_array_begins_at_a_cache_line_and_may_be_written(shape: tuple[int, ...]) -> None:
    array = aligned(shape, np.float32)
    assert array.shape == shape
    assert array.ctypes.data % 64 == 0
    array[...] = 1
    assert array.sum() == array.size


def test_more_memory_than_there_can_be_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        aligned((1 << 60,), np.uint8)


@pytest.fixture(scope="module")
def count_tasks(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The address of an operation that counts its tasks, words 2 (number) and 3 (address of int64 [number]), and who did them (word 4).

    The task in word 5 waits till all the others are done, for a while.
    """
    pytest.importorskip("numba")
    if not cpu_code.MAPS_IMAGES:
        pytest.skip("no images are mapped here")
    from cupaged.backends.cpu_kernels import compiler
    from cupaged.backends.cpu_kernels.image import link
    from cupaged.backends.cpu_kernels.ir import atomic_add, atomic_load, set_word, word
    from cupaged.backends.cpu_kernels.jit import operation_kernel
    from cupaged.backends.cpu_kernels.program import take_task

    @operation_kernel
    def count(member: int, operation: int) -> None:
        while True:
            task = take_task(member, word(operation, 2))
            if task < 0:
                return
            looks = 0
            while task == word(operation, 5) and looks < 1 << 30 and atomic_load(word(operation, 6)) < word(operation, 2) - 1:
                looks += 1
            atomic_add(word(operation, 6), 1)
            atomic_add(word(operation, 3) + 8 * task, 1)
            set_word(word(operation, 4), task, word(member, PART))

    file = tmp_path_factory.mktemp("kernels") / "count.code"
    file.write_bytes(link(compiler.compile_object(count), cpu_code.ENTRY))
    return cpu_code.map_image(file)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_task_is_done_once(size: int, count_tasks: int) -> None:
    crew, rows = Crew(size), np.zeros(1, np.int64)
    total = np.zeros(1, np.int64)
    numbers = [0, 1, 2, 5, 8, 100, 3, 0, 64, 1]
    done = [(np.zeros(number + 1, np.int64), np.full(number + 1, -1, np.int64)) for number in numbers]
    table = np.stack([operation(count_tasks, rows, [n, counts.ctypes.data, who.ctypes.data, -1, total.ctypes.data]) for n, (counts, who) in zip(numbers, done, strict=True)])
    for turn in range(1, 51):
        crew.run(table)
        crew.run(table[4:5], alone=True)  # between two of the crew, by its caller
        for i, (number, (counts, who)) in enumerate(zip(numbers, done, strict=True)):
            assert (counts[:number] == turn * (2 if i == 4 else 1)).all()
            assert counts[number] == 0
            assert ((who[:number] >= 0) & (who[:number] < size)).all()
            assert who[number] == -1


def test_a_late_members_tasks_are_done_by_others(count_tasks: int) -> None:
    """The first task of the last member lasts till all others are done, its own share's, too."""
    size, number, rows = 3, 30, np.zeros(1, np.int64)
    counts, who, total = np.zeros(number, np.int64), np.full(number, -1, np.int64), np.zeros(1, np.int64)
    Crew(size).run(operation(count_tasks, rows, [number, counts.ctypes.data, who.ctypes.data, 20, total.ctypes.data])[None])
    assert (counts == 1).all()
    assert (who[21:] != who[20]).all()
