"""`cupaged warmup`: compile the CPU's kernels before they are needed."""

from __future__ import annotations

import click

from cupaged.model_loader import compile_kernels, kernel_folder


@click.command()
@click.argument("formats", metavar="[FORMAT]...", nargs=-1)
def command(formats: tuple[str, ...]) -> None:
    """Compile the CPU's kernels and keep them, so that no later start has to wait for a compiler.

    FORMAT is how weights are kept: float32, float16, bfloat16, q8_0 (also --dtype int8), q4_0, q4_1, q5_0, q5_1, q4_k,
    q5_k or q6_k; by default all of them. Widths of the KV cache are always compiled. Kernels lie in $CUPAGED_CACHE, else
    in ~/.cache/cupaged, in a folder for this version and this processor.

    \b
    Examples:
      cupaged warmup
      cupaged warmup q4_1 q8_0
    """
    folder, sets = kernel_folder(), compile_kernels(formats)
    click.echo("compiling what is missing of the CPU kernels (all of them: under a minute)", err=True)
    compiled, seconds = 0, 0.0
    for kernels in sets:
        if kernels.compiled:
            click.echo(f"{kernels.name}: {kernels.compiled} in {kernels.seconds:.1f} s", err=True)
        compiled, seconds = compiled + kernels.compiled, seconds + kernels.seconds
    done = f"{compiled} kernels compiled in {seconds:.0f} s" if compiled else "all kernels were there"
    click.echo(f"{done}: {folder}")
