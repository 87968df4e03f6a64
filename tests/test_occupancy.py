"""How many blocks share a multiprocessor: published values, values by hand, and CUDA's own arithmetic where its header is."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from cupaged.backends import nvrtc
from cupaged.backends.emu import find_compiler
from cupaged.backends.occupancy import MULTIPROCESSORS, Occupancy, occupancy
from tests.support.kernels import skip_without_compiler, skip_without_nvrtc

KIB = 1024


@pytest.mark.parametrize(("threads", "blocks", "share"), [(128, 12, 0.75), (320, 4, 0.625)])
def test_the_values_of_the_best_practices_guide(threads: int, blocks: int, share: float) -> None:
    """CUDA C++ Best Practices Guide, "Calculating Occupancy": 37 registers, 64 warps a multiprocessor (75 % and 63 %)."""
    found = occupancy("sm_80", threads, 37, 0)
    assert (found.blocks, found.share, found.limit) == (blocks, share, "registers")


@pytest.mark.parametrize(
    ("architecture", "threads", "registers", "shared", "expected"),
    [
        ("sm_80", 256, 32, 0, Occupancy(8, 64, 64, "warps")),
        ("sm_90", 1024, 32, 0, Occupancy(2, 64, 64, "warps")),
        ("sm_86", 1024, 32, 0, Occupancy(1, 32, 48, "warps")),  # 48 warps hold one block of 32
        ("sm_86", 32, 32, 0, Occupancy(16, 16, 48, "blocks")),
        ("sm_89", 32, 32, 0, Occupancy(24, 24, 48, "blocks")),
        ("sm_80", 33, 16, 0, Occupancy(32, 64, 64, "warps")),  # two warps, one nearly empty
        ("sm_80", 256, 33, 0, Occupancy(6, 48, 64, "registers")),  # 1056 -> 1280 a warp, 12 warps a scheduler
        ("sm_80", 128, 255, 0, Occupancy(2, 8, 64, "registers")),  # 8160 -> 8192 a warp, 2 warps a scheduler
        ("sm_80", 256, 255, 0, Occupancy(1, 8, 64, "registers")),
        ("sm_80", 257, 255, 0, Occupancy(0, 0, 64, "registers")),  # 9 warps do not fit
        ("sm_80", 128, 256, 0, Occupancy(0, 0, 64, "registers")),  # no thread has so many
        ("sm_80", 128, 32, 40 * KIB, Occupancy(4, 16, 64, "shared memory")),  # 41 KiB each of 164
        ("sm_80", 128, 32, 40 * KIB + 1, Occupancy(3, 12, 64, "shared memory")),
        ("sm_90", 128, 32, 96 * KIB, Occupancy(2, 8, 64, "shared memory")),  # the tuned decode's three stages
        ("sm_86", 128, 32, 96 * KIB, Occupancy(1, 4, 48, "shared memory")),
        ("sm_86", 128, 32, 99 * KIB + 1, Occupancy(0, 0, 48, "shared memory")),
    ],
)
def test_values_by_hand(architecture: str, threads: int, registers: int, shared: int, expected: Occupancy) -> None:
    assert occupancy(architecture, threads, registers, shared) == expected


ASK_CUDA = r"""
#include <cstdio>
#include <cuda_occupancy.h>
int main() {
  int major, minor, resident, threads, registers;
  unsigned long has, shared, dynamic;
  while (scanf("%d %d %d %lu %d %d %lu %lu", &major, &minor, &resident, &has, &threads, &registers, &shared, &dynamic) == 8) {
    cudaOccDeviceProp device;
    device.computeMajor = major, device.computeMinor = minor, device.warpSize = 32, device.numSms = 1;
    device.maxThreadsPerBlock = 1024, device.maxThreadsPerMultiprocessor = resident;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536;
    device.sharedMemPerBlock = 49152, device.sharedMemPerMultiprocessor = has;
    device.sharedMemPerBlockOptin = has - 1024, device.reservedSharedMemPerBlock = 1024;
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = 1024, kernel.numRegs = registers, kernel.sharedSizeBytes = shared;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN, kernel.maxDynamicSharedSizeBytes = has - 1024, kernel.numBlockBarriers = 1;
    cudaOccDeviceState state;
    state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
    cudaOccResult result;
    cudaOccError error = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, dynamic);
    printf("%d\n", error ? -1 : result.activeBlocksPerMultiprocessor);
  }
}
"""


def test_cuda_counts_the_same(tmp_path: Path) -> None:
    """The occupancy calculator that comes with CUDA's runtime, as a program, over many kernels."""
    skip_without_compiler()
    skip_without_nvrtc()
    (tmp_path / "ask.cpp").write_text(ASK_CUDA, encoding="utf-8")
    done = find_compiler().run(["-O1", f"-I{nvrtc.include_folder()}", "ask.cpp", "-o", "ask"], tmp_path)
    assert done.returncode == 0, done.stderr
    rng, questions, counted = random.Random(0), [], []
    for _ in range(20_000):
        architecture, has = rng.choice(list(MULTIPROCESSORS.items()))
        threads, registers = rng.choice([32, 64, 128, 256, 512, 1024, rng.randint(1, 1024)]), rng.randint(1, 255)
        static, dynamic = rng.choice([0, 1024, rng.randint(0, 48 * KIB)]), rng.choice([0, 0, 32 * KIB, rng.randint(0, has.shared_bytes - KIB)])
        major, minor = architecture[3:]
        questions.append(f"{major} {minor} {32 * has.warps} {has.shared_bytes} {threads} {registers} {static} {dynamic}")
        counted.append(occupancy(architecture, threads, registers, static + dynamic).blocks)
    answers = subprocess.run([tmp_path / "ask"], input="\n".join(questions), capture_output=True, text=True, check=True).stdout.split()
    assert [int(answer) for answer in answers] == counted
    assert {0, 1, 2, 5, 8, 16, 24, 32} <= set(counted)
