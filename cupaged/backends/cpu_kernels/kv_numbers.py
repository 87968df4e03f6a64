"""The way from a number of the paged cache to float32, and back, for every KvKind."""

from __future__ import annotations

from llvmlite import ir

from cupaged.backends.cpu_formats import GROUP
from cupaged.backends.cpu_kernels.ir import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    Builder,
    Value,
    at,
    by_lanes,
    constant,
    emitter,
    intrinsic_call,
    load,
    loop,
    maximum,
    shuffle,
    splat,
    store,
    switch,
    transposed,
    vector,
)
from cupaged.backends.cpu_kernels.unpack import CONVERTS_HALVES, halves_to_floats
from cupaged.backends.cpu_kv_numbers import BFLOAT16, FLOAT16, FLOAT32, INT8, KINDS, KvKind


def widened(b: Builder, index: int, lanes: int, address: Value) -> Value:
    """A vector of stored numbers as float32; int8 codes without their scale."""
    kind, wide = KINDS[index], vector(F32, lanes)
    if kind is FLOAT32:
        return load(b, wide, address)
    if kind is INT8:
        return b.sitofp(load(b, vector(I8, lanes), address), wide)
    if kind is FLOAT16:
        return halves_to_floats(b, address, 0, lanes)
    bits = b.zext(load(b, vector(I16, lanes), address), vector(I32, lanes))
    return b.bitcast(b.shl(bits, constant(I32, lanes, 16)), wide)


@emitter(literals=2)
def widen(b: Builder, width: int, by_lane: int, index: Value, source: Value, source_stride: Value, count: Value, scales: Value, target: Value, target_stride: Value) -> None:
    """Copy `count` runs of `width` (16 or 1) stored numbers of KINDS[index] to float32.

    int8 is multiplied by the numbers at `scales`: one a lane, or one for all.
    """
    lanes = LANES if width == GROUP else 1
    parts = range(0, width, lanes)

    def case(number: int) -> None:
        kind = KINDS[number]
        factors = []
        if kind.has_scales:
            one = None if by_lane else splat(b, load(b, F32, scales), lanes)
            factors = [load(b, vector(F32, lanes), scales, 4 * lane) if one is None else one for lane in parts]

        def run(i: Value, _: list[Value]) -> list[Value]:
            origin, goal = at(b, source, b.mul(i, source_stride)), at(b, target, b.mul(i, target_stride))
            numbers = [widened(b, number, lanes, at(b, origin, kind.element_bytes * lane)) for lane in parts]
            for n, lane in enumerate(parts):
                store(b, b.fmul(numbers[n], factors[n]) if factors else numbers[n], goal, 4 * lane)
            return []

        loop(b, count, [], run)

    switch(b, index, range(len(KINDS)), case)


@emitter(literals=2)
def narrow_slot(b: Builder, index: int, scattered: int, source: Value, count: Value, target: Value, stride: Value, scale_at: Value) -> None:
    """Store a slot's `count` float32 numbers as KINDS[index], and its scale: side by side, or `scattered`, each `stride` bytes after the other."""
    kind = KINDS[index]
    factor = _store_scale(b, source, count, scale_at) if kind.has_scales else None

    def some(first: Value, lanes: int) -> None:
        numbers = load(b, vector(F32, lanes), source, b.mul(first, I64(4)))
        place = b.mul(first, stride if scattered else I64(kind.element_bytes))
        store(b, _narrowed(b, kind, numbers, factor and splat(b, factor, lanes)), target, place)

    if not scattered:
        by_lanes(b, count, some)
        return

    def one(i: Value, _: list[Value]) -> list[Value]:
        some(i, 1)
        return []

    loop(b, count, [], one)


@emitter(literals=1)
def narrow_slots(b: Builder, index: int, source: Value, source_stride: Value, count: Value, target: Value, stride: Value, scales_at: Value) -> None:
    """The same bits for LANES slots at once, of which each number lies beside the other slots': whole vectors are stored."""
    kind = KINDS[index]
    rows = [at(b, source, b.mul(source_stride, I64(lane))) for lane in range(LANES)]
    factors = None
    if kind.has_scales:
        scalars = [_store_scale(b, row, count, at(b, scales_at, 4 * lane)) for lane, row in enumerate(rows)]
        factors = constant(F32, LANES, 0.0)
        for lane, factor in enumerate(scalars):
            factors = b.insert_element(factors, factor, I32(lane))

    def some(first: Value, lanes: int) -> None:
        offset = b.mul(first, I64(4))
        if lanes == LANES:
            columns = transposed(b, [load(b, vector(F32, LANES), row, offset) for row in rows])
        else:
            column = constant(F32, LANES, 0.0)
            for lane, row in enumerate(rows):
                column = b.insert_element(column, load(b, F32, row, offset), I32(lane))
            columns = [column]
        for i, numbers in enumerate(columns):
            store(b, _narrowed(b, kind, numbers, factors), target, b.mul(b.add(first, I64(i)), stride))

    by_lanes(b, count, some)


