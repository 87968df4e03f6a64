"""Packed weights in registers: IR that turns the blocks of cpu_formats.py into float32 vectors, and products on top of it.

A code is used where it lies in its 32-bit lane: it is masked, converted as if it were 256^i times larger, and the
multiply-add that scales it takes D / 256^i, which is exact. So a weight costs three instructions. Eight k are unpacked
at a time, in a loop: of a whole block at once, LLVM would hold far more in registers than there are.

    unpack_panel   blocks of a group -> float32 panel [k][16] for tile_product: for many rows
    dot_rows       a few rows times up to four groups, weights never leaving the registers
    dot_rows_keeping   the same, but the weights are stored as panels, too

Both take a row's sum in the order of k with one fused multiply-add a term, so they give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import llvmlite.binding

from cupaged.backends.cpu_formats import BLOCK, FLOAT16, FLOAT32, FORMATS, GROUP, Format
from cupaged.backends.cpu_kernels.ir import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    IS_X86,
    LANES,
    REGISTERS,
    Builder,
    Value,
    at,
    constant,
    emitter,
    fma,
    load,
    loop,
    prefetch,
    splat,
    store,
    switch,
    vector,
)
from cupaged.backends.cpu_kernels.tile import sums_at
from cupaged.backends.cpu_program import LINE

MAX_ROWS = 12 if REGISTERS == 32 else 4
"""Most rows of dot_rows: beyond them unpacking once into a panel is faster."""

CONVERTS_HALVES = not IS_X86 or bool(llvmlite.binding.get_host_cpu_features().get("f16c"))
"""Whether float16 is widened by an instruction; where not, LLVM would call a function that may not exist."""

_SUMS = 24 if REGISTERS == 32 else 8
"""Registers for sums in dot_rows."""

_EIGHT = 8
"""k that are handled without a jump."""

_AHEAD = 2048
"""Bytes of every group that are asked for before their turn: short streams side by side are too much for the processor's guess."""

Column = tuple[Value, int]
"""LANES columns: the address of their group's first block, and the first one's place in the group."""

Use = Callable[[list[Value], Value, int, list[Value]], list[Value]]
"""(carried values, k, j, weights of every Column at k + j) -> carried values."""


# ---- weights


def halves_to_floats(b: Builder, address: Value, offset: int = 0, lanes: int = LANES) -> Value:
    """`lanes` float16 numbers as float32."""
    wide = vector(F32, lanes)
    if CONVERTS_HALVES:
        return b.fpext(load(b, vector(F16, lanes), address, offset), wide)
    # the same bits as a float32 are 2^112 times smaller, subnormals included; infinity and NaN have the largest exponent

    def number(value: int) -> Value:
        return constant(I32, lanes, value)

    bits = b.zext(load(b, vector(I16, lanes), address, offset), vector(I32, lanes))
    magnitude = b.shl(b.and_(bits, number(0x7FFF)), number(13))
    finite = b.bitcast(b.fmul(b.bitcast(magnitude, wide), constant(F32, lanes, 2.0**112)), vector(I32, lanes))
    absolute = b.select(b.icmp_unsigned("<", magnitude, number(0x0F800000)), finite, b.or_(magnitude, number(0x7F800000)))
    return b.bitcast(b.or_(absolute, b.shl(b.and_(bits, number(0x8000)), number(16))), wide)


def _number(b: Builder, kind: Format, block: Value, lane: int) -> Value:
    """LANES weights of a float format."""
    if kind is FLOAT32:
        return load(b, vector(F32, LANES), block, 4 * lane)
    if kind is FLOAT16:
        return halves_to_floats(b, block, 2 * lane)
    bits = b.zext(load(b, vector(I16, LANES), block, 2 * lane), vector(I32, LANES))
    return b.bitcast(b.shl(bits, constant(I32, LANES, 16)), vector(F32, LANES))


def scales_of(b: Builder, kind: Format, block: Value, lane: int) -> list[tuple[list[Value], Value]]:
    """D / 256^i for i = 0 .. 3, and M, of every run of k that shares them."""
    d = halves_to_floats(b, block, kind.d_at + 2 * lane)
    own = [_scale(b, block, kind.scale_at + GROUP * run + lane, signed=not kind.has_min) for run in range(kind.scales)]
    runs = [b.fmul(d, scale) for scale in own] or [d]
    if kind.zero:
        offsets = [b.fmul(run, constant(F32, LANES, -float(kind.zero))) for run in runs]
    else:
        m = halves_to_floats(b, block, kind.m_at + 2 * lane)
        offsets = [b.fneg(b.fmul(m, _scale(b, block, kind.min_at + lane, signed=False))) if own else m]
    shrunk = [[b.fmul(run, constant(F32, LANES, 256.0**-i)) if i else run for i in range(4)] for run in runs]
    return list(zip(shrunk, offsets, strict=True))


def _scale(b: Builder, block: Value, offset: int, *, signed: bool) -> Value:
    """LANES bytes as float32."""
    number, wide = load(b, vector(I8, LANES), block, offset), vector(I32, LANES)
    return b.sitofp(b.sext(number, wide) if signed else b.zext(number, wide), vector(F32, LANES))


