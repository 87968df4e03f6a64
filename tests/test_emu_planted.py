"""Planted kernel bugs: each is caught under every schedule, where it is, and its repaired twin is never blamed.

A file of planted_kernels/ is one kernel; -DPLANTED puts the bug in. Lines marked `// blamed` are those that an error may
name: a race has two ends, and the schedule decides which comes second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import ml_dtypes
import numpy as np
import pytest

import kernels_cu
from cupaged.backends.emu import Mode, Module, Schedule, array, empty, find_compiler
from cupaged.errors import BackendError, KernelError

FOLDER = Path(__file__).parent / "planted_kernels"
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
RNG = np.random.default_rng(7)


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    try:
        find_compiler()
    except BackendError as error:
        pytest.skip(str(error))


def module(name: str, mode: Mode, planted: bool, options: tuple[str, ...] = ()) -> Module:
    text = (FOLDER / name).read_text(encoding="utf-8")
    include = '#include "device.cuh"\n'
    after = text[: text.index(include)].count("\n") + 2
    text = text.replace(include, f'{kernels_cu.source("device.cuh")}#line {after} "{name}"\n')
    return Module(text, (*options, *(["-DPLANTED"] if planted else [])), name=name, mode=mode)


def blamed_lines(name: str) -> list[int]:
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    return [number for number, line in enumerate(lines, start=1) if line.endswith("// blamed")]


@dataclass
class Run:
    """Kernels to launch one after the other, as (name, grid, block, arguments), and what `out` must be then."""

    launches: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[Any, ...]]]
    out: Any
    expected: Any

    def on(self, compiled: Module, schedule: Schedule) -> np.ndarray[Any, Any]:
        for kernel, grid, block, arguments in self.launches:
            compiled.get_function(kernel)(grid, block, arguments, schedule=schedule, seed=3)
        return np.array(self.out)


@dataclass(frozen=True)
class Plant:
    name: str
    kinds: tuple[str, ...]
    array: str | None
    run: Callable[[], Run]
    options: tuple[str, ...] = ()
    block: tuple[int, int, int] | None = (0, 0, 0)


def normal(*shape: int) -> Any:
    return array(RNG.standard_normal(shape, np.float32))


def missing_barrier() -> Run:
    x, out = normal(128), empty(128)
    return Run([("block_sum", (1,), (128,), (x, out))], out, np.full(128, x.sum()))


def missing_trailing_barrier() -> Run:
    x, out = normal(5, 128), empty(128)
    return Run([("reversed_sums", (1,), (128,), (x, out, np.int32(5)))], out, x.sum(0)[::-1])


def missing_copy_wait() -> Run:
    x, out = normal(5, 32, 4), empty(32)
    return Run([("tile_sums", (1,), (32,), (x, out, np.int32(5)))], out, x.sum((0, 2))[::-1])


def block_table(lengths: tuple[int, ...], dtype: Any) -> Callable[[], Run]:
    def run() -> Run:
        pool, table = empty((8, 16), dtype), array(np.full((len(lengths), 3), -1, np.int32))
        out, expected, block = empty(len(lengths)), [], 0
        for s, length in enumerate(lengths):
            values = RNG.standard_normal(length).astype(dtype)
            for first in range(0, length, 16):
                table[s, first // 16] = block
                pool[block, : length - first] = values[first : first + 16]
                block += 1
            expected.append(values.astype(np.float32).sum())
        arguments = (pool, table, array(np.array(lengths, np.int32)), out, np.int32(3), np.int32(16))
        return Run([("paged_sums", (len(lengths),), (32,), arguments)], out, np.array(expected))

    return run


def duplicate_slot() -> Run:
    rows, pool = normal(4, 48), array(np.zeros((6, 48), np.float32))
    expected = np.zeros((6, 48), np.float32)
    slots = array(np.array([5, 0, 3, 2], np.int64))
    expected[slots] = rows
    return Run([("scatter", (4,), (32,), (rows, slots, pool, np.int32(48)))], pool, expected)


def missing_syncwarp() -> Run:
    x, out = normal(64), empty(64)
    return Run([("rotations", (1,), (64,), (x, out, np.int32(3)))], out, np.roll(x.reshape(2, 32), -3, 1).ravel())


def misaligned_vector() -> Run:
    x, out = normal(4, 8), empty(4)
    return Run([("row_sums", (4,), (1,), (x, out, np.int32(8)))], out, x[:, :4].sum(1))


def early_return() -> Run:
    x, out = normal(90), empty(1)
    return Run([("sum_of_some", (1,), (128,), (x, out, np.int32(90)))], out, [x.sum()])


def uneven_loop() -> Run:
    x, out = normal(100), empty(100)
    return Run([("rounds", (1,), (64,), (x, out, np.int32(100)))], out, x + 1)


def int_overflow() -> Run:
    pages, out = array(np.array([1, 70000], np.int32)), empty(2, np.int64)
    return Run([("page_offsets", (1,), (2,), (pages, out, np.int32(65536)))], out, pages.astype(np.int64) * 65536)


def unsigned_overflow() -> Run:
    out = empty(5, np.int64)
    return Run([("row_offsets", (5,), (32,), (out, np.int32(2**30)))], out, np.arange(5) * 2**30)


def merge_in_wrong_base() -> Run:
    averages, logs, out = normal(32, 2), normal(32, 2), empty(32)
    weights = np.exp(logs.astype(np.float64))
    return Run([("merge", (1,), (32,), (averages, logs, out))], out, (weights * averages).sum(1) / weights.sum(1))


def poison_read(dtype: Any) -> Callable[[], Run]:
    def run() -> Run:
        weights, values, out = normal(20), empty(32, dtype), empty(1)
        values[:20] = RNG.standard_normal(20)
        expected = (weights * values[:20].astype(np.float32)).sum()
        return Run([("weighted", (1,), (32,), (weights, values, out, np.int32(20)))], out, [expected])

    return run


def byte_poison_read() -> Run:
    x, block, out = normal(20), empty(32, np.uint8), empty(1)
    expected = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32).sum()
    launches = [("write_bytes", (1,), (32,), (x, block, np.int32(20))), ("sum_bytes", (1,), (32,), (block, out, np.int32(20)))]
    return Run(launches, out, [expected])


def shuffle_mask() -> Run:
    x, out = normal(16), empty(16)
    return Run([("neighbours", (1,), (32,), (x, out))], out, np.repeat(x.reshape(8, 2).sum(1), 2))


def half_warp() -> Run:
    x, out = normal(16), empty(1)
    return Run([("half_sum", (1,), (32,), (x, out))], out, [x.sum()])


def shared_past_end() -> Run:
    x, out = normal(64), empty(64)
    return Run([("differences", (1,), (64,), (x, out))], out, np.append(np.diff(x), np.float32(0)))


def partly_filled(dtype: Any) -> Callable[[], Run]:
    def run() -> Run:
        source, target = empty(64, dtype), empty(64, dtype)
        source[:40] = RNG.standard_normal(40).astype(dtype)
        return Run([("copy_block", (1,), (64,), (source, target))], target.view(np.uint8), np.array(source).view(np.uint8))

    return run


def reused_stage() -> Run:
    x, out = normal(4, 32, 4), empty(64)
    return Run([("shared_tiles", (1,), (64,), (x, out, np.int32(4)))], out, np.tile(x.sum((0, 2)), 2))


def atomic_and_plain() -> Run:
    counter = array(np.zeros(1, np.int32))
    return Run([("count", (2,), (64,), (counter,))], counter, [128])


RACE, POISON, BOUNDS = "data race", "uninitialised read", "out of bounds"
PLANTS = [
    Plant("missing_barrier.cu", (RACE, POISON), "of_warp", missing_barrier),
    Plant("missing_trailing_barrier.cu", (RACE,), "tile", missing_trailing_barrier),
    Plant("missing_copy_wait.cu", (POISON,), "ring", missing_copy_wait),
    Plant("reused_stage.cu", (RACE, POISON), "stage", reused_stage),
    Plant("block_table_off_by_one.cu", (POISON,), "pool", block_table((20, 5), np.float32), ("-DKV_T=float",), None),
    Plant("block_table_off_by_one.cu", (POISON,), "pool", block_table((20, 5), np.float16), ("-DKV_T=__half",), None),
    Plant("block_table_off_by_one.cu", (BOUNDS,), "pool", block_table((16, 32), np.float32), ("-DKV_T=float",), None),
    Plant("duplicate_slot.cu", (RACE,), "pool", duplicate_slot, block=None),
    Plant("missing_syncwarp.cu", (RACE, POISON), "lanes", missing_syncwarp),
    Plant("misaligned_vector.cu", ("misaligned",), "x", misaligned_vector, block=None),
    Plant("early_return.cu", ("divergent barrier",), None, early_return),
    Plant("barrier_in_uneven_loop.cu", ("divergent barrier",), None, uneven_loop),
    Plant("int_overflow.cu", ("overflow",), None, int_overflow),
    Plant("unsigned_overflow.cu", ("overflow",), None, unsigned_overflow, block=(4, 0, 0)),
    Plant("poison_read.cu", (POISON,), "values", poison_read(np.float32), ("-DKV_T=float",)),
    Plant("poison_read.cu", (POISON,), "values", poison_read(ml_dtypes.bfloat16), ("-DKV_T=__nv_bfloat16",)),
    Plant("byte_poison_read.cu", (POISON,), "block", byte_poison_read),
    Plant("shuffle_mask.cu", ("warp mask",), None, shuffle_mask),
    Plant("half_warp_shuffle.cu", ("warp mask",), None, half_warp),
    Plant("shared_past_end.cu", (BOUNDS,), "numbers", shared_past_end),
    Plant("copy_of_partly_filled_block.cu", (POISON,), "source", partly_filled(np.float16), ("-DKV_T=__half",)),
    Plant("copy_of_partly_filled_block.cu", (POISON,), "source", partly_filled(np.uint8), ("-DKV_T=unsigned char",)),
    Plant("atomic_and_plain.cu", (RACE,), "counter", atomic_and_plain, block=None),
]
WRONG_RESULT = [Plant("merge_in_wrong_base.cu", (), None, merge_in_wrong_base)]


def name_of(plant: Plant) -> str:
    return "-".join([plant.name.removesuffix(".cu"), *(o.removeprefix("-DKV_T=") for o in plant.options), *plant.kinds[:1]])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("plant", PLANTS, ids=name_of)
def test_a_planted_bug_is_caught_and_named(plant: Plant, schedule: Schedule) -> None:
    if plant.kinds == ("misaligned",) and find_compiler().family == "clang" and "simt_aligned" not in kernels_cu.source("device.cuh"):
        pytest.skip("clang does not check the alignment of a struct that is copied")
    with pytest.raises(KernelError) as caught:
        plant.run().on(module(plant.name, "check", True, plant.options), schedule)
    error, message = caught.value, str(caught.value)
    assert error.kind in plant.kinds, message
    assert error.array == plant.array, message
    assert (error.file, error.line) in [(plant.name, line) for line in blamed_lines(plant.name)], message
    assert plant.block in (None, error.block), message
    assert error.block is not None
    assert error.thread is not None
    assert message.startswith(f"{error.kernel}: ")
    assert f" at {plant.name}:{error.line}" in message
    assert message.endswith(f"block {error.block} thread {error.thread}")
    assert "\n" not in message
    assert plant.array is None or f"'{plant.array}'" in message


@pytest.mark.parametrize("mode", get_args(Mode))
@pytest.mark.parametrize("plant", PLANTS + WRONG_RESULT, ids=name_of)
def test_the_repaired_kernel_is_not_blamed_and_its_bits_do_not_depend_on_the_schedule(plant: Plant, mode: Mode) -> None:
    compiled = module(plant.name, mode, False, plant.options)
    state = RNG.bit_generator.state
    outputs = []
    for schedule in SCHEDULES:
        RNG.bit_generator.state = state  # the same input
        run = plant.run()
        outputs.append(run.on(compiled, schedule))
        np.testing.assert_allclose(outputs[-1], run.expected, rtol=2e-5, atol=2e-5)
    assert len({out.tobytes() for out in outputs}) == 1


@pytest.mark.parametrize("plant", WRONG_RESULT, ids=name_of)
def test_a_wrong_result_breaks_no_rule_and_shows_in_its_numbers(plant: Plant) -> None:
    run = plant.run()
    out = run.on(module(plant.name, "check", True, plant.options), "forward")
    assert np.abs(out - run.expected).max() > 0.01


def test_every_planted_kernel_is_tested() -> None:
    assert {plant.name for plant in PLANTS + WRONG_RESULT} == {path.name for path in FOLDER.glob("*.cu")}
