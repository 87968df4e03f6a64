"""Calibration: small kernels over device.cuh, the same text and inputs on the device and on the checking emulator.

What moves bits or adds in a fixed order must agree bit for bit; tensor cores and transcendental functions within what
CUDA promises. NaNs are one number: a GPU has its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # gives NumPy bfloat16 and float8_e4m3fn
import numpy as np

from cupaged.backends.device import Device
from cupaged.backends.emu import POISON
from cupaged.backends.emu_device import EmuDevice
from cupaged.backends.launch import KernelSpec, read, scalar, write
from gpu.cases import Case, Failure, Figures

HERE = Path(__file__).parent
PRIMITIVES, TENSOR_CORES, STORAGE = (str(HERE / name) for name in ("primitives.cu", "tensor_cores.cu", "storage.cu"))
SIXTEEN_BITS = ("float16", "bfloat16")
FP8 = "float8_e4m3fn"
ULPS = {"exp2f": 4, "expf": 4, "sqrtf": 1, "1 / x": 1}
"""CUDA's own bounds are 2, 2, 0 and 0 (CUDA C++ Programming Guide, "Mathematical Functions"); the emulator's are its C library's."""

PRODUCT_ERROR = 1e-5
"""Of a product's sum, as a share of the sum of its terms' sizes: tensor cores add in their own order, and may cut bits off."""

TINY = 2.0**-126
"""The least normal number: kernels are compiled to take what is smaller for 0."""

_ONE_WARP: dict[str, Any] = {"grid": "1", "block": 32}
_MANY: dict[str, Any] = {"grid": "ceil_div(count, 128)", "block": 128}
LANES = KernelSpec("lanes", "shuffles and votes", read("x", "int32", "32"), write("out", "int32", "5, 32"), scalar("step"), **_ONE_WARP, source=PRIMITIVES)
OF_LANES = KernelSpec("reduce_of_lanes", "reductions of a warp", read("x", "float32", "32"), write("out", "float32", "4, 32"), **_ONE_WARP, source=PRIMITIVES)
OF_BLOCK = KernelSpec(
    "reduce_of_block", "reductions of a block", read("x", "float32", "256"), write("sums", "float32", "256"), write("maxima", "float32", "256"),
    write("ranks", "int64", "256"), write("any", "int32", "256"), grid="1", block=256, source=PRIMITIVES,
)  # fmt: skip
COPIES = KernelSpec(
    "copies", "cp.async", read("x", "int32", "rounds, 128"), write("out", "int32", "rounds, 128"), scalar("rounds"), scalar("zeroed"), **_ONE_WARP,
    source=PRIMITIVES,
)  # fmt: skip
FUNCTIONS = KernelSpec("functions", "functions", read("x", "float32", "count"), write("out", "float32", "4, count"), scalar("count"), **_MANY, source=PRIMITIVES)
MATRICES = KernelSpec(
    "matrices", "ldmatrix", read("x", "ACT_T", "32, 8"), write("out", "int32", "8, 32"), types={"ACT_T": SIXTEEN_BITS}, **_ONE_WARP, source=TENSOR_CORES
)
PRODUCT = KernelSpec(
    "product", "mma m16n8k16", read("a", "ACT_T", "32, 8"), read("b", "ACT_T", "32, 4"), read("c", "float32", "32, 4"), write("d", "float32", "32, 4"),
    types={"ACT_T": SIXTEEN_BITS}, **_ONE_WARP, source=TENSOR_CORES,
)  # fmt: skip
TO_STORAGE = KernelSpec(
    "to_storage", "roundings", read("x", "float32", "count"), write("stored", "KV_T", "count"), write("back", "float32", "count"), scalar("count"), **_MANY,
    source=STORAGE,
)  # fmt: skip
FROM_STORAGE = KernelSpec("from_storage", "widenings", read("stored", "KV_T", "count"), write("out", "float32", "count"), scalar("count"), **_MANY, source=STORAGE)

Outputs = Mapping[str, tuple[tuple[int, ...], Any]]
"""Name -> shape and type."""


