"""The way from a number of the paged cache to float32, and back, for every KvKind."""

from __future__ import annotations

from llvmlite import ir

from cupaged.backends.cpu_kernels.ir import (
    F16,
    F32,
    GROUP,
    I8,
    I16,
    I32,
    LANES,
    Builder,
    Value,
    at,
    constant,
    emitter,
    intrinsic_call,
    load,
    loop,
    splat,
    store,
    switch,
    vector,
)
from cupaged.backends.cpu_kernels.unpack import CONVERTS_HALVES, halves_to_floats
from cupaged.backends.cpu_kv_numbers import BFLOAT16, FLOAT16, FLOAT32, INT8, KINDS


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


@emitter(literals=1)
def narrow(b: Builder, index: int, number: Value, address: Value) -> None:
    """Store a float32 at the width of a kind, rounded to nearest even; int8: a number already divided by its scale."""
    kind = KINDS[index]
    if kind is FLOAT32:
        store(b, number, address)
        return
    if kind is INT8:
        code = b.fptosi(intrinsic_call(b, "llvm.nearbyint.f32", F32, number), I32)
        store(b, b.trunc(code, I8), address)
        return
    narrow = _to_bfloat16(b, number) if kind is BFLOAT16 else _to_float16(b, number)
    b.store(narrow, b.inttoptr(address, I16.as_pointer()), align=2)


def _to_bfloat16(b: Builder, number: Value) -> Value:
    bits = b.bitcast(number, I32)
    even = b.and_(b.lshr(bits, I32(16)), I32(1))
    rounded = b.lshr(b.add(b.add(bits, I32(0x7FFF)), even), I32(16))
    return b.trunc(b.select(b.fcmp_unordered("uno", number, number), I32(0x7FC0), rounded), I16)


def _to_float16(b: Builder, number: Value) -> Value:
    """Numbers out of range become the largest ones: an infinity would spoil every later sum."""
    largest = ir.Constant(F32, 65504.0)
    number = b.select(b.fcmp_ordered(">", number, largest), largest, number)
    number = b.select(b.fcmp_ordered("<", number, b.fneg(largest)), b.fneg(largest), number)
    if CONVERTS_HALVES:
        return b.bitcast(b.fptrunc(number, F16), I16)
    bits = b.bitcast(number, I32)
    magnitude = b.and_(bits, I32(0x7FFFFFFF))
    rounded = b.add(b.add(magnitude, I32(0xFFF)), b.and_(b.lshr(magnitude, I32(13)), I32(1)))
    normal = b.sub(b.lshr(rounded, I32(13)), I32(112 << 10))
    half = ir.Constant(F32, 0.5)  # the steps of a float32 just above one half are those of float16's subnormals
    subnormal = b.sub(b.bitcast(b.fadd(b.bitcast(magnitude, F32), half), I32), I32(0x3F000000))
    size = b.select(b.icmp_unsigned("<", magnitude, I32(113 << 23)), subnormal, normal)
    size = b.select(b.fcmp_unordered("uno", number, number), I32(0x7E00), size)
    return b.trunc(b.or_(size, b.lshr(b.and_(bits, I32(-(2**31))), I32(16))), I16)