def _codes(b: Builder, kind: Format, block: Value, lane: int, eight: Value) -> Iterator[tuple[Value, int]]:
    """(code * 256^byte, byte) of the eight k from 8 * eight on, ascending."""
    if kind.bits == 8:
        for i in range(2):
            word = word_of_block(b, block, lane, b.mul(eight, I64(2)), i)
            for byte in range(3):
                yield b.and_(word, constant(I32, LANES, 255 << 8 * byte)), byte
            yield b.lshr(word, constant(I32, LANES, 24)), 0  # in place it would be negative
        return
    words = [byte_codes(b, kind, block, lane, eight, odd) for odd in range(2)]
    for byte in range(4):
        for word in words:
            yield b.and_(word, constant(I32, LANES, (1 << kind.bits) - 1 << 8 * byte)), byte


def byte_codes(b: Builder, kind: Format, block: Value, lane: int, eight: Value, odd: int) -> Value:
    """The even or the odd ones of eight codes of 4, 5 or 6 bits, at the lower ends of four bytes (of 4 bits: others above them)."""
    low = word_of_block(b, block, lane, eight, 0)
    low = b.lshr(low, constant(I32, LANES, 4)) if odd else low
    extra = kind.bits - 4
    if not extra:
        return low
    high = word_of_block(b, block, lane, I64(0), 4 + odd * (extra - 1))
    high = b.lshr(high, splat(b, b.trunc(b.mul(eight, I64(extra)), I32), LANES))
    if not (extra == 1 and odd):  # whose field is bit 4 already
        high = b.shl(high, constant(I32, LANES, 4))
    above = constant(I32, LANES, ((1 << extra) - 1) * 0x10101010)
    return b.or_(b.and_(low, constant(I32, LANES, 0x0F0F0F0F)), b.and_(high, above))


def word_of_block(b: Builder, block: Value, lane: int, first: Value, index: int) -> Value:
    """Word first + index of LANES columns."""
    return load(b, vector(I32, LANES), b.add(block, b.mul(first, I64(4 * GROUP))), 4 * GROUP * index + 4 * lane)


# ---- a walk over all k, in order


def _walk(b: Builder, kind: Format, columns: Sequence[Column], group_stride: Value, blocks: Value, carried: list[Value], use: Use) -> list[Value]:
    """Call `use` for every k of `blocks` blocks; columns of the same group must have the same address value."""
    step = _float_step if kind.is_float else _block_step
    groups = list(dict.fromkeys(group for group, _ in columns))
    count = _EIGHT if kind.is_float else 1

    def whole(i: Value, carried: list[Value]) -> list[Value]:
        first = b.mul(i, I64(count))
        fetch_ahead(b, groups, group_stride, b.mul(first, I64(kind.block_bytes)), count * kind.block_bytes)
        return step(b, kind, columns, first, count, carried, use)

    steps = b.udiv(blocks, I64(count))
    carried = loop(b, steps, carried, whole)
    if count == 1:
        return carried
    done = b.mul(steps, I64(count))
    return loop(b, b.sub(blocks, done), carried, lambda i, held: step(b, kind, columns, b.add(done, i), 1, held, use))


def _float_step(b: Builder, kind: Format, columns: Sequence[Column], first: Value, count: int, carried: list[Value], use: Use) -> list[Value]:
    blocks = [(b.add(group, b.mul(first, I64(kind.block_bytes))), lane) for group, lane in columns]
    for j in range(count):
        carried = use(carried, first, j, [_number(b, kind, at(b, block, kind.block_bytes * j), lane) for block, lane in blocks])
    return carried


def _block_step(b: Builder, kind: Format, columns: Sequence[Column], first: Value, count: int, carried: list[Value], use: Use) -> list[Value]:
    blocks = [(b.add(group, b.mul(first, I64(kind.block_bytes))), lane) for group, lane in columns]
    scales = [scales_of(b, kind, block, lane) for block, lane in blocks]
    runs = len(scales[0])
    eights = BLOCK // _EIGHT // runs

    def unpack(run: int, i: Value, carried: list[Value]) -> list[Value]:
        eight = b.add(i, I64(run * eights))
        k = b.add(b.mul(first, I64(BLOCK)), b.mul(eight, I64(_EIGHT)))
        codes = zip(*(_codes(b, kind, block, lane, eight) for block, lane in blocks), strict=True)
        for j, together in enumerate(codes):
            weights = []
            for (code, byte), column in zip(together, scales, strict=True):
                d, m = column[run]
                weights.append(fma(b, b.sitofp(code, vector(F32, LANES)), d[byte], m))
            carried = use(carried, k, j, weights)
        return carried

    for run in range(runs):
        carried = loop(b, I64(eights), carried, partial(unpack, run))
    return carried


