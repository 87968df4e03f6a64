"""KernelSpec: a kernel's parameters, declared once. Checks, grid, shared memory, scalars and documentation come from it.

    SILU_MUL = KernelSpec(
        "silu_mul", "out = silu(gate) * up",
        read("gate_up", "ACT_T", "rows, 2 * width"),
        write("out", "ACT_T", "rows, width"),
        scalar("width"),
        grid="rows, ceil_div(width, 1024)", block=256,
    )
    device.launch(SILU_MUL.bind(gate_up=x, out=y))

A shape is a list of expressions. A bare name is a symbol: the first array that has it says what it is, the others must
agree; a compound expression is computed and must agree. A scalar that is such a symbol is filled in, another one is an
argument of `bind` (and a symbol too, if it is a whole number). A data type in capitals is a macro of the kernel's
source: what the arrays hold decides which variant is compiled.

`bind` gives a Launch, a value: what a device needs to run the kernel once, now or later.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

import numpy as np

from cupaged.errors import InvariantError

C_TYPES = {
    "float32": "float",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float8_e4m3fn": "__nv_fp8_e4m3",
    "int32": "int",
    "int64": "int64_t",
    "uint64": "uint64_t",
    "uint8": "uint8_t",
}
"""NumPy's names of the types that kernels know, and the names in CUDA C."""

_FLOATS = ("float32", "float16", "bfloat16")
_EIGHT_BITS = "float8_e4m3fn"  # or uint8, where a library of arrays has no such type
MACRO_TYPES = {"ACT_T": _FLOATS, "OUT_T": _FLOATS, "WEIGHT_T": _FLOATS, "KV_T": (*_FLOATS, _EIGHT_BITS)}
"""What the arrays of a type macro may hold: activations, results, stored weights, keys and values in the cache."""

LARGEST_GRID = (2**31 - 1, 65535, 65535)
"""CUDA C Programming Guide, table of technical specifications."""


_NUMBERS: dict[str, tuple[type[np.generic], tuple[int, int] | None]] = {
    "int32": (np.int32, (-(2**31), 2**31 - 1)),
    "int64": (np.int64, (-(2**63), 2**63 - 1)),
    "float32": (np.float32, None),
}
"""What a scalar may be, and the smallest and largest whole number of it."""


