"""The register tile: a few rows of x times columns of a panel, the sums held in registers from the first k to the last.

    y[r][c] (+)= sum over k of x[r][k] * panel[k][c]         r < rows <= TILE_ROWS, c < 32: two groups of 16 columns

Every sum is taken in the order of k, with one fused multiply-add a term, whatever the number of rows: a row's result is
bit for bit the same in any company. Products of float32 end here, those of attention too; quantised weights and a few queries have tiles of their own (digit_tile.py,
few_queries.py).
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
    prefetch,
    splat,
    store,
    switch,
    vector,
)
from cupaged.backends.cpu_program import LINE

_VECTORS = 4 if LANES == 4 and REGISTERS == 32 else 2
"""Vectors of columns that are computed in one pass."""

TILE_ROWS = 12 if LANES == 16 else 6
"""Rows of the largest tile: its sums, one row of the panel and one number of x fill the registers."""

_UNROLL = 4


Fetch = Callable[[Builder, Value], None]
"""(builder, i): what step i asks for."""


def sums_at(b: Builder, more: Value, places: Sequence[tuple[Value, int | Value]]) -> list[Value]:
    """What stands at the places if `more`, else zeros."""
    before, loads, done = b.block, b.append_basic_block(), b.append_basic_block()
    b.cbranch(b.icmp_signed("!=", more, I64(0)), loads, done)
    b.position_at_end(loads)
    held = [load(b, vector(F32, LANES), address, offset) for address, offset in places]
    b.branch(done)
    b.position_at_end(done)
    sums = []
    for value in held:
        phi = b.phi(value.type)
        phi.add_incoming(constant(F32, LANES, 0.0), before)
        phi.add_incoming(value, loads)
        sums.append(phi)
    return sums


def _pass(b: Builder, rows: int, more: Value, x: Value, x_stride: Value, panels: Sequence[Value], panel_stride: Value, count: Value, outs: Sequence[Value], y_stride: Value, fetch: Fetch) -> None:
    """One pass of len(panels) vectors of columns."""
    kind = vector(F32, LANES)
    x_rows = [at(b, x, b.mul(x_stride, I64(r))) for r in range(rows)]
    y_rows = [b.mul(y_stride, I64(r)) for r in range(rows)]
    sums = sums_at(b, more, [(out, row) for row in y_rows for out in outs])

    def step(sums: list[Value], x_offset: Value, first: Value, unroll: int) -> list[Value]:
        sums = list(sums)
        for u in range(unroll):
            weights = [load(b, kind, at(b, panel, first), b.mul(panel_stride, I64(u))) for panel in panels]
            for r in range(rows):
                number = splat(b, load(b, F32, at(b, x_rows[r], x_offset), 4 * u), LANES)
                for c, weight in enumerate(weights):
                    sums[r * len(panels) + c] = fma(b, weight, number, sums[r * len(panels) + c])
        return sums

    whole = b.udiv(count, I64(_UNROLL))
    stride = b.mul(panel_stride, I64(_UNROLL))

    def whole_step(i: Value, s: list[Value]) -> list[Value]:
        fetch(b, i)
        return step(s, b.mul(i, I64(4 * _UNROLL)), b.mul(i, stride), _UNROLL)

    sums = loop(b, whole, sums, whole_step)
    done = b.mul(whole, I64(_UNROLL))

    def rest(i: Value, s: list[Value]) -> list[Value]:
        k = b.add(done, i)
        return step(s, b.mul(k, I64(4)), b.mul(k, panel_stride), 1)

    sums = loop(b, b.sub(count, done), sums, rest)
    for r in range(rows):
        for c, out in enumerate(outs):
            store(b, sums[r * len(outs) + c], out, y_rows[r])


@emitter()
def tile_product(
    b: Builder, more: Value, rows: Value, x: Value, x_stride: Value, first: Value, second: Value, panel_stride: Value, count: Value, y: Value, y_stride: Value
) -> None:
    """y[rows][32] = (more, if it is not 0: y +) x[rows][count] @ panel; rows 1 .. TILE_ROWS.

    Addresses and strides in bytes. `first` and `second` hold 16 columns each; their row k lies k * panel_stride further.
    """
    _product(b, more, rows, x, x_stride, first, second, panel_stride, count, y, y_stride, lambda b, i: None)


@emitter()
def tile_product_fetching(
    b: Builder, more: Value, rows: Value, x: Value, x_stride: Value, first: Value, second: Value, panel_stride: Value, count: Value, y: Value, y_stride: Value,
    one: Value, other: Value, size: Value,
) -> None:  # fmt: skip
    """tile_product that on its way asks for the first `size` bytes at two addresses: a cache line of each every four k."""

    def fetch(b: Builder, i: Value) -> None:
        place = b.mul(i, I64(LINE))
        place = b.select(b.icmp_signed("<", place, size), place, I64(0))
        for address in (one, other):
            prefetch(b, b.add(address, place), level=2)

    _product(b, more, rows, x, x_stride, first, second, panel_stride, count, y, y_stride, fetch)


def _product(
    b: Builder, more: Value, rows: Value, x: Value, x_stride: Value, first: Value, second: Value, panel_stride: Value, count: Value, y: Value, y_stride: Value, fetch: Fetch
) -> None:
    columns = [(panel, 4 * lane, 4 * (16 * g + lane)) for g, panel in enumerate((first, second)) for lane in range(0, GROUP, LANES)]

    def case(n: int) -> None:
        for start in range(0, len(columns), _VECTORS):
            part = columns[start : start + _VECTORS]
            panels = [at(b, panel, offset) for panel, offset, _ in part]
            _pass(b, n, more, x, x_stride, panels, panel_stride, count, [at(b, y, offset) for _, _, offset in part], y_stride, fetch)

    switch(b, rows, range(1, TILE_ROWS + 1), case)
