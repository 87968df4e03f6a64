"""The race detector against a plain definition of "ordered", on random programs.

A program is a few rounds for 64 threads: in each a thread reads and writes a few shared numbers, then it synchronises
with its half warp, its warp, the block or nobody. The oracle keeps a vector clock of all threads: two accesses to one
number, at least one of them a write, race when neither clock has seen the other. Shuffles make lanes wait for each other
and order nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest

from cupaged.backends.emu import Module, Schedule, array, find_compiler
from cupaged.errors import BackendError, KernelError

THREADS, NUMBERS, ACCESSES = 64, 6, 3
NOTHING, READ, WRITE = 0, 100, 200  # plus the number's index
ALONE, SHUFFLE, HALF_WARP, WARP, BLOCK = range(5)

INTERPRETER = f"""
extern "C" __global__ void interpret(const int* accesses, const int* syncs, int rounds, float* out) {{
  static char key;
  float* const numbers = (float*)simt_shared(&key, 4 * {NUMBERS}, 16, "numbers");
  if (threadIdx.x < {NUMBERS}) numbers[threadIdx.x] = 0.0f;
  __syncthreads();
  float sum = 0.0f;
  for (int round = 0; round < rounds; round++) {{
    for (int i = 0; i < {ACCESSES}; i++) {{
      const int access = accesses[(round * {ACCESSES} + i) * {THREADS} + threadIdx.x];
      if (access >= {WRITE}) numbers[access - {WRITE}] = (float)round;
      else if (access >= {READ}) sum += numbers[access - {READ}];
    }}
    const int sync = syncs[round * 4 + threadIdx.x / 16];
    if (sync == {SHUFFLE}) sum += __shfl_xor_sync(0xffffffffu, 0.0f, 1);
    if (sync == {HALF_WARP}) __syncwarp(threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u);
    if (sync == {WARP}) __syncwarp();
    if (sync == {BLOCK}) __syncthreads();
  }}
  out[threadIdx.x] = sum;
}}
"""


@dataclass
class Program:
    accesses: npt.NDArray[np.int32]  # [rounds, ACCESSES, THREADS]
    syncs: npt.NDArray[np.int32]  # [rounds, 4], of each half warp


def random_program(rng: np.random.Generator, halves: bool) -> Program:
    rounds = int(rng.integers(2, 6))
    of_one_warp = rng.random() < 0.6  # where __syncwarp is all there is
    active = rng.choice(32 if of_one_warp else THREADS, rng.integers(2, 6), replace=False)
    busy = np.zeros((rounds, ACCESSES, THREADS), bool)
    busy[..., active] = rng.random((rounds, ACCESSES, len(active))) < 0.3
    kinds = np.where(rng.random(busy.shape) < 0.25, WRITE, READ) + rng.integers(0, NUMBERS, busy.shape)
    of_warps = rng.choice([ALONE, SHUFFLE, WARP, WARP], (rounds, 2))
    syncs = np.repeat(of_warps, 2, axis=1)
    if halves:
        some = rng.random(syncs.shape) < 0.5
        syncs = np.where((syncs == ALONE) & some, HALF_WARP, syncs)
    syncs[rng.random(rounds) < 0.4] = BLOCK
    return Program(np.where(busy, kinds, NOTHING).astype(np.int32), syncs.astype(np.int32))


def has_race(program: Program) -> bool:
    seen = np.zeros((THREADS, THREADS), np.int64)  # seen[t, u]: u's latest round that came before t's next access
    past: list[tuple[int, bool, int, int, npt.NDArray[np.int64]]] = []
    for number, (accesses, syncs) in enumerate(zip(program.accesses, program.syncs, strict=True), start=1):
        for thread in range(THREADS):
            for access in accesses[:, thread]:
                if access == NOTHING:
                    continue
                writes, place = bool(access >= WRITE), int(access) % 100
                for other_place, other_writes, other, other_round, _ in past:
                    unordered = other != thread and seen[thread, other] < other_round
                    if unordered and other_place == place and (writes or other_writes):
                        return True
                past.append((place, writes, thread, number, seen[thread].copy()))
        for group in groups_of(syncs):
            known = seen[group].max(0)
            known[group] = number
            seen[group] = known
    return False


def groups_of(syncs: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int64]]:
    """The threads that synchronise with each other after a round."""
    if syncs[0] == BLOCK:
        return [np.arange(THREADS)]
    groups = [np.arange(16 * h, 16 * h + 16) for h in range(4) if syncs[h] == HALF_WARP]
    return groups + [np.arange(32 * w, 32 * w + 32) for w in range(2) if syncs[2 * w] == WARP]


@pytest.fixture(scope="module")
def interpreter() -> Any:
    try:
        find_compiler()
    except BackendError as error:
        pytest.skip(str(error))
    return Module(INTERPRETER, mode="check").get_function("interpret")


def error_of(interpreter: Any, program: Program, schedule: Schedule, seed: int) -> KernelError | None:
    out = array(np.zeros(THREADS, np.float32))
    arguments = (array(program.accesses), array(program.syncs), np.int32(len(program.syncs)), out)
    try:
        interpreter((1,), (THREADS,), arguments, schedule=schedule, seed=seed)
    except KernelError as error:
        return error
    return None


@pytest.mark.parametrize("halves", [False, True])
def test_a_race_is_reported_if_and_only_if_there_is_one(interpreter: Any, halves: bool) -> None:
    rng = np.random.default_rng(11 + halves)
    races = 0
    for seed in range(250):
        program = random_program(rng, halves)
        expected = has_race(program)
        races += expected
        for schedule in get_args(Schedule):
            error = error_of(interpreter, program, schedule, seed)
            assert (error is not None) == expected, (seed, schedule, program)
            assert error is None or (error.kind, error.array) == ("data race", "numbers"), str(error)
    assert 60 < races < 190
