"""`cupaged kernels run`: one launch of a kernel from a file, in the emulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click
import numpy as np
import numpy.typing as npt

import kernels_cu
from cupaged.backends import emu
from cupaged.cli.kernels.arguments import bind, sizes

Array = npt.NDArray[Any]


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("kernel", required=False)
@click.option("--grid", type=sizes, metavar="X[,Y[,Z]]", default="1", show_default=True, help="Blocks.")
@click.option("--block", type=sizes, metavar="X[,Y[,Z]]", default="32", show_default=True, help="Threads of a block.")
@click.option("--arg", "arguments", multiple=True, metavar="NAME=VALUE", help="An argument, by the parameter's name; repeatable.")
@click.option("-D", "macros", multiple=True, metavar="NAME[=VALUE]", help="A macro of the source; repeatable.")
@click.option("--shared", type=click.IntRange(0), default=0, metavar="BYTES", help="Dynamic shared memory of a block.")
@click.option("--mode", type=click.Choice(get_args(emu.Mode)), default="check", show_default=True, help="Under all checks, or fast.")
@click.option("--schedule", type=click.Choice(get_args(emu.Schedule)), default="forward", show_default=True, help="Which threads run first; depth finds most races.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of random arguments and of the random schedule.")
@click.option("--save", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER", help="Write every array that the kernel may change to FOLDER/NAME.npy.")
def command(
    file: Path, kernel: str | None, grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[str, ...], macros: tuple[str, ...], shared: int,
    mode: emu.Mode, schedule: emu.Schedule, seed: int, save: Path | None,
) -> None:  # fmt: skip
    """Run a kernel of a .cu file on the CPU, in the emulator, and show what it wrote.

    KERNEL, an extern "C" __global__ function, may be left out where the file has one. The file may include device.cuh,
    the helpers of cupaged's own kernels. A kernel that breaks a rule (reads what nobody wrote, leaves an array, races,
    ...) ends with one line that names source line, block and thread, and exit code 1.

    \b
    VALUE of --arg:
      f32[4,1024]         an array of random numbers (normal; integers 0 to 99)
      f32[1024]:empty     ... that nobody has written yet; also :zeros, :ones, :range
      i32:7  7  1e-5      a number; without a type it takes the parameter's
      data.npy            an array from a file
      none                a null pointer
    Types: f64 f32 f16 bf16 fp8 i64 i32 i16 i8 u64 u32 u16 u8 bool

    \b
    Example:
      cupaged kernels run saxpy.cu --grid 4 --block 256 \\
          --arg x=f32[1000] --arg y=f32[1000]:ones --arg a=2 --arg n=1000
    """
    text = kernels_cu.inlined(file.read_text(encoding="utf-8", errors="replace"), file.name)
    module = emu.Module(text, [f"-D{macro}" for macro in macros], name=file.name, mode=mode, schedule=schedule, seed=seed)
    if kernel is None and len(module.kernels) > 1:
        raise click.UsageError(f"{file.name} has several kernels, name one: {', '.join(module.kernels)}")
    function = module.get_function(kernel or module.kernels[0])
    values = bind(function.parameters, arguments, seed)
    function.max_dynamic_shared_size_bytes = shared
    function(grid, block, values, shared_mem=shared)
    for parameter, value in zip(function.parameters, values, strict=True):
        if parameter.kind == "P" and isinstance(value, np.ndarray):
            _show(parameter.name, value)
            if save is not None:
                _save(save / f"{parameter.name}.npy", value)
    click.echo(f"{function.name}: " + ("no rule was broken" if mode == "check" else "it ran, unchecked"))


def _show(name: str, array: Array) -> None:
    """A short view of an array; elements that nobody wrote are said to be so."""
    unwritten = int(np.count_nonzero(emu.never_written(array)))
    note = f", {unwritten} of them never written" if unwritten else ""
    click.echo(f"{name}  {array.dtype.name} {list(array.shape)}{note}")
    wide = array.astype(np.float32) if array.dtype.kind == "V" else array
    click.echo("  " + np.array2string(wide, threshold=20, edgeitems=3, precision=6, prefix="  "))


def _save(path: Path, array: Array) -> None:
    """NumPy's files know no bfloat16 and no fp8: these become float32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array.astype(np.float32) if array.dtype.kind == "V" else array)