def fetch_ahead(b: Builder, groups: Sequence[Value], group_stride: Value, done: Value, size: int, distance: int = _AHEAD) -> None:
    """Ask for `size` bytes that come `distance` later in the same groups, or, if these end there, in as many that follow them."""
    ahead, skip = b.add(done, I64(distance)), b.mul(group_stride, I64(len(groups) - 1))
    follow = b.select(b.icmp_signed("<", ahead, group_stride), I64(0), skip)
    if distance > _AHEAD:
        follow = b.add(follow, b.select(b.icmp_signed("<", ahead, b.mul(group_stride, I64(2))), I64(0), skip))
    for group in groups:
        for line in range(0, size, LINE):
            prefetch(b, b.add(group, b.add(ahead, follow)), line)


# ---- what kernels call


@emitter(literals=1)
def unpack_panel(b: Builder, index: int, w: Value, blocks: Value, panel: Value) -> None:
    """`blocks` blocks of one group, from address w on, as float32 panel [k][16], whose row is 64 bytes. FORMATS[index]."""
    columns = [(w, lane) for lane in range(0, GROUP, LANES)]
    row = 4 * GROUP

    def write(carried: list[Value], k: Value, j: int, weights: list[Value]) -> list[Value]:
        out = b.add(panel, b.mul(k, I64(row)))
        for (_, lane), weight in zip(columns, weights, strict=True):
            store(b, weight, out, row * j + 4 * lane)
        return carried

    _walk(b, FORMATS[index], columns, I64(0), blocks, [], write)


@emitter(literals=3)
def dot_rows(
    b: Builder, index: int, groups: int, most: int, rows: Value, x: Value, x_stride: Value, w: Value, group_stride: Value, blocks: Value, y: Value, y_stride: Value
) -> None:
    """y[rows][16 * groups] = x[rows][k] times `groups` (1 .. 4) groups of packed columns; rows 1 .. `most`, up to MAX_ROWS. FORMATS[index].

    w is the address of the first group's first block, the next group's lies group_stride bytes further, and so on.
    Addresses and strides in bytes.
    """
    starts = [b.add(w, b.mul(group_stride, I64(g))) for g in range(groups)]
    columns = [(start, lane) for start in starts for lane in range(0, GROUP, LANES)]

    def case(n: int) -> None:
        passes = -(-len(columns) // max(1, min(4, _SUMS // n)))
        width = -(-len(columns) // passes)
        for first in range(0, len(columns), width):
            out = at(b, y, 4 * LANES * first)
            _dot_pass(b, FORMATS[index], n, x, x_stride, columns[first : first + width], group_stride, blocks, out, y_stride)

    switch(b, rows, range(1, most + 1), case)


@emitter(literals=1)
def dot_rows_keeping(
    b: Builder, index: int, more: Value, x: Value, x_stride: Value, w: Value, group_stride: Value, blocks: Value, y: Value, y_stride: Value,
    panel: Value, panel_bytes: Value,
) -> None:  # fmt: skip
    """y[MAX_ROWS][32] = (more, if it is not 0: y +) as many rows of x times two groups, whose weights are left as two panels [k][16].

    So the multiply-adds of the first rows hide what unpacking for the others costs.
    """
    starts = [w, b.add(w, group_stride)]
    columns = [(start, lane) for start in starts for lane in range(0, GROUP, LANES)]
    panels = [b.add(at(b, panel, 4 * lane), b.mul(panel_bytes, I64(g))) for g in range(2) for lane in range(0, GROUP, LANES)]
    width = max(1, min(4, _SUMS // MAX_ROWS))
    for first in range(0, len(columns), width):
        part = slice(first, first + width)
        _dot_pass(b, FORMATS[index], MAX_ROWS, x, x_stride, columns[part], group_stride, blocks, at(b, y, 4 * LANES * first), y_stride, more, panels[part])


def _dot_pass(
    b: Builder, kind: Format, rows: int, x: Value, x_stride: Value, columns: Sequence[Column], group_stride: Value, blocks: Value, y: Value, y_stride: Value,
    more: Value | None = None, panels: Sequence[Value] = (),
) -> None:  # fmt: skip
    """dot_rows for some columns, whose sums stay in registers; their weights go to the panels, if there are any."""
    x_rows = [b.add(x, b.mul(x_stride, I64(r))) for r in range(rows)]

    def add(sums: list[Value], k: Value, j: int, weights: list[Value]) -> list[Value]:
        numbers = [splat(b, load(b, F32, b.add(row, b.mul(k, I64(4))), 4 * j), LANES) for row in x_rows]
        for panel, weight in zip(panels, weights, strict=False):
            store(b, weight, b.add(panel, b.mul(k, I64(4 * GROUP))), 4 * GROUP * j)
        return [fma(b, weight, number, sums[r * len(weights) + c]) for r, number in enumerate(numbers) for c, weight in enumerate(weights)]

    places = [(b.add(y, b.mul(y_stride, I64(row))), 4 * LANES * c) for row in range(rows) for c in range(len(columns))]
    sums = [constant(F32, LANES, 0.0)] * len(places) if more is None else sums_at(b, more, places)
    sums = _walk(b, kind, columns, group_stride, blocks, sums, add)
    for total, (row, offset) in zip(sums, places, strict=True):
        store(b, total, row, offset)