@cache
def _type_name(dtype: np.dtype[Any]) -> str:
    name: str = dtype.name  # which NumPy puts together each time
    return name


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of a kernel. `shape` is None for a scalar; `written`: the kernel changes the array."""

    name: str
    dtype: str
    shape: tuple[str, ...] | None = None
    written: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}" + ("" if self.shape is None else f" [{', '.join(self.shape)}]")


def read(name: str, dtype: str, shape: str) -> Parameter:
    """An array that the kernel only reads."""
    return Parameter(name, dtype, _split(shape))


def write(name: str, dtype: str, shape: str) -> Parameter:
    """An array that the kernel writes (and may read)."""
    return Parameter(name, dtype, _split(shape), written=True)


def scalar(name: str, dtype: str = "int32") -> Parameter:
    return Parameter(name, dtype)


def _split(expressions: str) -> tuple[str, ...]:
    """Comma-separated expressions, one by one; a comma in parentheses separates nothing."""
    parsed = ast.parse(f"({expressions},)", mode="eval").body
    assert isinstance(parsed, ast.Tuple)
    return tuple(ast.unparse(element) for element in parsed.elts)


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with its macros set: what is compiled, once.

    source   a .cu file of kernels_cu
    kernel   the function in it
    macros   (name, value) of every -D
    """

    source: str
    kernel: str
    macros: tuple[tuple[str, str], ...]

    @property
    def options(self) -> tuple[str, ...]:
        """As a compiler's command line wants the macros."""
        return tuple(f"-D{name}={value}" for name, value in self.macros)


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One run of a kernel: everything but the device. `arguments` are arrays and NumPy scalars, in the kernel's order."""

    variant: Variant
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: tuple[Any, ...]
    shared_bytes: int

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do: a grid without a block."""
        return 0 in self.grid


class KernelSpec:
    """A kernel's declaration; see the module's docstring.

    name, about   the function's name in the .cu file, and a line for people
    parameters    in the kernel's order
    grid          one to three expressions over the symbols; `ceil_div(a, b)` and `max(a, b)` may be used
    block         threads of a block
    shared        bytes of dynamic shared memory, an expression
    macros        symbols that the source wants as -D numbers, in capitals ("head_dim" becomes HEAD_DIM), and the values it
                  is written for; one that no shape defines is an argument of `bind`
    types         type macros that may be less than MACRO_TYPES says
    registers     the most that a thread may take: more, and fewer blocks share a multiprocessor than planned
    source        the .cu file, where it is not named like the kernel
    """

    def __init__(
        self,
        name: str,
        about: str,
        *parameters: Parameter,
        grid: str,
        block: int,
        shared: str = "0",
        macros: Mapping[str, tuple[int, ...]] | None = None,
        types: Mapping[str, tuple[str, ...]] | None = None,
        registers: int = 64,
        source: str | None = None,
    ) -> None:
        self.name, self.about, self.parameters, self.block = name, about, parameters, block
        self.source = source or f"{name}.cu"
        self.macros, self.registers = dict(macros or {}), registers
        self.grid, self.shared = _split(grid), shared
        used = sorted({p.dtype for p in parameters if p.dtype in MACRO_TYPES})
        self.types: dict[str, tuple[str, ...]] = {name: MACRO_TYPES[name] for name in used} | dict(types or {})
        self._arrays = [p for p in parameters if p.shape is not None]
        self._symbols = {e for p in self._arrays for e in p.shape or () if e.isidentifier()}
        self._names = {p.name for p in parameters} | set(self.macros)
        self._needed = self._names - (self._symbols - {p.name for p in self._arrays})
        expressions = [*self.grid, shared, *(e for p in self._arrays for e in p.shape or ())]
        self._code: dict[str, CodeType] = {e: compile(e, name, "eval") for e in expressions}

    def __str__(self) -> str:
        """The declaration as documentation: name, grid, parameters, one a line."""
        head = f"{self.name}<<<({', '.join(self.grid)}), {self.block}>>>  {self.about}"
        return "\n".join([head, *(f"    {'writes' if p.written else 'reads' if p.shape is not None else 'scalar':7}{p}" for p in self.parameters)])

    def bind(self, **arguments: Any) -> Launch:
        """Check the arguments, by name, against the declaration.

        Raises InvariantError, naming the parameter and what it wants, for a wrong type, shape, layout or number.
        """
        for what, wrong in (("lacks", self._needed - set(arguments)), ("does not take", set(arguments) - self._names)):
            if wrong:
                raise InvariantError(f"{self.name} {what} {', '.join(sorted(wrong))}")
        symbols = {name: int(value) for name, value in arguments.items() if isinstance(value, (int, np.integer))}
        types = self._check_arrays(arguments, symbols)
        grid = tuple(self._evaluate(e, symbols) for e in self.grid)
        for size, most, expression in zip(grid, LARGEST_GRID, self.grid, strict=False):
            if not 0 <= size <= most:
                raise InvariantError(f"{self.name}: {expression} = {size} blocks, more than the {most} of a grid")
        for name, values in self.macros.items():
            if symbols[name] not in values:
                raise InvariantError(f"{self.name} is built for {name} {', '.join(map(str, values))}; not {symbols[name]}")
        return Launch(
            self.variant(types, symbols),
            grid,
            (self.block,),
            tuple(arguments[p.name] if p.shape is not None else self._number(p, arguments.get(p.name, symbols.get(p.name))) for p in self.parameters),
            self.shared_bytes(symbols),
        )

    def variant(self, types: Mapping[str, str], numbers: Mapping[str, int]) -> Variant:
        """The variant for these types (by NumPy's names) and values of the macros; more of either does not matter."""
        macros = [(name, C_TYPES[types[name]]) for name in self.types]
        macros += [(name.upper(), str(numbers[name])) for name in self.macros]
        return Variant(self.source, self.name, tuple(macros))

    def shared_bytes(self, numbers: Mapping[str, int]) -> int:
        """Dynamic shared memory of a block, for these values of the symbols that it depends on."""
        return self._evaluate(self.shared, numbers)

    def _check_arrays(self, arguments: Mapping[str, Any], symbols: dict[str, int]) -> dict[str, str]:
        """Bind the symbols that shapes define; the type that stands behind every type macro."""
        types: dict[str, str] = {}
        for p in self._arrays:
            array, shape = arguments[p.name], p.shape or ()
            if not hasattr(array, "dtype") or len(array.shape) != len(shape):
                raise self._wrong(p, array, symbols)
            allowed = self.types.get(p.dtype, (p.dtype,))
            held = _type_name(array.dtype)
            if held == "uint8" and _EIGHT_BITS in allowed:
                held = _EIGHT_BITS
            if held not in allowed or types.setdefault(p.dtype, held) != held:
                raise self._wrong(p, array, symbols)
            for expression, size in zip(shape, array.shape, strict=True):
                if expression.isidentifier():
                    symbols.setdefault(expression, size)
        for p in self._arrays:
            array = arguments[p.name]
            if tuple(self._evaluate(e, symbols) for e in p.shape or ()) != tuple(array.shape):
                raise self._wrong(p, array, symbols)
            if not array.flags.c_contiguous:
                raise InvariantError(f"{self.name}: {p} must be contiguous; its strides are {array.strides}")
        return types

    def _wrong(self, p: Parameter, array: Any, symbols: Mapping[str, int]) -> InvariantError:
        names = {name for e in p.shape or () for name in self._code[e].co_names if name in symbols}
        where = ", ".join(f"{name} = {symbols[name]}" for name in sorted(names))
        choice = f" ({' or '.join(self.types[p.dtype])}, the same wherever it stands)" if p.dtype in self.types else ""
        got = f"{array.dtype.name} {list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__
        return InvariantError(f"{self.name} wants {p}{choice}{' with ' if where else ''}{where}; got {got}")

    def _number(self, p: Parameter, value: Any) -> np.generic:
        """The scalar in the width that the kernel takes: a Python number would be passed as 8 bytes."""
        kind, limits = _NUMBERS[p.dtype]
        fits = isinstance(value, (int, np.integer)) and limits[0] <= value <= limits[1] if limits else isinstance(value, (int, float, np.number))
        if not fits:
            raise InvariantError(f"{self.name} wants {p}; got {value!r}")
        number: np.generic = kind(value)
        return number

    def _evaluate(self, expression: str, symbols: Mapping[str, int]) -> int:
        try:
            return int(eval(self._code[expression], {"__builtins__": {}, "ceil_div": ceil_div, "max": max}, symbols))
        except NameError as error:
            raise InvariantError(f"{self.name}: {expression} cannot be computed: {error}") from error
