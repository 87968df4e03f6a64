"""How many blocks of a kernel share a multiprocessor: arithmetic over what they take and what there is.

Four things run out: warps, places for blocks, registers (given to whole warps, in steps, from the quarter of the file that
the warp's scheduler owns) and shared memory (of which the driver keeps some for each block). The limits are those of the
CUDA C Programming Guide, "Technical Specifications per Compute Capability"; the steps those of CUDA's cuda_occupancy.h.
"""

from __future__ import annotations

from dataclasses import dataclass

from cupaged.backends.launch import ceil_div

WARP = 32
SCHEDULERS = 4
REGISTERS = 64 * 1024
REGISTERS_OF_A_THREAD = 255
REGISTER_STEP, SHARED_STEP = 256, 128
RESERVED_SHARED_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What one has, beyond what all of these have: warps and blocks at once, and bytes of shared memory."""

    warps: int
    blocks: int
    shared_bytes: int


MULTIPROCESSORS = {
    "sm_80": Multiprocessor(64, 32, 164 * 1024),
    "sm_86": Multiprocessor(48, 16, 100 * 1024),
    "sm_89": Multiprocessor(48, 24, 100 * 1024),
    "sm_90": Multiprocessor(64, 32, 228 * 1024),
}


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks and warps that run at once on a multiprocessor of so many `most_warps`; `limit` is what runs out first, of
    several the first of warps, blocks, registers and shared memory. 0 blocks: it cannot be launched.
    """

    blocks: int
    warps: int
    most_warps: int
    limit: str

    @property
    def share(self) -> float:
        """Of the warps that the multiprocessor can hold."""
        return self.warps / self.most_warps


def occupancy(architecture: str, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Of a kernel with `threads` a block, `registers` a thread and `shared_bytes` a block, static and dynamic together.

    Shared memory is taken for as large as the architecture allows, at the cost of the L1 cache.
    """
    has = MULTIPROCESSORS[architecture]
    warps = ceil_div(threads, WARP)
    shared = _up(shared_bytes + RESERVED_SHARED_BYTES, SHARED_STEP)
    limits = {
        "warps": has.warps // warps,
        "blocks": has.blocks,
        "registers": _blocks_by_registers(warps, registers),
        "shared memory": has.shared_bytes // shared,
    }
    blocks = min(limits.values())
    return Occupancy(blocks, blocks * warps, has.warps, next(name for name, most in limits.items() if most == blocks))


def _blocks_by_registers(warps: int, registers: int) -> int:
    of_a_warp = _up(max(registers, 1) * WARP, REGISTER_STEP)
    if registers > REGISTERS_OF_A_THREAD or of_a_warp * _up(warps, SCHEDULERS) > REGISTERS:
        return 0  # a launch is checked as if every scheduler got as many warps
    return REGISTERS // SCHEDULERS // of_a_warp * SCHEDULERS // warps


def _up(number: int, step: int) -> int:
    return ceil_div(number, step) * step
