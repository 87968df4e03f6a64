"""The arguments of a kernel as a command line spells them: x=f32[1024], n=1024, y=data.npy."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupaged.backends import emu
from cupaged.backends.emu.launch import DTYPES, Parameter

TYPES: dict[str, Any] = {
    "f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "fp8": ml_dtypes.float8_e4m3fn, "bool": np.bool_,
    "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
}  # fmt: skip
FILLS = ("random", "empty", "zeros", "ones", "range")

_ARRAY = re.compile(r"(?P<type>\w+)\[(?P<shape>\d+(?:,\d+)*)\](?::(?P<fill>\w+))?")
_SCALAR = re.compile(r"(?:(?P<type>\w+):)?(?P<number>[-+]?(?:[\d.]+(?:[eE][-+]?\d+)?|inf|nan))")

Value = npt.NDArray[Any] | np.generic | None


def sizes(text: str) -> tuple[int, ...]:
    """Of a grid or a block: "2" or "2,1,1"."""
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not one to three whole numbers, such as 128 or 4,2") from None


def bind(parameters: Sequence[Parameter], given: Sequence[str], seed: int) -> list[Value]:
    """The arguments in the kernel's order. Raises click.UsageError, naming what is missing, unknown or not understood."""
    texts = dict(text.partition("=")[::2] for text in given)
    names = [p.name for p in parameters]
    listed = ", ".join(described(p) for p in parameters) or "none"
    for what, wrong in (("is missing", [n for n in names if n not in texts]), ("does not exist", [n for n in texts if n not in names])):
        if wrong:
            raise click.UsageError(f"--arg {wrong[0]}=... {what}; the kernel's parameters: {listed}")
    rng = np.random.default_rng(seed)
    return [_value(p, texts[p.name], rng) for p in parameters]


def described(parameter: Parameter) -> str:
    """As C would declare it, in NumPy's types."""
    dtype = (DTYPES.get(parameter.type) or ("any",))[0]
    return {"P": f"{dtype}* ", "C": f"const {dtype}* ", "S": f"{dtype} "}[parameter.kind] + parameter.name


def _value(parameter: Parameter, text: str, rng: np.random.Generator) -> Value:
    array, scalar, label = _ARRAY.fullmatch(text), _SCALAR.fullmatch(text), f"{parameter.name}={text}"
    if text == "none":
        return None
    if text.endswith(".npy"):
        return _loaded(parameter, Path(text))
    if array:
        shape, dtype = tuple(int(size) for size in array["shape"].split(",")), _dtype(array["type"], label)
        try:
            return _filled(shape, dtype, array["fill"] or "random", rng)
        except (MemoryError, OSError, ValueError) as error:
            raise click.BadParameter(f"{label} cannot be made: {error}") from None
    if scalar:
        dtype = _dtype(scalar["type"], label) if scalar["type"] else np.dtype((DTYPES.get(parameter.type) or ("int32",))[0])
        return _number(dtype, scalar["number"], label)
    raise click.BadParameter(f"{label} is none of f32[1024], f32[4,256]:empty, i32:7, 7, data.npy, none")


def _dtype(name: str, label: str) -> np.dtype[Any]:
    if name not in TYPES:
        raise click.BadParameter(f"{label}: there is no type {name}; there are {', '.join(TYPES)}")
    dtype: np.dtype[Any] = np.dtype(TYPES[name])
    return dtype


def _number(dtype: np.dtype[Any], number: str, label: str) -> np.generic:
    try:
        value: np.generic = dtype.type(int(number) if dtype.kind in "iu" else float(number))
    except (ValueError, OverflowError):
        raise click.BadParameter(f"{label}: {number} is no {dtype.name}") from None
    return value


def _filled(shape: tuple[int, ...], dtype: np.dtype[Any], fill: str, rng: np.random.Generator) -> npt.NDArray[Any]:
    if fill == "empty":
        return emu.empty(shape, dtype)
    if fill in ("zeros", "ones"):
        return emu.array(np.full(shape, fill == "ones").astype(dtype))
    if fill == "range":
        return emu.array(np.arange(math.prod(shape)).reshape(shape).astype(dtype))
    if fill == "random":
        numbers = rng.integers(0, 2 if dtype.kind == "b" else 100, shape) if dtype.kind in "iub" else rng.standard_normal(shape)
        return emu.array(numbers.astype(dtype))
    raise click.BadParameter(f"an array can be {', '.join(FILLS)}; not {fill}")


def _loaded(parameter: Parameter, path: Path) -> npt.NDArray[Any]:
    """A file's array. NumPy's files know no bfloat16 and no fp8: floats become what the kernel wants."""
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{path} cannot be read as an array: {error}") from None
    wanted = (DTYPES.get(parameter.type) or (array.dtype.name,))[0]
    return emu.array(array, np.dtype(wanted) if array.dtype.kind == "f" and np.dtype(wanted).kind in "fV" else array.dtype)
