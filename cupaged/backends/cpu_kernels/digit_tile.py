"""Products with quantised weights in whole numbers: codes times the digits of x (digits.py).

    sum over a block of x * w = (s * D) * sum(t * q) + M * (s * sum(t))        with w = D * q + M as in cpu_formats.py

The sums over a block are exact as whole numbers, and the blocks are added in their order by two fused multiply-adds each,
whatever the number of rows: a row's result is bit for bit the same in any company. 32 codes of four or five bits, or 16 of
six, times digits of all three places fit 32 bits; of eight bits the last place is taken by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import cycle, product

import llvmlite.binding
from llvmlite import ir

from cupaged.backends.cpu_formats import BLOCK, FORMATS, GROUP, TILE_COLUMNS, Format
from cupaged.backends.cpu_kernels.digits import MULTIPLIES_BYTES, RECORD, SCALE, SUMS
from cupaged.backends.cpu_kernels.ir import (
    F32,
    I32,
    I64,
    Builder,
    Value,
    constant,
    emitter,
    fma,
    load,
    loop,
    splat,
    store,
    switch,
    vector,
)
from cupaged.backends.cpu_kernels.unpack import byte_codes, fetch_ahead, scales_of, word_of_block
from cupaged.backends.cpu_prefetch import PIECE
from cupaged.backends.cpu_program import LINE

FETCH_BLOCKS, PIECE_WORDS = 16, 3
"""Blocks in which two tiles of rows ask for a piece of what the next attention reads, and the words of a piece."""

PIECES_AT = 256
"""Where the table of pieces begins in a tile's memory: behind D and M of 32 columns."""

_SCALE_BYTES = 128
"""D and M of 16 columns."""

_LINES = PIECE // 2 // LINE // FETCH_BLOCKS
_AHEAD = 6144
"""Bytes of every group that are asked for before their turn."""

_LANES = 16
_ROW = 4 * TILE_COLUMNS
_DIGIT_REGISTERS = 3
"""Those that digits are spread over: so many are left."""

if MULTIPLIES_BYTES:
    llvmlite.binding.initialize_native_target()
    llvmlite.binding.initialize_native_asmparser()  # where Numba compiles by itself, in tests


def tile_rows(kind: Format) -> int:
    """Rows that are multiplied together: with 32 codes of 32 columns their sums, two of them for eight bits, fill the registers."""
    return 3 if kind.bits == 8 else 6


@emitter(literals=1)
def digit_product(
    b: Builder, index: int, more: Value, rows: Value, records: Value, stride: Value, w: Value, group_stride: Value, blocks: Value, y: Value, work: Value
) -> None:
    """y[rows][32] = (more, if it is not 0: y +) rows of records times two groups of packed columns, up to FETCH_BLOCKS blocks of k. FORMATS[index].

    The rows' records of a block lie side by side, those of the next one `stride` bytes further; w is the address of the first
    group's first block, the second's lies `group_stride` bytes further. On the way, what a table says is asked for (cpu_prefetch):
    int64 [3] for every two tiles of rows, two addresses and the bytes of each; it lies PIECES_AT bytes behind `work`, where
    there is room that is ours.
    """
    kind = FORMATS[index]
    most = tile_rows(kind)
    passes = b.udiv(b.add(rows, I64(most - 1)), I64(most))
    height = b.udiv(b.sub(b.add(rows, passes), I64(1)), passes)
    lower = b.sub(b.mul(passes, height), rows)  # so many tiles are a row lower
    groups = [w, b.add(w, group_stride)]
    loop(b, b.select(b.icmp_signed("==", more, I64(0)), rows, I64(0)), [], lambda i, _: _clear(b, b.add(y, b.mul(i, I64(_ROW)))))

    def case(n: int) -> None:
        def block(i: Value, _: list[Value]) -> list[Value]:
            offset, row = b.mul(i, I64(kind.block_bytes)), b.add(records, b.mul(i, stride))
            fetch_ahead(b, groups, group_stride, offset, kind.block_bytes, _AHEAD)
            here = [b.add(group, offset) for group in groups]
            runs = list(zip(*(scales_of(b, kind, address, 0) for address in here), strict=True))
            for run, scales in enumerate(runs):
                tile = _Tile(b, kind, run, _codes_of(b, kind, here, run, len(runs)), scales, work)
                tile.pass_over(n, b.sub(passes, lower), lower, row, y, None if run else partial(_wanted, b, b.add(work, I64(PIECES_AT)), i))
            return []

        loop(b, blocks, [], block)

    switch(b, height, range(1, most + 1), case)


def _clear(b: Builder, y: Value) -> list[Value]:
    for group in range(2):
        store(b, constant(F32, _LANES, 0.0), y, 4 * GROUP * group)
    return []


