"""Vector code for the CPU kernels: LLVM IR written by small Python loops and called from Numba functions.

LLVM vectorises a plain loop well; what it cannot be brought to do is keep a tile of a product in registers and unpack
weights on the way there. Such inner parts are written here as IR over vectors of LANES float32 numbers: the widest of
the processor for which the code is compiled. LLVM turns the same IR into AVX-512, AVX2, NEON or SSE.

An `@emitter` function gets an IRBuilder and values, and writes straight-line code or loops with the helpers below. Its
caller, a Numba kernel, sees a function of integers (addresses in bytes, counts) and float32 numbers.
"""

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cupaged.backends.cpu_code import REGISTERS_WANTED

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
Builder = Any
Value = Any

IS_X86 = platform.machine().lower() in ("x86_64", "amd64", "x86", "i386", "i686")


def _registers() -> tuple[int, int]:
    if REGISTERS_WANTED:
        lanes, number = REGISTERS_WANTED.split(",")
        return int(lanes), int(number)
    features = llvmlite.binding.get_host_cpu_features()
    if features.get("avx512f"):
        return 16, 32
    return 8 if features.get("avx2") and features.get("fma") else 4, 16 if IS_X86 else 32


LANES, REGISTERS = _registers()
"""float32 numbers in a vector register of this processor, and how many registers there are."""


def emitter(literals: int = 0, returns: Any = types.void) -> Callable[[Callable[..., Any]], Any]:
    """Make `emit(builder, *literals, *values)` callable from a Numba function.

    The first `literals` arguments must be constants there and reach `emit` as Python integers; the others are int64 or
    float32 values. What `emit` returns is the call's result, of type `returns`.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def typed(context: Any, *arguments: Any) -> Any:
            constants = arguments[:literals]
            if not all(isinstance(argument, types.IntegerLiteral) for argument in constants):
                return None
            values = [argument if argument == types.float32 else types.int64 for argument in arguments[literals:]]
            numbers = [constant.literal_value for constant in constants]

            def generate(context: Any, builder: Builder, signature: Any, values: Sequence[Value]) -> Value:
                result = emit(builder, *numbers, *values[literals:])
                return context.get_dummy_value() if returns == types.void else result

            return returns(*constants, *values), generate

        names = ("context", *list(inspect.signature(emit).parameters)[1:])  # Numba wants a fixed number of arguments
        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        typed.__signature__ = inspect.Signature([inspect.Parameter(name, positional) for name in names])  # type: ignore[attr-defined]
        typed.__name__ = emit.__name__
        return intrinsic(prefer_literal=True)(typed)

    return decorate


# ---- values


def vector(element: Any, lanes: int) -> Any:
    return ir.VectorType(element, lanes)


def constant(element: Any, lanes: int, value: Any) -> Value:
    """All lanes alike."""
    return ir.Constant(vector(element, lanes), [value] * lanes)


def splat(b: Builder, scalar: Value, lanes: int) -> Value:
    one = b.insert_element(ir.Constant(vector(scalar.type, lanes), ir.Undefined), scalar, I32(0))
    return b.shuffle_vector(one, one, constant(I32, lanes, 0))


def shuffle(b: Builder, x: Value, y: Value, indices: Sequence[int]) -> Value:
    return b.shuffle_vector(x, y, ir.Constant(vector(I32, len(indices)), list(indices)))


def transposed(b: Builder, rows: Sequence[Value]) -> list[Value]:
    """The columns of n vectors of n lanes: vector c holds lane c of each. n is a power of two."""
    columns, n = list(rows), len(rows)
    for span in (1 << i for i in range(n.bit_length() - 1)):  # squares of 2 * span: their upper right and lower left change places
        for low in (i for i in range(n) if not i & span):
            x, y = columns[low], columns[low + span]
            columns[low] = shuffle(b, x, y, [n + lane - span if lane & span else lane for lane in range(n)])
            columns[low + span] = shuffle(b, x, y, [n + lane if lane & span else lane + span for lane in range(n)])
    return columns


def halves_sum(b: Builder, x: Value) -> Value:
    """The sum of a vector's lanes, the halves added to each other until one lane is left: a fixed order."""
    lanes = x.type.count
    while lanes > 1:
        lanes //= 2
        x = b.fadd(shuffle(b, x, x, range(lanes)), shuffle(b, x, x, range(lanes, 2 * lanes)))
    return b.extract_element(x, I32(0))


