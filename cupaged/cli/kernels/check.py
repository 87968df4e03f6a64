"""`cupaged kernels check`: the conformance cases on a device."""

from __future__ import annotations

import time
from typing import get_args

import click

from cupaged import conformance
from cupaged.backends.emu import Mode
from cupaged.cli.terminal import ProgressView

SHOWN = 20
"""Failures that are told; the rest are counted."""


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--device", type=click.Choice(list(conformance.STORED_TYPES)), default="emu", show_default=True, help="What computes: emu runs the CUDA kernels on the CPU.")
@click.option("--mode", type=click.Choice(get_args(Mode)), default="check", show_default=True, help="Of emu: look at every access and barrier (check), or only at results (fast).")
def command(names: tuple[str, ...], device: str, mode: Mode) -> None:
    """Check that a device computes every operation right, in every type that it stores. NAMEs are operations: attention.

    Results are compared with formulas in float64; lengths lie around the edges of blocks, memory that nobody wrote holds
    NaN, and nothing around a result may change. Under emu every kernel also runs under the emulator's checks: bounds,
    alignment, uninitialised memory, races, barriers, overflow. The first run compiles the kernels.

    Prints a line for each failure, and one at the end. Exit code 1 if anything failed.

    \b
    Examples:
      cupaged kernels check
      cupaged kernels check attention rope_and_cache
      cupaged kernels check --device cpu
    """
    started, ran, failures = time.monotonic(), 0, 0
    parts = conformance.plan(device, names)
    with ProgressView() as progress:
        for part in parts:
            subject = conformance.open_subject(device, part.dtype, part.kv_dtype, threads=None, mode=mode, announce=lambda line: progress(line, 0, 0))
            for done, case in enumerate(part.cases):
                progress(f"{device}, {part}: {case.operation}", done, len(part.cases))
                what, ran = conformance.failure(case, subject), ran + 1
                if what is not None:
                    failures += 1
                    if failures <= SHOWN:
                        with progress.paused():
                            click.echo(f"{part}: {case}: {what}")
    ended = f"{ran} checks of {device} in {time.monotonic() - started:.0f} s"
    click.echo(f"{ended}: {failures} failed" if failures else f"{ended}: all passed")
    if failures:
        raise click.exceptions.Exit(1)
