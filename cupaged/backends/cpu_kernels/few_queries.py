"""A few queries and a tile of keys and values where they lie: float32, in groups of 16 slots that may lie anywhere.

One row of a sequence is as many queries as there are heads to a KV head, too few for tile.py's tile: of 32 keys, or numbers
of a value, they have fewer sums than multiply-adds can be under way. Here a pass takes up to four groups of keys, or 64 numbers
of a value, and all slots of the tile. The order of every sum is tile.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cupaged.backends.cpu_formats import GROUP
from cupaged.backends.cpu_kernels.ir import (
    F32,
    I64,
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
    splat,
    store,
    switch,
    vector,
)

FEW_QUERIES = 6 if LANES * REGISTERS == 512 else 0
"""Up to so many: their sums with four vectors fill the registers. 0: with other registers tile.py's tile is as good."""

_VECTORS = 4
_UNROLL = 4


def _unrolled(b: Builder, count: Value, sums: list[Value], step: Callable[[list[Value], Value], list[Value]]) -> list[Value]:
    """sums = step(sums, i) for i in range(count)."""

    def some(first: Value, number: int, held: list[Value]) -> list[Value]:
        for u in range(number):
            held = step(held, b.add(first, I64(u)))
        return held

    whole = b.udiv(count, I64(_UNROLL))
    done = b.mul(whole, I64(_UNROLL))
    sums = loop(b, whole, sums, lambda i, held: some(b.mul(i, I64(_UNROLL)), _UNROLL, held))
    return loop(b, b.sub(count, done), sums, lambda i, held: some(b.add(done, i), 1, held))


def _multiplied(b: Builder, sums: Sequence[Value], numbers: Sequence[Value], vectors: Sequence[Value]) -> list[Value]:
    """sums [number][vector] + number * vector."""
    wide = [splat(b, number, LANES) for number in numbers]
    return [fma(b, v, n, sums[r * len(vectors) + c]) for r, n in enumerate(wide) for c, v in enumerate(vectors)]


@emitter()
def score_tile(b: Builder, rows: Value, groups: Value, query: Value, head_dim: Value, keys: Value, stride: Value, scores: Value, scores_stride: Value) -> None:
    """scores[rows][16 * groups] = query [rows][head_dim] @ keys; up to FEW_QUERIES rows and four groups.

    `keys` is the address of a table of the groups' addresses, int64 [groups]; 16 keys' numbers of one dimension lie `stride`
    bytes before those of the next. Of an odd number of groups the last one's scores are written twice.
    """

    def some(n: int, width: int) -> None:
        last = b.sub(groups, I64(1))
        places = [b.select(b.icmp_signed("<", I64(g), last), I64(g), last) for g in range(width)]
        panels = [load(b, I64, b.add(keys, b.mul(place, I64(8)))) for place in places]
        queries = [b.add(query, b.mul(head_dim, I64(4 * r))) for r in range(n)]

        def step(sums: list[Value], k: Value) -> list[Value]:
            offset = b.mul(k, stride)
            vectors = [load(b, vector(F32, LANES), b.add(panel, offset)) for panel in panels]
            return _multiplied(b, sums, [load(b, F32, b.add(q, b.mul(k, I64(4)))) for q in queries], vectors)

        sums = _unrolled(b, head_dim, [constant(F32, LANES, 0.0)] * (n * width), step)
        for r in range(n):
            row = b.add(scores, b.mul(scores_stride, I64(r)))
            for g, place in enumerate(places):
                store(b, sums[r * width + g], b.add(row, b.mul(place, I64(4 * GROUP))))

    wide = b.icmp_signed(">", groups, I64(2))
    both = b.add(b.mul(rows, I64(2)), b.zext(wide, I64))
    switch(b, both, range(2, 2 * FEW_QUERIES + 2), lambda case: some(case // 2, 4 if case % 2 else 2))


@emitter()
def add_tile_values(b: Builder, rows: Value, weights: Value, weights_stride: Value, first: Value, end: Value, values: Value, width: Value, total: Value) -> None:
    """total[rows][width] += weights [rows][first .. end - 1] @ the values of these slots of a tile; up to FEW_QUERIES rows.

    `values` is the address of a table of the groups' addresses, int64; a slot's `width` numbers, a multiple of 32, lie together.
    """
    groups = b.udiv(b.add(end, I64(GROUP - 1)), I64(GROUP))
    start = b.udiv(first, I64(GROUP))

    def some(n: int, column: Value, lanes: int) -> None:
        offset = b.mul(column, I64(4))
        rows_of_total = [b.add(b.add(total, offset), b.mul(width, I64(4 * r))) for r in range(n)]
        rows_of_weights = [b.add(weights, b.mul(weights_stride, I64(r))) for r in range(n)]

        def group(i: Value, sums: list[Value]) -> list[Value]:
            number = b.add(start, i)
            slot = b.mul(number, I64(GROUP))
            begin = b.select(b.icmp_signed(">", first, slot), first, slot)
            stop = b.add(slot, I64(GROUP))
            stop = b.select(b.icmp_signed("<", end, stop), end, stop)
            base = b.add(load(b, I64, b.add(values, b.mul(number, I64(8)))), offset)

            def step(sums: list[Value], t: Value) -> list[Value]:
                at_slot = b.add(begin, t)
                value = b.add(base, b.mul(b.sub(at_slot, slot), b.mul(width, I64(4))))
                vectors = [load(b, vector(F32, LANES), value, 4 * LANES * v) for v in range(lanes)]
                return _multiplied(b, sums, [load(b, F32, b.add(w, b.mul(at_slot, I64(4)))) for w in rows_of_weights], vectors)

            return _unrolled(b, b.sub(stop, begin), sums, step)

        places = [(row, 4 * LANES * v) for row in rows_of_total for v in range(lanes)]
        sums = loop(b, b.sub(groups, start), [load(b, vector(F32, LANES), at(b, row, offset)) for row, offset in places], group)
        for result, (row, place) in zip(sums, places, strict=True):
            store(b, result, row, place)

    def case(n: int) -> None:
        whole = b.udiv(width, I64(_VECTORS * LANES))

        def wide(i: Value, _: list[Value]) -> list[Value]:
            some(n, b.mul(i, I64(_VECTORS * LANES)), _VECTORS)
            return []

        def rest(i: Value, _: list[Value]) -> list[Value]:
            some(n, b.mul(whole, I64(_VECTORS * LANES)), 2)
            return []

        loop(b, whole, [], wide)
        loop(b, b.sub(b.udiv(width, I64(2 * LANES)), b.mul(whole, I64(2))), [], rest)

    switch(b, rows, range(1, FEW_QUERIES + 1), case)