def _store_scale(b: Builder, source: Value, count: Value, scale_at: Value) -> Value:
    """The scale of `count` numbers, a 127th of the largest magnitude, is stored; returns the factor that makes codes of them."""

    def larger(first: Value, lanes: int, so_far: Value) -> Value:
        numbers = load(b, so_far.type, source, b.mul(first, I64(4)))
        return maximum(b, intrinsic_call(b, f"llvm.fabs.v{lanes}f32", numbers.type, numbers), so_far)

    whole = b.udiv(count, I64(LANES))
    done = b.mul(whole, I64(LANES))
    (largest,) = loop(b, whole, [constant(F32, LANES, 0.0)], lambda i, held: [larger(b.mul(i, I64(LANES)), LANES, *held)])
    while largest.type.count > 1:
        half = largest.type.count // 2
        largest = maximum(b, shuffle(b, largest, largest, range(half)), shuffle(b, largest, largest, range(half, 2 * half)))
    (largest,) = loop(b, b.sub(count, done), [largest], lambda i, held: [larger(b.add(done, i), 1, *held)])
    scale = b.fdiv(b.extract_element(largest, I32(0)), ir.Constant(F32, 127.0))
    store(b, scale, scale_at)
    zero = ir.Constant(F32, 0.0)
    return b.select(b.fcmp_ordered(">", scale, zero), b.fdiv(ir.Constant(F32, 1.0), scale), zero)


def _narrowed(b: Builder, kind: KvKind, numbers: Value, factors: Value | None) -> Value:
    """A vector of float32 numbers, times the factors if there are any, at the width of a kind, rounded to nearest even."""
    if kind is FLOAT32:
        return numbers
    lanes = numbers.type.count
    if kind is INT8:
        codes = intrinsic_call(b, f"llvm.nearbyint.v{lanes}f32", numbers.type, b.fmul(numbers, factors))
        return b.trunc(b.fptosi(codes, vector(I32, lanes)), vector(I8, lanes))
    return _to_bfloat16(b, numbers) if kind is BFLOAT16 else _to_float16(b, numbers)


def _to_bfloat16(b: Builder, numbers: Value) -> Value:
    lanes = numbers.type.count

    def integer(value: int) -> Value:
        return constant(I32, lanes, value)

    bits = b.bitcast(numbers, vector(I32, lanes))
    even = b.and_(b.lshr(bits, integer(16)), integer(1))
    rounded = b.lshr(b.add(b.add(bits, integer(0x7FFF)), even), integer(16))
    return b.trunc(b.select(b.fcmp_unordered("uno", numbers, numbers), integer(0x7FC0), rounded), vector(I16, lanes))


def _to_float16(b: Builder, numbers: Value) -> Value:
    """Numbers out of range become the largest ones: an infinity would spoil every later sum."""
    lanes = numbers.type.count

    def integer(value: int) -> Value:
        return constant(I32, lanes, value)

    largest, least = constant(F32, lanes, 65504.0), constant(F32, lanes, -65504.0)
    numbers = b.select(b.fcmp_ordered(">", numbers, largest), largest, numbers)
    numbers = b.select(b.fcmp_ordered("<", numbers, least), least, numbers)
    if CONVERTS_HALVES:
        return b.fptrunc(numbers, vector(F16, lanes))
    bits = b.bitcast(numbers, vector(I32, lanes))
    magnitude = b.and_(bits, integer(0x7FFFFFFF))
    rounded = b.add(b.add(magnitude, integer(0xFFF)), b.and_(b.lshr(magnitude, integer(13)), integer(1)))
    normal = b.sub(b.lshr(rounded, integer(13)), integer(112 << 10))
    half = constant(F32, lanes, 0.5)  # the steps of a float32 just above one half are those of float16's subnormals
    subnormal = b.sub(b.bitcast(b.fadd(b.bitcast(magnitude, numbers.type), half), bits.type), integer(0x3F000000))
    size = b.select(b.icmp_unsigned("<", magnitude, integer(113 << 23)), subnormal, normal)
    size = b.select(b.fcmp_unordered("uno", numbers, numbers), integer(0x7E00), size)
    return b.trunc(b.or_(size, b.lshr(b.and_(bits, integer(-(2**31))), integer(16))), vector(I16, lanes))
