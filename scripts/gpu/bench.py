"""Bench: what the measurements share: the device, its clock, one large stretch of random numbers, and the ceilings."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import ml_dtypes
import numpy as np

from cupaged.backends.device import Array, Device
from cupaged.backends.launch import KernelSpec, read, scalar, write
from gpu.cases import Skip
from gpu.clock import Clock
from gpu.machine import free_memory, l2_bytes

BF16 = np.dtype(ml_dtypes.bfloat16)
HERE = Path(__file__).parent
UNROLLS, BLOCKS = (4, 8), (4, 8, 16, 64)
"""The probe's grids: loads of a thread at a time, blocks for each multiprocessor."""

FILL = KernelSpec(
    "fill", "numbers of -1 .. 1", write("x", "bfloat16", "numbers"), scalar("count", "int64"), scalar("blocks"), scalar("seed"),
    grid="blocks", block=256, source=str(HERE / "fill.cu"),
)  # fmt: skip
READ_ONLY = KernelSpec(
    "read_only", "reads everything", read("x", "int32", "numbers"), write("out", "int32", "1"), scalar("count", "int64"), scalar("blocks"),
    grid="blocks", block=256, macros={"unroll": UNROLLS}, source=str(HERE / "probe.cu"),
)  # fmt: skip

COLD = 4
"""A measurement from cold memory passes over so many times the L2 cache before it comes back to the same place."""

MOST_COPIES = 512
LARGEST_STRETCH, SHARE_OF_FREE = 12 << 30, 0.6
TINY_STRETCH = 1 << 19
PROBE_BYTES, TINY_PROBE_BYTES = 4 << 30, 1 << 16


@dataclass(frozen=True)
class Heads:
    """The shape of a model's attention."""

    query: int
    kv: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.query // self.kv

    @property
    def width(self) -> int:
        """Of a row of queries, keys and values."""
        return (self.query + 2 * self.kv) * self.head_dim

    def __str__(self) -> str:
        return f"{self.query}/{self.kv} of {self.head_dim}"


@dataclass
class Bench:
    """tiny: sizes that the emulator gets through; `model`: a real one's name or path."""

    device: Device
    tiny: bool
    model: str
    _stretch: Array = None
    known: dict[object, float] = field(default_factory=dict)
    """Seconds that one part has measured and another wants."""

    @cached_property
    def clock(self) -> Clock:
        return Clock(self.device)

    @property
    def heads(self) -> tuple[Heads, ...]:
        """One KV head's share of a large model, Llama 8B, SmolLM2-135M."""
        return (Heads(3, 1, 64),) if self.tiny else (Heads(8, 1, 128), Heads(32, 8, 128), Heads(9, 3, 64))

    def numbers(self, *shapes: tuple[int, ...], copies: int = 1) -> list[list[Array]]:
        """Arrays of random bfloat16 numbers: for each copy one of every shape, no two at the same place. Raises Skip where
        memory does not hold them."""
        sizes = [-(-int(np.prod(shape, dtype=np.int64)) // 64) * 64 for shape in shapes]  # each at a multiple of 128 bytes
        stretch = self._filled()
        if copies * sum(sizes) > len(stretch):
            raise Skip(f"wants {2 * copies * sum(sizes) / 2**30:.1f} GiB, there are {2 * len(stretch) / 2**30:.1f}")
        arrays, at = [], 0
        for _ in range(copies):
            of_copy = []
            for shape, size in zip(shapes, sizes, strict=True):
                of_copy.append(stretch[at : at + int(np.prod(shape, dtype=np.int64))].reshape(shape))
                at += size
            arrays.append(of_copy)
        return arrays

    def _filled(self) -> Array:
        if self._stretch is not None:
            return self._stretch
        count = TINY_STRETCH
        if not self.tiny:
            free = free_memory(self.device)
            count = min(LARGEST_STRETCH, int(SHARE_OF_FREE * (free if free is not None else 1 << 30))) // 256 * 128
        self._stretch = self.device.empty((count,), BF16)
        self.device.launch(FILL.bind(x=self._stretch, count=count, blocks=8 * self.device.multiprocessors, seed=1))
        return self._stretch

    def release(self) -> None:
        """Give the random numbers' memory back: a model wants it."""
        self._stretch = None
        free_memory(self.device)

    def copies(self, bytes_of_one: int) -> int:
        """How many places to take turns between, so that what is read is never in the L2 cache."""
        if self.tiny:
            return 2
        return max(1, min(MOST_COPIES, -(-COLD * l2_bytes(self.device) // bytes_of_one)))

    @cached_property
    def bandwidth(self) -> float:
        """Bytes a second of reading alone: the best of several shapes of the probe's grid."""
        return max(self.probe(unroll, blocks) for unroll in UNROLLS for blocks in BLOCKS)

    def probe(self, unroll: int, blocks: int) -> float:
        """Bytes a second, with so many blocks for each multiprocessor."""
        x = self._filled()[: (TINY_PROBE_BYTES if self.tiny else PROBE_BYTES) // 2].view(np.int32)
        out = self.device.empty((1,), np.int32)
        launch = READ_ONLY.bind(x=x, out=out, count=len(x) // 4, blocks=blocks * self.device.multiprocessors, unroll=unroll)
        return x.nbytes / self.clock.time(lambda: self.device.launch(launch)).median
