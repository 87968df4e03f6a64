"""Products with quantised weights in whole numbers: what they are, whatever else is multiplied with them and by however many threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.backends import cpu_code, cpu_formats, open_backend
from cupaged.backends.cpu_formats import FORMATS, Format
from cupaged.backends.cpu_program import aligned
from tests.test_cpu_formats import packed, source

numba = pytest.importorskip("numba")
from cupaged.backends.cpu_kernels import compiler, digit_tile, digits  # noqa: E402
from cupaged.backends.cpu_kernels.float_gemm import float_gemm  # noqa: E402
from cupaged.backends.cpu_kernels.image import link  # noqa: E402

QUANTISED = [kind for kind in FORMATS if not kind.is_float]

pytestmark = pytest.mark.skipif(not digits.MULTIPLIES_BYTES, reason="this processor does not multiply bytes")

Array = np.ndarray
Product = Callable[[Array, Array], Array]


def product_of(kind: Format) -> tuple[Callable[[Array], Array], Product]:
    """(x [rows, K] -> its records [K / 32, rows, 128], (x, packed groups [2]) -> their product [rows, 32])."""
    index, block_bytes = kind.index, kind.block_bytes

    @numba.njit(error_model="numpy")
    def make(x: int, blocks: int, records: int, stride: int) -> None:
        digits.to_digits(index, x, blocks, records, stride)

    @numba.njit(error_model="numpy")
    def multiply(rows: int, records: int, stride: int, w: int, group_stride: int, blocks: int, y: int, work: int) -> None:
        for first in range(0, blocks, 16):
            count = min(16, blocks - first)
            digit_tile.digit_product(index, first, rows, records + first * stride, stride, w + first * block_bytes, group_stride, count, y, work)

    def records_of(x: Array) -> Array:
        rows, width = x.shape
        records = aligned((width // 32, rows, digits.RECORD), np.uint8)
        for r in range(rows):
            make(x[r].ctypes.data, width // 32, records[0, r].ctypes.data, rows * digits.RECORD)
        return records

    def product(x: Array, weights: Array) -> Array:
        records, y = records_of(x), np.full((len(x) + 1, 32), np.nan, np.float32)
        work = aligned((digit_tile.PIECES_AT // 8 + len(x) * digit_tile.PIECE_WORDS,), np.int64)
        pieces = work[digit_tile.PIECES_AT // 8 :].reshape(len(x), digit_tile.PIECE_WORDS)
        pieces[:] = x.ctypes.data, x.ctypes.data, 0
        where = weights.ctypes.data, weights.strides[0], weights.shape[1]
        multiply(len(x), records.ctypes.data, records.strides[0], *where, y.ctypes.data, work.ctypes.data)
        assert np.isnan(y[-1]).all()  # nothing is written behind the last row
        return y[:-1]

    return records_of, product


def random(rows: int, width: int, seed: int = 0) -> Array:
    """Numbers of very different sizes."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, width)) * np.exp2(rng.integers(-20, 20, (rows, width // 32)).repeat(32, axis=1))).astype(np.float32)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_a_product_is_as_exact_as_one_in_float32_and_the_same_in_any_company(kind: Format) -> None:
    _, product = product_of(kind)
    for width in (256, 288, 1536) if kind.scales == 0 else (256, 1536):
        weights = packed(kind, source(kind, 32, width))
        whole = cpu_formats.unpack(weights, kind, 32, width).astype(np.float64)
        x = np.random.default_rng(width).standard_normal((25, width)).astype(np.float32)
        terms = np.sqrt(np.square(x.astype(np.float64)) @ np.square(whole.T)) + np.finfo(np.float32).tiny  # a sum's usual size
        all_rows = product(x, weights)
        errors = np.abs(all_rows - x @ whole.T) / terms
        assert np.sqrt(np.mean(np.square(errors))) <= (7e-7 if kind.bits in (5, 6) else 3.5e-7)
        assert errors.max() <= 4e-6
        for rows in range(1, 25):
            np.testing.assert_array_equal(product(x[:rows], weights), all_rows[:rows])


