"""Packed weights: every format against the gguf library, and every way to use them against each other, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from cupaged.backends import cpu_formats
from cupaged.backends.cpu_formats import BLOCK, FORMATS, Format
from cupaged.checkpoint.gguf_blocks import CODECS
from cupaged.checkpoint.mapped_file import MappedFile
from cupaged.checkpoint.stored_tensor import PairedRows, StoredTensor, UnreadableTensor
from cupaged.errors import CheckpointError, UnsupportedModelError

Array = npt.NDArray[Any]
QUANTISED = [kind for kind in FORMATS if not kind.is_float]
FLOATS = [kind for kind in FORMATS if kind.is_float]
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
names = lambda kind: kind.name  # noqa: E731


def stored_bytes(storage: str, rows: int, width: int, seed: int = 0) -> Array:
    """Random rows of a stored type, uint8 [rows, row_bytes]; scales of both signs, a third of them subnormal."""
    rng = np.random.default_rng(seed)
    if storage in ("F32", "F16", "BF16"):
        numbers = rng.standard_normal((rows, width)).astype(np.float32)
        if storage == "BF16":
            return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        tiny = rng.random((rows, width)) < 0.1
        return np.where(tiny, numbers * 1e-6, numbers).astype(np.float32 if storage == "F32" else np.float16).view(np.uint8)
    codec = CODECS[storage]
    count = rows * width // codec.block_values
    raw = rng.integers(0, 256, (count, codec.block_bytes), dtype=np.uint8)
    for at in HALVES[storage]:
        scale = rng.standard_normal(count) * np.where(rng.random(count) < 0.3, 1e-6, 0.02)
        raw[:, at : at + 2] = scale.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return raw.reshape(rows, -1)


@dataclass
class Stored:
    """A TensorSource over rows in memory that notes the most rows read at once."""

    storage: str
    raw: Array
    width: int
    name: str = "weights"
    largest: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.raw), self.width

    def read(self, start: int = 0, stop: int | None = None) -> Array:
        raw, codec = np.ascontiguousarray(self.raw[start:stop]), CODECS[self.storage]
        self.largest = max(self.largest, len(raw))
        out = np.empty((raw.size // codec.block_bytes, codec.block_values), np.float32)
        codec.decode(raw.reshape(len(out), -1), out)
        return out.reshape(len(raw), self.width)

    def read_blocks(self, start: int = 0, stop: int | None = None) -> Array:
        self.largest = max(self.largest, len(self.raw[start:stop]))
        return self.raw[start:stop]


def source(kind: Format, rows: int, width: int, seed: int = 0) -> Stored:
    return Stored(kind.stored, stored_bytes(kind.stored, rows, width, seed), width)


def of_numbers(numbers: Array) -> Stored:
    return Stored("F32", numbers.astype(np.float32).view(np.uint8), numbers.shape[1])


def packed(kind: Format, *parts: Stored, more_groups: int = 0) -> Array:
    """The packed parts at the beginning of a cache line, over memory that held something else."""
    groups, blocks, size = kind.packed_shape(sum(part.shape[0] for part in parts), parts[0].width)
    shape = (groups + more_groups, blocks, size)
    room = np.full(int(np.prod(shape)) + 64, 0xA5, np.uint8)
    start = -room.ctypes.data % 64
    out = room[start : start + int(np.prod(shape))].reshape(shape)
    cpu_formats.pack(parts, kind, out)
    return out


def assert_same_bits(left: Array, right: Array) -> None:
    np.testing.assert_array_equal(left.view(np.uint32), right.view(np.uint32))


# ---- packing


@pytest.mark.parametrize("kind", QUANTISED, ids=names)
@pytest.mark.parametrize("rows", [1, 17, 300])
def test_a_packed_matrix_is_what_the_library_dequantises(kind: Format, rows: int) -> None:
    part = source(kind, rows, 512)
    expected = dequantize(part.raw, GGMLQuantizationType[kind.stored]).reshape(rows, 512)
    weights = packed(kind, part)
    assert weights.shape == (-(-rows // 16), 512 // BLOCK, kind.block_bytes)
    np.testing.assert_array_equal(cpu_formats.unpack(weights, kind, rows, 512), expected)
    np.testing.assert_array_equal(cpu_formats.column(weights, kind, rows - 1), expected[-1])


@pytest.mark.parametrize("kind", FLOATS, ids=names)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (17, 7), (300, 33)])
def test_a_float_matrix_keeps_its_bits(kind: Format, rows: int, width: int) -> None:
    part = source(kind, rows, width)
    assert_same_bits(cpu_formats.unpack(packed(kind, part), kind, rows, width), part.read())


@pytest.mark.parametrize("kind", FORMATS, ids=names)
def test_parts_lie_one_under_the_other_and_what_is_missing_is_zero(kind: Format) -> None:
    parts = [source(kind, rows, 256, rows) for rows in (5, 16, 30)]
    weights = packed(kind, *parts, more_groups=2)
    whole = cpu_formats.unpack(weights, kind, 96, 256)
    np.testing.assert_array_equal(whole[:51], np.concatenate([part.read() for part in parts]))
    assert not whole[51:].any()
    assert not weights[4:].any()


def test_a_large_matrix_is_read_in_pieces() -> None:
    kind = FORMATS[5]
    parts = [source(kind, 700, 1024), source(kind, 333, 1024, 1)]
    whole = cpu_formats.unpack(packed(kind, *parts), kind, 1033, 1024)
    np.testing.assert_array_equal(whole, np.concatenate([part.read() for part in parts]))
    first = source(kind, 1033, 1024)
    packed(kind, first)
    assert first.largest <= 256


def test_narrower_floats_round_to_nearest_even() -> None:
    numbers = np.array([[1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, -3.3e-7, 65504.0]], np.float32)
    half = cpu_formats.unpack(packed(cpu_formats.FLOAT16, of_numbers(numbers)), cpu_formats.FLOAT16, 1, 6)
    np.testing.assert_array_equal(half, numbers.astype(np.float16).astype(np.float32))
    brain = cpu_formats.unpack(packed(cpu_formats.BFLOAT16, of_numbers(numbers)), cpu_formats.BFLOAT16, 1, 6)
    np.testing.assert_array_equal(brain[0, :4], [1, 1 + 2.0**-6, 1, 1])


def test_int8_is_within_half_a_step_of_the_number() -> None:
    numbers = np.random.default_rng(0).standard_normal((40, 96)).astype(np.float32)
    numbers[3] = 0
    numbers[5] *= 1e-6
    kind = cpu_formats.choose("int8", [of_numbers(numbers)])
    got = cpu_formats.unpack(packed(kind, of_numbers(numbers)), kind, 40, 96)
    largest = np.abs(numbers).reshape(40, 3, 32).max(axis=2, keepdims=True)
    assert (np.abs(got - numbers).reshape(40, 3, 32) <= largest / 127 * 0.51 + 2.0**-18).all()
    assert not got[3].any()


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_a_number_that_a_format_cannot_hold_is_refused(dtype: str) -> None:
    part = of_numbers(np.full((16, 32), 1e9, np.float32))
    with pytest.raises(CheckpointError, match=rf"weights holds numbers too large for {dtype}: use --dtype bfloat16 or float32"):
        packed(cpu_formats.choose(dtype, [part]), part)


@pytest.mark.parametrize(
    ("dtype", "storages", "width", "expected"),
    [
        ("auto", ["F32"], 64, "float32"),
        ("auto", ["BF16", "BF16"], 33, "bfloat16"),
        ("auto", ["F16"], 64, "float16"),
        ("auto", ["Q4_1"] * 3, 64, "q4_1"),
        ("auto", ["Q4_K", "Q6_K"], 256, "float32"),
        ("float32", ["Q4_1"], 64, "float32"),
        ("bfloat16", ["Q8_0"], 64, "bfloat16"),
        ("float16", ["F32"], 64, "float16"),
        ("int8", ["BF16"], 64, "q8_0"),
        ("int8", ["BF16"], 48, "bfloat16"),
        ("int8", ["Q4_K", "Q6_K"], 256, "q8_0"),
        ("int8", ["Q5_0"], 64, "q5_0"),
    ],
)
def test_the_choice_of_a_format(dtype: str, storages: list[str], width: int, expected: str) -> None:
    parts = [Stored(storage, np.zeros((2, 0), np.uint8), width) for storage in storages]
    assert cpu_formats.choose(dtype, parts).name == expected


def test_a_format_stands_at_its_index() -> None:
    assert [kind.index for kind in FORMATS] == list(range(len(FORMATS)))


# ---- stored rows


@pytest.mark.parametrize("storage", ["Q4_1", "Q6_K", "BF16"])
def test_stored_rows_are_the_files_bytes(storage: str, tmp_path: Path) -> None:
    raw = stored_bytes(storage, 24, 256)
    path = tmp_path / "tensor"
    path.write_bytes(b"head" + raw.tobytes())
    tensor = StoredTensor("t", (24, 256), MappedFile(path), 4, CODECS[storage])
    np.testing.assert_array_equal(tensor.read_blocks(3, 20), raw[3:20])
    np.testing.assert_array_equal(tensor.read_blocks(), raw)
    assert tensor.read_blocks(5, 5).shape == (0, raw.shape[1])
    reordered = PairedRows(tensor, 8)
    again = Stored(storage, reordered.read_blocks(5, 22), 256)
    np.testing.assert_array_equal(again.read(), reordered.read(5, 22))
    path.write_bytes(b"head" + raw.tobytes()[:-1])
    with pytest.raises(CheckpointError, match="cut short"):
        tensor.read_blocks()
    with pytest.raises(UnsupportedModelError, match="stored as IQ2_S"):
        UnreadableTensor("t", (24, 256), "IQ2_S").read_blocks()


# ---- the kernels' three paths


def check_paths(kind: Format, widths: tuple[int, ...]) -> str:
    """NumPy, unpack_panel with tile_product, dot_rows and dot_rows_keeping agree to the bit; returns a digest of all their results."""
    import hashlib

    import numba

    from cupaged.backends.cpu_kernels import unpack
    from cupaged.backends.cpu_kernels.tile import tile_product

    index, most = kind.index, unpack.MAX_ROWS
    jit = numba.njit(error_model="numpy", fastmath={"reassoc", "contract", "arcp", "nsz"})

    @jit
    def panel_of(w: int, blocks: int, panel: int) -> None:
        unpack.unpack_panel(index, w, blocks, panel)

    @jit
    def dot(rows: int, x: int, x_stride: int, w: int, group_stride: int, blocks: int, y: int, y_stride: int) -> None:
        unpack.dot_rows(index, 2, most, rows, x, x_stride, w, group_stride, blocks, y, y_stride)

    @jit
    def wide_dot(rows: int, x: int, x_stride: int, w: int, group_stride: int, blocks: int, y: int, y_stride: int) -> None:
        unpack.dot_rows(index, 4, 2, rows, x, x_stride, w, group_stride, blocks, y, y_stride)

    @jit
    def keep(more: int, x: int, x_stride: int, w: int, group_stride: int, blocks: int, y: int, y_stride: int, panel: int, panel_bytes: int) -> None:
        unpack.dot_rows_keeping(index, more, x, x_stride, w, group_stride, blocks, y, y_stride, panel, panel_bytes)

    @jit
    def tile(rows: int, x: int, x_stride: int, first: int, second: int, count: int, y: int, y_stride: int, more: int) -> None:
        tile_product(more, rows, x, x_stride, first, second, 64, count, y, y_stride)

    digest = hashlib.sha256()
    for width in widths:
        part = source(kind, 61, width)
        weights = packed(kind, part)
        panels = np.full((4, width + 1, 16), np.nan, np.float32)  # a row more, which must stay as it is
        for group in range(4):
            panel_of(weights[group].ctypes.data, weights.shape[1], panels[group].ctypes.data)
        assert np.isnan(panels[:, width]).all()
        expected = cpu_formats.unpack(weights, kind, 64, width)
        assert_same_bits(panels[:, :width].transpose(0, 2, 1).reshape(64, width) + 0.0, expected + 0.0)
        x = np.random.default_rng(width).standard_normal((unpack.MAX_ROWS, width + 3)).astype(np.float32)
        for rows in range(1, unpack.MAX_ROWS + 1):
            reference = np.empty((rows, 64), np.float32)
            for group in (0, 2):
                for row in range(rows):
                    where = reference[row:, 16 * group :].ctypes.data
                    tile(1, x[row:].ctypes.data, x.strides[0], panels[group].ctypes.data, panels[group + 1].ctypes.data, width, where, 256, 0)
            np.testing.assert_allclose(reference, x[:rows, :width] @ expected.T, rtol=0, atol=1e-4 * max(1, float(np.abs(expected).max()) * width))
            check_dot(dot, weights, x, reference[:, :32])
            if rows <= 2:
                check_dot(wide_dot, weights, x, reference)
        check_keeping(keep, tile, weights, panels, x)
        digest.update(reference[:4].copy().data)
        digest.update(panels[:, :width].copy().data)
    return digest.hexdigest()


def check_dot(dot: Any, weights: np.ndarray, x: np.ndarray, reference: np.ndarray) -> None:
    """dot_rows: these sums to the bit, and nothing beside them."""
    rows, columns = reference.shape
    y = np.full((rows + 1, columns + 2), np.nan, np.float32)
    dot(rows, x.ctypes.data, x.strides[0], weights.ctypes.data, weights.strides[0], weights.shape[1], y.ctypes.data, y.strides[0])
    assert_same_bits(y[:rows, :columns], reference)
    assert np.isnan(y[rows:]).all()
    assert np.isnan(y[:, columns:]).all()


def check_keeping(keep: Any, tile: Any, weights: np.ndarray, panels: np.ndarray, x: np.ndarray) -> None:
    """dot_rows_keeping: the panels that it leaves, and its sums, added to others or not."""
    from cupaged.backends.cpu_kernels import unpack

    width = panels.shape[1] - 1
    for more in (0, 1):
        y = np.full((unpack.MAX_ROWS + 1, 34), 0.25, np.float32)
        reference, kept = y.copy(), np.full((2, width + 1, 16), np.nan, np.float32)
        into = kept.ctypes.data, kept.strides[0]
        keep(more, x.ctypes.data, x.strides[0], weights.ctypes.data, weights.strides[0], weights.shape[1], y.ctypes.data, y.strides[0], *into)
        if not more:
            reference[:-1, :32] = 0
        for row in range(unpack.MAX_ROWS):
            tile(1, x[row:].ctypes.data, x.strides[0], panels[0].ctypes.data, panels[1].ctypes.data, width, reference[row:].ctypes.data, 0, more)
        assert_same_bits(y, reference)
        assert_same_bits(kept[:, :width], panels[:2, :width])
        assert np.isnan(kept[:, width]).all()


WIDTHS = {True: (1, 7, 33), False: (256, 768)}
VARIANTS = [(16, 32, True), (8, 16, True), (4, 32, False)]
"""Registers' lanes, their number, and whether float16 is widened by an instruction."""

