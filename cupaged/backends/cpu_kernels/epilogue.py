"""What follows a product, done on the way: the epilogue of a tile whose sums are whole.

    PLAIN   y = sums + bias
    ADD     y += sums + bias
    SILU    y = silu(gate) * up          a tile's two groups are 16 columns of the gate and the same ones of up; so are
                                         the sums, and the halves of the bias
"""

from __future__ import annotations

from functools import reduce

from cupaged.backends.cpu_formats import GROUP, TILE_COLUMNS
from cupaged.backends.cpu_gemm import ADD, BIAS, EPILOGUE, SILU, Y_STRIDE, N, Y
from cupaged.backends.cpu_kernels.ir import (
    F32,
    I64,
    Builder,
    Value,
    at,
    by_lanes,
    constant,
    emitter,
    exp,
    intrinsic_call,
    load,
    loop,
    store,
    switch,
    vector,
    word,
)
from cupaged.backends.cpu_kernels.jit import kernel


def _silu_mul(b: Builder, gate: Value, up: Value) -> Value:
    """silu(gate) * up."""
    kind, lanes = gate.type, gate.type.count
    one = constant(F32, lanes, 1.0)
    e = exp(b, b.fneg(intrinsic_call(b, f"llvm.fabs.v{lanes}f32", kind, gate)))  # of -|gate|: never overflows
    above = b.select(b.fcmp_ordered(">=", gate, constant(F32, lanes, 0.0)), one, e)
    return b.fmul(b.fmul(gate, b.fdiv(above, b.fadd(one, e))), up)


@emitter()
def _finish(
    b: Builder, sums: Value, sums_stride: Value, rows: Value, epilogue: Value, bias: Value, up_bias: Value, width: Value, y: Value, y_stride: Value
) -> None:
    """The epilogue of a tile: sums [rows][32] to `width` columns of y. All addresses are of the tile's first number; bias 0: there is none."""

    def case(number: int) -> None:
        epilogue, biased = divmod(number, 2)

        def some(first: Value, lanes: int) -> None:
            kind, offset = vector(F32, lanes), b.mul(first, I64(4))
            terms = [load(b, kind, bias, offset)] if biased else []
            up_terms = [load(b, kind, up_bias, offset)] if biased and epilogue == SILU else []

            def row(r: Value, _: list[Value]) -> list[Value]:
                source = b.add(at(b, sums, offset), b.mul(r, sums_stride))
                target = b.add(at(b, y, offset), b.mul(r, y_stride))
                result = reduce(b.fadd, terms, load(b, kind, source))
                if epilogue == SILU:
                    result = _silu_mul(b, result, reduce(b.fadd, up_terms, load(b, kind, source, 4 * GROUP)))
                store(b, b.fadd(load(b, kind, target), result) if epilogue == ADD else result, target)
                return []

            loop(b, rows, [], row)

        by_lanes(b, width, some)

    has_bias = b.zext(b.icmp_signed("!=", bias, I64(0)), I64)
    switch(b, b.add(b.mul(epilogue, I64(2)), has_bias), range(6), case)


@kernel
def finish_tile(operation: int, row: int, rows: int, tile: int, sums: int, sums_stride: int) -> None:
    """The epilogue of the tile's rows from `row` on, whose sums [rows][32] are whole."""
    epilogue, columns, bias = word(operation, EPILOGUE), word(operation, N), word(operation, BIAS)
    width = GROUP if epilogue == SILU else TILE_COLUMNS
    column = tile * width
    own_bias = bias + 4 * column if bias != 0 else 0
    y_stride = word(operation, Y_STRIDE)
    y = word(operation, Y) + row * y_stride + 4 * column
    _finish(sums, sums_stride, rows, epilogue, own_bias, own_bias + 4 * columns, min(width, columns - column), y, y_stride)