@pytest.mark.parametrize("kind", [FORMATS[3], FORMATS[5], FORMATS[10]], ids=lambda kind: kind.name)
def test_records_hold_x_to_22_bits(kind: Format) -> None:
    records_of, _ = product_of(kind)
    x = random(3, 7 * 32)
    x[1, 32:64] = 0
    x[2, 5], x[2, 6] = np.float32(1e-42), 0
    records = records_of(x)
    places = records[:, :, :96].view(np.int8).astype(np.int64).reshape(7, 3, 3, 32)
    order = np.arange(32) if kind.bits == 8 else np.arange(32).reshape(4, 4, 2).transpose(0, 2, 1).reshape(32)
    whole = np.empty((7, 3, 32), np.int64)
    whole[:, :, order] = (places[:, :, 0] * 256 + places[:, :, 1]) * 256 + places[:, :, 2]
    scale = records[:, :, 96:100].view(np.float32)
    blocks = x.reshape(3, 7, 32).transpose(1, 0, 2)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    assert (np.abs(blocks - whole * scale.astype(np.float64)) <= largest * 2.0 ** (-20 if kind.bits == 6 else -21) / 2).all()
    assert (np.abs(whole) <= 1 << 22).all()
    sums = records[:, :, 100:108].view(np.float32)
    expected = whole * scale.astype(np.float64)
    runs = [expected] if kind.scales < 2 else [expected[:, :, :16], expected[:, :, 16:]]
    for run, part in enumerate(runs):
        np.testing.assert_allclose(sums[:, :, run], part.sum(axis=2), rtol=1e-6)


def test_the_largest_numbers_stay_in_their_digits() -> None:
    """|t| = 2^22 after rounding, of codes 255: the sums over a block reach their bounds."""
    for kind in QUANTISED:
        _, product = product_of(kind)
        weights = packed(kind, source(kind, 32, 256))
        weights[:, :, : kind.d_at] = 255  # every code the largest
        whole = cpu_formats.unpack(weights, kind, 32, 256).astype(np.float64)
        for sign in (1, -1):
            x = np.full((2, 256), sign * np.nextafter(np.float32(2), np.float32(0)))
            np.testing.assert_allclose(product(x, weights), x @ whole.T, rtol=1e-6, atol=1e-6 * np.abs(x @ np.abs(whole.T)).max())


def test_what_is_no_number_makes_its_own_row_no_number() -> None:
    _, product = product_of(FORMATS[5])
    weights = packed(FORMATS[5], source(FORMATS[5], 32, 128))
    x = random(9, 128, 1)
    sound = product(x, weights)
    for bad in (np.nan, np.inf, -np.inf):
        y = x.copy()
        y[4, 77] = bad
        found = product(y, weights)
        assert np.isnan(found[4]).all()
        np.testing.assert_array_equal(np.delete(found, 4, axis=0), np.delete(sound, 4, axis=0))
    for extreme in (np.float32(3e38), np.float32(1e-44), np.float32(0)):
        assert np.isfinite(product(np.full((1, 128), extreme / 128), weights)).all()
    assert (product(np.zeros((2, 128), np.float32), weights) == 0).all()


@pytest.mark.parametrize("storage", ["q4_1", "q8_0"])
def test_a_crew_of_any_size_gives_the_same_bits(storage: str) -> None:
    kind = next(kind for kind in FORMATS if kind.name == storage)
    shapes = [(80, 288), (1100, 96)]
    parts = {shape: source(kind, *shape) for shape in shapes}
    reference: dict[Any, Array] = {}
    for threads in (1, 2, 3, 5):
        backend = open_backend("cpu", threads)
        for shape in shapes:
            matrix = backend.load_matrix([parts[shape]])
            for rows in (1, 2, 3, 24, 49, 75, 121, 300):
                x, out = random(rows, shape[1], rows), np.empty((rows, shape[0]), np.float32)
                backend.linear(x, matrix, out)
                np.testing.assert_array_equal(out, reference.setdefault((shape, rows), out))


@pytest.mark.parametrize("storage", ["q4_1", "q6_k"])
def test_the_way_of_other_processors_gives_the_same_within_float32(storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where bytes cannot be multiplied, weights are unpacked to float32."""
    if not cpu_code.MAPS_IMAGES:
        pytest.skip("no images are mapped here")
    kind = next(kind for kind in FORMATS if kind.name == storage)
    part, backend = source(kind, 80, 256), open_backend("cpu", 2)
    matrix = backend.load_matrix([part])
    xs = [random(rows, 256, rows) for rows in (1, 2, 12, 24, 25, 100, 250)]
    found = [np.empty((len(x), 80), np.float32) for x in xs]
    for x, out in zip(xs, found, strict=True):
        backend.linear(x, matrix, out)
    file = tmp_path / "gemm.code"
    file.write_bytes(link(compiler.compile_object(float_gemm(kind.index)), cpu_code.ENTRY))
    monkeypatch.setitem(cpu_code._loaded, f"gemm-{kind.index}", cpu_code.map_image(file))
    first = np.empty((1, 80), np.float32)
    for x, out in zip(xs, found, strict=True):
        other = np.empty_like(out)
        backend.linear(x, matrix, other)
        scale = np.abs(x).max(axis=1, keepdims=True) * np.abs(part.read()).max() * 256
        assert (np.abs(out - other) <= 1e-6 * scale).all()
        backend.linear(x[:1], matrix, first)
        np.testing.assert_array_equal(first[0], other[0])