def intrinsic_call(b: Builder, name: str, result: Any, *arguments: Value) -> Value:
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(result, [a.type for a in arguments]), name)
    return b.call(function, arguments)


def _suffix(kind: Any) -> str:
    return f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"


def fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """x * y + z, rounded once."""
    return intrinsic_call(b, f"llvm.fma.{_suffix(x.type)}", x.type, x, y, z)


def maximum(b: Builder, x: Value, y: Value) -> Value:
    """The larger one, lane by lane; y where a lane is NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


# ---- memory


def at(b: Builder, address: Value, offset: int | Value) -> Value:
    if isinstance(offset, int):
        return b.add(address, I64(offset)) if offset else address
    return b.add(address, offset)


def _alignment(kind: Any) -> int:
    """That of a type's elements."""
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    return 2 if element == F16 else max(1, getattr(element, "width", 32) // 8)


def load(b: Builder, kind: Any, address: Value, offset: int | Value = 0) -> Value:
    """A value of a type; no alignment is assumed beyond that of its elements."""
    return b.load(b.inttoptr(at(b, address, offset), kind.as_pointer()), align=_alignment(kind))


def store(b: Builder, value: Value, address: Value, offset: int | Value = 0) -> None:
    b.store(value, b.inttoptr(at(b, address, offset), value.type.as_pointer()), align=_alignment(value.type))


def prefetch(b: Builder, address: Value, offset: int | Value = 0, level: int = 1) -> None:
    """Ask for the cache line at an address that need not be valid: into the first-level cache, the
    second (`level` 2), or, as it is used only once, where it displaces little (`level` 0)."""
    pointer = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    b.call(function, [b.inttoptr(at(b, address, offset), pointer), I32(0), I32((0, 3, 2)[level]), I32(1)])


# ---- control


def loop(b: Builder, count: Value, carried: Sequence[Value], body: Callable[[Value, list[Value]], Sequence[Value]]) -> list[Value]:
    """for i in range(count): carried = body(i, carried). Returns the last `carried`."""
    before, test, inside, done = b.block, *(b.append_basic_block() for _ in range(3))
    b.branch(test)
    b.position_at_end(test)
    i = b.phi(I64)
    held = [b.phi(value.type) for value in carried]
    b.cbranch(b.icmp_signed("<", i, count), inside, done)
    b.position_at_end(inside)
    new = list(body(i, list(held)))
    following = b.add(i, I64(1))
    for phi, first, again in zip([i, *held], [I64(0), *carried], [following, *new], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(again, b.block)
    b.branch(test)
    b.position_at_end(done)
    return held


def by_lanes(b: Builder, count: Value, body: Callable[[Value, int], None]) -> None:
    """Run body(first, lanes) for all of `count` numbers: LANES at a time, then one by one."""

    def run(first: Value, lanes: int) -> list[Value]:
        body(first, lanes)
        return []

    whole = b.udiv(count, I64(LANES))
    done = b.mul(whole, I64(LANES))
    loop(b, whole, [], lambda i, _: run(b.mul(i, I64(LANES)), LANES))
    loop(b, b.sub(count, done), [], lambda i, _: run(b.add(done, i), 1))


def switch(b: Builder, value: Value, cases: Sequence[int], body: Callable[[int], None]) -> None:
    """Run body(case) for the case that `value` equals; nothing if there is none."""
    done = b.append_basic_block()
    table = b.switch(value, done)
    for case in cases:
        block = b.append_basic_block()
        table.add_case(I64(case), block)
        b.position_at_end(block)
        body(case)
        b.branch(done)
    b.position_at_end(done)


# ---- functions


def exp(b: Builder, x: Value) -> Value:
    """e^x for x <= 0 within 2 ulp, never below e^-87, NaN of NaN: 2^n times a polynomial (the coefficients of Cephes' expf)."""
    lanes = x.type.count
    number = lambda value: constant(F32, lanes, value)  # noqa: E731
    x = maximum(b, number(-87.0), x)
    n = intrinsic_call(b, f"llvm.nearbyint.v{lanes}f32", x.type, b.fmul(x, number(1.4426950408889634)))
    r = fma(b, n, number(-0.693359375), x)
    r = fma(b, n, number(2.12194440e-4), r)
    p = number(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(b, p, r, number(coefficient))
    p = fma(b, p, b.fmul(r, r), b.fadd(r, number(1.0)))
    integers = vector(I32, lanes)
    power = b.shl(b.add(b.fptosi(n, integers), constant(I32, lanes, 127)), constant(I32, lanes, 23))
    return b.fmul(p, b.bitcast(power, x.type))


# ---- memory as Numba code sees it


def _pointer(kind: Any) -> Any:
    @intrinsic
    def pointer(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Builder, signature: Any, values: Sequence[Value]) -> Value:
            return builder.inttoptr(values[0], context.get_value_type(types.CPointer(kind)))

        return types.CPointer(kind)(types.int64), generate

    return pointer


pointer_to_float32 = _pointer(types.float32)
"""An address as a pointer, for numba.carray."""
pointer_to_float64 = _pointer(types.float64)
pointer_to_int32 = _pointer(types.int32)
pointer_to_int64 = _pointer(types.int64)
pointer_to_uint8 = _pointer(types.uint8)


@emitter(returns=types.int64)
def word(b: Builder, address: Value, index: Value) -> Value:
    """The int64 number `index` of a table."""
    return load(b, I64, b.add(address, b.mul(index, I64(8))))


@emitter()
def set_word(b: Builder, address: Value, index: Value, value: Value) -> None:
    b.store(value, b.inttoptr(b.add(address, b.mul(index, I64(8))), I64.as_pointer()), align=1)


@emitter(returns=types.float32)
def float_at(b: Builder, address: Value, index: Value) -> Value:
    """The float32 in the low half of word `index` of a table."""
    return load(b, F32, b.add(address, b.mul(index, I64(8))))


# ---- between threads


@emitter(returns=types.int64)
def atomic_add(b: Builder, address: Value, value: Value) -> Value:
    """Add to an int64 and return what it was."""
    return b.atomic_rmw("add", b.inttoptr(address, I64.as_pointer()), value, "seq_cst")


@emitter(returns=types.int64)
def atomic_load(b: Builder, address: Value) -> Value:
    return b.load_atomic(b.inttoptr(address, I64.as_pointer()), "seq_cst", 8)


@emitter()
def atomic_store(b: Builder, address: Value, value: Value) -> None:
    b.store_atomic(value, b.inttoptr(address, I64.as_pointer()), "seq_cst", 8)


@emitter()
def spin_hint(b: Builder) -> None:
    """Tell the processor that this thread waits in a loop."""
    if IS_X86:
        intrinsic_call(b, "llvm.x86.sse2.pause", ir.VoidType())
    elif platform.machine().lower() in ("aarch64", "arm64"):
        intrinsic_call(b, "llvm.aarch64.hint", ir.VoidType(), I32(1))


@emitter()
def call_kernel(b: Builder, function: Value, member: Value, operation: Value) -> None:
    """Call a compiled kernel, void(int64 member, int64 operation), by its address."""
    kind = ir.FunctionType(ir.VoidType(), [I64, I64])
    b.call(b.inttoptr(function, kind.as_pointer()), [member, operation])