def _wanted(b: Builder, pieces: Value, block: Value, number: Value) -> list[Value]:
    """Where in keys and in values the _LINES lines begin that tile `number` asks for in a block: of the first half of a piece, or of the second."""
    entry = b.add(pieces, b.mul(b.lshr(number, I64(1)), I64(8 * PIECE_WORDS)))
    one, other, size = (load(b, I64, entry, 8 * i) for i in range(PIECE_WORDS))
    place = b.add(b.mul(b.and_(number, I64(1)), I64(PIECE // 2)), b.mul(block, I64(LINE * _LINES)))
    place = b.select(b.icmp_signed("<", place, size), place, I64(0))
    return [b.add(one, place), b.add(other, place)]


def _codes_of(b: Builder, kind: Format, blocks: Sequence[Value], run: int, runs: int) -> list[list[Value]]:
    """[word][group]: the codes of a run of k, a byte each."""
    if kind.bits == 8:
        return [[word_of_block(b, block, 0, I64(0), word) for block in blocks] for word in range(BLOCK // 4)]
    eights = BLOCK // 8 // runs
    mask = constant(I32, _LANES, ((1 << kind.bits) - 1) * 0x01010101)
    return [
        [b.and_(byte_codes(b, kind, block, 0, I64(eight), odd), mask) for block in blocks]
        for eight in range(eights * run, eights * (run + 1))
        for odd in range(2)
    ]


class _Tile:
    """What a few rows are multiplied by: the codes of a run of k of 32 columns, and their D and M."""

    def __init__(self, b: Builder, kind: Format, run: int, codes: list[list[Value]], scales: Sequence[tuple[list[Value], Value]], work: Value) -> None:
        self._b, self._codes, self._scales = b, codes, work
        self._first = 4 * len(codes) * run
        for c, (d, m) in enumerate(scales):  # the registers are full: every use reads them anew
            store(b, d[0], work, _SCALE_BYTES * c)
            store(b, m, work, _SCALE_BYTES * c + 4 * _LANES)
        self._sum = SUMS + 4 * run
        self._parts = [(0, 1), (2,)] if kind.bits == 8 else [(0, 1, 2)]

    def pass_over(self, height: int, higher: Value, lower: Value, records: Value, y: Value, wanted: Callable[[Value], list[Value]] | None) -> None:
        """y[rows][32] += the product with as many records: so many tiles of `height` rows, and then of one row less.

        `wanted` says of every tile, which are numbered, what it is to ask for.
        """
        b = self._b

        def some(n: int, before: Value, i: Value) -> list[Value]:
            number, row = b.add(before, i), b.add(b.mul(before, I64(height)), b.mul(i, I64(n)))
            ahead = wanted(number) if wanted else []
            self._add(n, ahead, b.add(records, b.mul(row, I64(RECORD))), b.add(y, b.mul(row, I64(_ROW))))
            return []

        loop(b, higher, [], lambda i, _: some(height, I64(0), i))
        if height > 1:
            loop(b, lower, [], lambda i, _: some(height - 1, higher, i))

    def _add(self, height: int, ahead: Sequence[Value], records: Value, y: Value) -> None:
        b, kind = self._b, vector(F32, _LANES)
        parts = [self._multiply(height, () if i else ahead, records, places) for i, places in enumerate(self._parts)]
        for r in range(height):
            scale, total = (splat(b, load(b, F32, records, RECORD * r + at), _LANES) for at in (SCALE, self._sum))
            for c in range(2):
                place = _ROW * r + 4 * GROUP * c
                numbers = [b.sitofp(products[2 * r + c], kind) for products in parts]
                number = reduce(lambda high, low: fma(b, high, constant(F32, _LANES, 256.0), low), numbers)
                d, m = (load(b, kind, self._scales, _SCALE_BYTES * c + 4 * _LANES * i) for i in range(2))
                result = fma(b, total, m, load(b, kind, y, place))
                store(b, fma(b, number, b.fmul(scale, d), result), y, place)

    def _multiply(self, height: int, ahead: Sequence[Value], records: Value, places: Sequence[int]) -> list[Value]:
        """[row][group] flat: sums of codes times the digits of some places, the later ones 256 times smaller.

        One piece of assembly, because LLVM, which sees only that these are many independent sums, takes one after the other,
        and then has to keep whatever they share on the stack. In between, _LINES lines from each address in `ahead` are asked for.
        """
        b, words = self._b, self._codes
        width = len(words[0])
        sums = [f"${i}" for i in range(height * width)]
        digits = cycle(f"${len(sums) + i}" for i in range(_DIGIT_REGISTERS))
        codes = [f"${len(sums) + _DIGIT_REGISTERS + i}" for i in range(len(words) * width)]
        address = len(sums) + _DIGIT_REGISTERS + len(codes)
        lines = [f"prefetcht1 {LINE * line}(${address + 1 + i})" for line in range(_LINES) for i in range(len(ahead))]
        text = [f"vpxord {total}, {total}, {total}" for total in sums]
        steps = list(product(places, range(len(words)), range(height)))
        for number, (place, word, r) in enumerate(steps):
            if place != places[0] and (word, r) == (0, 0):
                text += [f"vpslld $$8, {total}, {total}" for total in sums]
            four = next(digits)
            text.append(f"vpbroadcastd {RECORD * r + BLOCK * place + self._first + 4 * word}(${address}), {four}")
            text += [f"vpdpbusd {four}, {codes[width * word + c]}, {sums[width * r + c]}" for c in range(width)]
            text += lines[number * len(lines) // len(steps) : (number + 1) * len(lines) // len(steps)]
        arguments = [*(code for word in words for code in word), records, *ahead]
        kind = ir.LiteralStructType([vector(I32, _LANES)] * (len(sums) + _DIGIT_REGISTERS))
        constraints = ["=&v"] * len(kind.elements) + ["v"] * len(codes) + ["r"] * (1 + len(ahead)) + ["~{memory}"]
        function = ir.FunctionType(kind, [value.type for value in arguments])
        made = b.asm(function, "\n".join(text), ",".join(constraints), arguments, side_effect=True)
        return [b.extract_value(made, i) for i in range(len(sums))]
