"""x as digits, for products with quantised weights in whole numbers (digit_tile.py).

Where a processor multiplies bytes (AVX-512 VNNI), a lane does four multiply-adds of bytes in the time of one of float32. Codes
are bytes; x becomes three bytes. For every 32 k of a row there is a power of two s, and

    x[k] ~ s * t[k]        |t| <= 2^22, or 2^21 with codes of five or six bits
    t = (h * 256 + m) * 256 + l        three signed bytes

so an x is off by at most 2^-22 (2^-21) of the largest of the 32: together that is less than what a long sum of float32 rounds
away. x is kept as records of RECORD bytes, as large as the 32 numbers that one stands for:

    int8 [3][32]     h, m, l; four bytes side by side belong to the four codes in a word of a column
    float32          at SCALE: s; at SUMS: s * sum(t), or of either half of the 32 k where the weights' D changes with the second
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import llvmlite.binding

from cupaged.backends.cpu_code import REGISTERS_WANTED
from cupaged.backends.cpu_formats import BLOCK, FORMATS, Format
from cupaged.backends.cpu_kernels.ir import (
    F32,
    I8,
    I32,
    I64,
    IS_X86,
    Builder,
    Value,
    constant,
    emitter,
    fma,
    load,
    loop,
    shuffle,
    store,
    vector,
)

MULTIPLIES_BYTES = IS_X86 and not REGISTERS_WANTED and bool(llvmlite.binding.get_host_cpu_features().get("avx512vnni"))
"""Whether products with quantised weights are made this way."""

RECORD, SCALE, SUMS = 128, 96, 100
"""Bytes of a record, and where in it s and the sums are."""

_LANES = 16
_ROUNDER = 1.5 * 2**23
"""Plus this, a float32 below 2^22 has the nearest whole number in its lowest bits."""

_ROUNDER_BITS = 0x4B400000


@emitter(literals=1)
def to_digits(b: Builder, index: int, x: Value, blocks: Value, records: Value, stride: Value) -> None:
    """A row of x, 32 * blocks float32 numbers, as records for weights of FORMATS[index], `stride` bytes apart.

    An infinity or NaN among 32 numbers makes their s NaN; sums of numbers beyond 1e37 may leave float32's range.
    """

    def some(first: Value, count: int) -> list[Value]:
        places = [b.add(records, b.mul(b.add(first, I64(i)), stride)) for i in range(count)]
        _make_records(b, FORMATS[index], b.add(x, b.mul(first, I64(4 * BLOCK))), places)
        return []

    whole = b.udiv(blocks, I64(4))
    done = b.mul(whole, I64(4))
    loop(b, whole, [], lambda i, _: some(b.mul(i, I64(4)), 4))
    loop(b, b.sub(blocks, done), [], lambda i, _: some(b.add(done, i), 1))


def _make_records(b: Builder, kind: Format, x: Value, records: Sequence[Value]) -> None:
    """Consecutive blocks, 1 or 4, which share the work on what each has one of."""
    blocks = [[load(b, vector(F32, _LANES), x, 4 * (BLOCK * i + first)) for first in (0, _LANES)] for i in range(len(records))]
    scales, inverses = _powers(b, _reduced(b, _larger, [_largest_bits(b, halves) for halves in blocks]), 21 if kind.bits in (5, 6) else 22)
    rounded = [[_rounded(b, half, shuffle(b, inverses, inverses, [i] * _LANES)) for half in halves] for i, halves in enumerate(blocks)]
    for i, record in enumerate(records):
        store(b, b.extract_element(scales, I32(i)), record, SCALE)
        _store_digits(b, rounded[i], _order(kind), record)
    runs = [[b.add(*halves) for halves in rounded]] if kind.scales < 2 else [list(run) for run in zip(*rounded, strict=True)]
    for run, terms in enumerate(runs):
        excess = constant(I32, len(records), _ROUNDER_BITS * (BLOCK // len(runs)) % 2**32)
        sums = b.fmul(b.sitofp(b.sub(_reduced(b, _sum, terms), excess), scales.type), scales)
        for i, record in enumerate(records):
            store(b, b.extract_element(sums, I32(i)), record, SUMS + 4 * run)


def _largest_bits(b: Builder, halves: Sequence[Value]) -> Value:
    """Of each two numbers the bits of the one that is farther from zero, without its sign."""
    return _larger(b, *(b.and_(b.bitcast(half, vector(I32, _LANES)), constant(I32, _LANES, 0x7FFFFFFF)) for half in halves))


def _rounded(b: Builder, numbers: Value, inverse: Value) -> Value:
    """_ROUNDER_BITS + t."""
    return b.bitcast(fma(b, numbers, inverse, constant(F32, _LANES, _ROUNDER)), vector(I32, _LANES))


def _store_digits(b: Builder, rounded: Sequence[Value], order: Sequence[int], record: Value) -> None:
    """t + 0x8080, with these bits turned, has its digits as its bytes, the lowest first."""
    wide = [b.add(half, constant(I32, _LANES, (0x8080 - _ROUNDER_BITS) % 2**32)) for half in rounded]
    wide = [b.bitcast(b.xor(half, constant(I32, _LANES, 0x8080)), vector(I8, 4 * _LANES)) for half in wide]
    for digits, place in ((2, 1), 0), ((0,), 2 * BLOCK):
        store(b, shuffle(b, wide[0], wide[1], [4 * k + digit for digit in digits for k in order]), record, place)


def _order(kind: Format) -> list[int]:
    """The k of a block in the order in which its codes' bytes lie: of fewer than eight bits, a word's even ones before its odd ones."""
    if kind.bits == 8:
        return list(range(BLOCK))
    return [first + k for first in range(0, BLOCK, 8) for k in (0, 2, 4, 6, 1, 3, 5, 7)]


def _larger(b: Builder, one: Value, other: Value) -> Value:
    return b.select(b.icmp_unsigned(">", one, other), one, other)


def _sum(b: Builder, one: Value, other: Value) -> Value:
    return b.add(one, other)


def _reduced(b: Builder, combine: Callable[[Builder, Value, Value], Value], vectors: Sequence[Value]) -> Value:
    """All lanes of each of 1 or 4 vectors combined: a vector of as many lanes."""
    if len(vectors) == 1:
        (held,) = vectors
    else:
        zero, one, two, three = vectors
        held = _paired(b, combine, _paired(b, combine, zero, two), _paired(b, combine, one, three))
    while held.type.count > len(vectors):
        half = held.type.count // 2
        held = combine(b, shuffle(b, held, held, range(half)), shuffle(b, held, held, range(half, 2 * half)))
    return held


def _paired(b: Builder, combine: Callable[[Builder, Value, Value], Value], one: Value, other: Value) -> Value:
    """Of every four lanes of two vectors, two combined: those of the one and of the other in turn."""
    low = [lane + n for lane in range(0, _LANES, 4) for n in (0, _LANES, 1, _LANES + 1)]
    return combine(b, shuffle(b, one, other, low), shuffle(b, one, other, [lane + 2 for lane in low]))


def _powers(b: Builder, largest: Value, bits: int) -> tuple[Value, Value]:
    """s, such that numbers up to the `largest`, whose bits these are, stay below s * 2^bits, and 1 / s; lane by lane."""
    lanes = largest.type.count
    number = lambda value: constant(I32, lanes, value)  # noqa: E731
    exponent = _larger(b, b.lshr(largest, number(23)), number(bits))  # smaller ones lose digits
    scale = b.shl(b.sub(exponent, number(bits - 1)), number(23))
    scale = b.select(b.icmp_unsigned("==", exponent, number(255)), number(0x7FC00000), scale)
    inverse = b.shl(b.sub(number(253 + bits), exponent), number(23))
    return b.bitcast(scale, vector(F32, lanes)), b.bitcast(inverse, vector(F32, lanes))