class Calibration:
    """The device, and the emulator beside it."""

    def __init__(self, device: Device) -> None:
        self._devices = (device, EmuDevice("check"))

    def cases(self) -> Iterator[Case]:
        yield Case("shuffles and votes", self._lanes)
        yield Case("reductions of lanes", self._of_lanes)
        yield Case("reductions of a block", self._of_block)
        yield Case("cp.async", self._copies)
        yield Case("functions", self._functions)
        for name in SIXTEEN_BITS:
            yield Case(f"ldmatrix, {name}", partial(self._matrices, name))
            yield Case(f"mma m16n8k16, {name}", partial(self._product, name))
        for name in (*SIXTEEN_BITS, FP8):
            yield Case(f"float32 to {name} and back", partial(self._to_storage, name))
            yield Case(f"every {name} to float32", partial(self._from_storage, name))

    def _run(self, spec: KernelSpec, inputs: Mapping[str, Any], outputs: Outputs) -> list[tuple[np.ndarray, np.ndarray]]:
        """Pairs of outputs, the device's and the emulator's. `inputs`: arrays, and scalars as they are."""
        results = []
        for device in self._devices:
            arrays = {name: device.empty(shape, dtype) for name, (shape, dtype) in outputs.items()}
            given = {name: device.upload(value) if isinstance(value, np.ndarray) else value for name, value in inputs.items()}
            device.launch(spec.bind(**given, **arrays))
            results.append([np.array(device.download(array)) for array in arrays.values()])
        return list(zip(*results, strict=True))

    def _bitwise(self, spec: KernelSpec, inputs: Mapping[str, Any], outputs: Outputs) -> Figures:
        compared = 0
        for name, (ours, expected) in zip(outputs, self._run(spec, inputs, outputs), strict=True):
            same_bits(ours, expected, name)
            compared += expected.size
        return {"compared": compared, "bitwise": "yes"}

    def _lanes(self) -> Figures:
        x = random(0).integers(-(2**31), 2**31, 32).astype(np.int32)
        return [self._bitwise(LANES, {"x": x, "step": step}, {"out": ((5, 32), np.int32)}) for step in (1, 2, 5, 16)][-1]

    def _of_lanes(self) -> Figures:
        return self._bitwise(OF_LANES, {"x": wide_range(1, 32)}, {"out": ((4, 32), np.float32)})

    def _of_block(self) -> Figures:
        outputs: Outputs = {"sums": ((256,), np.float32), "maxima": ((256,), np.float32), "ranks": ((256,), np.int64), "any": ((256,), np.int32)}
        self._bitwise(OF_BLOCK, {"x": np.abs(wide_range(2, 256))}, outputs)
        return self._bitwise(OF_BLOCK, {"x": wide_range(3, 256)}, outputs)

    def _copies(self) -> Figures:
        x = random(4).integers(1, 2**31, (9, 128)).astype(np.int32)
        return [self._bitwise(COPIES, {"x": x[:n], "zeroed": n // 2}, {"out": ((n, 128), np.int32)}) for n in (1, 2, 3, 9)][-1]

    def _functions(self) -> Figures:
        x = np.concatenate([np.linspace(-126, 127, 4001), random(5).standard_normal(4000), [-np.inf, np.inf, -200, -149, 0.0, 1e-30, 700]]).astype(np.float32)
        ((ours, expected),) = self._run(FUNCTIONS, {"x": x}, {"out": ((4, len(x)), np.float32)})
        worst = {name: ulps_apart(ours[i], expected[i]) for i, name in enumerate(ULPS)}
        wrong = [f"{name} is {worst[name]} ulps off, {ULPS[name]} are allowed" for name in ULPS if worst[name] > ULPS[name]]
        if wrong:
            raise Failure("; ".join(wrong))
        return {"compared": ours.size, "ulps": ", ".join(f"{name} {ulps}" for name, ulps in worst.items())}

    def _matrices(self, name: str) -> Figures:
        return self._bitwise(MATRICES, {"x": random(6).standard_normal((32, 8)).astype(name)}, {"out": ((8, 32), np.int32)})

    def _product(self, name: str) -> Figures:
        worst = 0.0
        for seed in range(8):
            draw = random(seed)
            a, b = draw.standard_normal((32, 8)).astype(name), draw.standard_normal((32, 4)).astype(name)
            c = draw.standard_normal((32, 4)).astype(np.float32)
            inputs, outputs = {"a": a, "b": b, "c": c}, {"d": ((32, 4), np.float32)}
            sizes = {key: np.abs(value) for key, value in inputs.items()}
            ((ours, expected),), ((_, terms),) = self._run(PRODUCT, inputs, outputs), self._run(PRODUCT, sizes, outputs)
            worst = max(worst, float((np.abs(ours - expected) / terms).max()))
        if not worst <= PRODUCT_ERROR:
            raise Failure(f"a product is off by {worst:.2g} of its terms, {PRODUCT_ERROR} is allowed")
        return {"compared": 8 * 128, "largest error": worst}

    def _to_storage(self, name: str) -> Figures:
        draw, halfway = random(7), np.arange(0, 2**16, 7, dtype=np.uint16).view(np.float16).astype(np.float32)
        anything = draw.integers(0, 2**32, 20000, dtype=np.uint32).view(np.float32)
        edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 448, 464, 465, -480, 65504, 65519, 65520, 3.3895314e38, 3.4e38, 2**-24, 2**-25, 2**-10, 2**-9]
        usual = 600 * draw.standard_normal(5000), 1e-3 * draw.standard_normal(5000)
        x = np.concatenate([part.astype(np.float32) for part in (anything, *usual, halfway, np.array(edges))])
        x = x[~(np.abs(x) < TINY) | (x == 0)]
        return self._bitwise(TO_STORAGE, {"x": x}, {"stored": (x.shape, name), "back": (x.shape, np.float32)})

    def _from_storage(self, name: str) -> Figures:
        patterns = np.arange(256, dtype=np.uint8) if name == FP8 else np.delete(np.arange(2**16, dtype=np.uint16), POISON)  # a NaN like others
        return self._bitwise(FROM_STORAGE, {"stored": patterns.view(name)}, {"out": (patterns.shape, np.float32)})


def random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def wide_range(seed: int, count: int) -> np.ndarray:
    """Normal numbers of very different sizes, whose sum depends on the order of the additions."""
    return (random(seed).standard_normal(count) * 10.0 ** random(seed + 100).integers(-4, 5, count)).astype(np.float32)


def same_bits(ours: np.ndarray, expected: np.ndarray, name: str) -> None:
    """Raises Failure; NaNs are one number."""
    if ours.dtype == np.uint8 and expected.dtype != np.uint8:  # a GPU's 8-bit floats are bytes
        ours = ours.view(expected.dtype)
    differ = bits(ours) != bits(expected)
    if ours.dtype.kind in "fV":
        differ &= ~(np.isnan(ours.astype(np.float32)) & np.isnan(expected.astype(np.float32)))
    if differ.any():
        at = tuple(int(i) for i in np.argwhere(differ)[0])
        count = f"{np.count_nonzero(differ)} of {differ.size} numbers of {name} differ"
        raise Failure(f"{count}, the first at {list(at)}: {ours[at]} on the device, {expected[at]} on the emulator")


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def ulps_apart(ours: np.ndarray, expected: np.ndarray) -> int:
    """The largest distance in representable numbers; what is below the normal ones counts as 0 on both sides."""
    flushed = [np.where(np.abs(x) < TINY, np.float32(0), x).astype(np.float32) for x in (ours, expected)]
    if not np.array_equal(np.isnan(flushed[0]), np.isnan(flushed[1])):
        return 2**31
    ordered = [np.where(i < 0, -(2**31) - i, i) for i in (x.view(np.int32).astype(np.int64) for x in flushed)]
    distance = np.where(np.isnan(flushed[0]), 0, np.abs(ordered[0] - ordered[1]))
    edge = (flushed[0] == 0) & (np.abs(expected) < 1.01 * TINY) | (flushed[1] == 0) & (np.abs(ours) < 1.01 * TINY)
    return int(np.where(edge, 0, distance).max())