_CHILD = """
import sys
from cupaged.backends.cpu_kernels import ir
ir.LANES, ir.REGISTERS = int(sys.argv[1]), int(sys.argv[2])
from cupaged.backends.cpu_kernels import unpack
if sys.argv[3] == "False":
    unpack.CONVERTS_HALVES = False
import test_cpu_formats as tests
for kind in tests.FORMATS:
    if kind.name in sys.argv[4:]:
        print(kind.name, tests.check_paths(kind, tests.WIDTHS[kind.is_float]))
"""


@pytest.fixture(scope="session")
def own_digests() -> dict[str, str]:
    return {}


@pytest.mark.parametrize("kind", FORMATS, ids=names)
def test_every_path_gives_the_same_bits(kind: Format, own_digests: dict[str, str]) -> None:
    own_digests[kind.name] = check_paths(kind, WIDTHS[kind.is_float])


@pytest.mark.parametrize(("lanes", "registers", "halves"), VARIANTS, ids=str)
def test_registers_of_any_width_give_the_same_bits(lanes: int, registers: int, halves: bool, tmp_path: Path, own_digests: dict[str, str]) -> None:
    chosen = ["float16", "q8_0", "q5_k", "q6_k"]
    for kind in FORMATS:
        if kind.name in chosen and kind.name not in own_digests:
            own_digests[kind.name] = check_paths(kind, WIDTHS[kind.is_float])
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "CUPAGED_CACHE": str(tmp_path)}
    arguments = [str(lanes), str(registers), str(halves), *chosen]
    child = subprocess.run([sys.executable, "-c", _CHILD, *arguments], env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert dict(line.split() for line in child.stdout.splitlines()) == {name: own_digests[name] for name in chosen}
