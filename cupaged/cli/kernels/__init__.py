"""`cupaged kernels`: the list of the CUDA kernels, and the commands that check them and run one of the user's own."""

from __future__ import annotations

import click

from cupaged.backends.occupancy import MULTIPROCESSORS
from cupaged.cli.lazy import LazyGroup

COMMANDS = {
    "check": "Whether a device computes every operation right.",
    "run": "Run a .cu file on the CPU, under the emulator's checks.",
}


@click.group(cls=LazyGroup, package="cupaged.cli.kernels", summaries=COMMANDS, invoke_without_command=True)
@click.option("--arch", "architectures", multiple=True, type=click.Choice(list(MULTIPROCESSORS)), help="Compile for this one; repeatable (default: all).")
@click.option("--all", "every", is_flag=True, help="Every variant of each kernel, not the one for bfloat16 and the largest heads (minutes).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a variant and architecture.")
@click.pass_context
def command(ctx: click.Context, architectures: tuple[str, ...], every: bool, as_json: bool) -> None:
    """List the CUDA kernels: what each does and, where CUDA's compiler is installed, what it takes of a GPU.

    That is registers of a thread, bytes of shared memory of a block (static + dynamic), spilled bytes, and how many blocks
    and warps of it a multiprocessor runs at once, with what runs out first. No GPU is needed.

    \b
    Examples:
      cupaged kernels
      cupaged kernels --arch sm_90 --all
      cupaged kernels check attention
      cupaged kernels run my_kernel.cu --block 128 --arg x=f32[1024] --arg out=f32[1024]:empty
    """
    if ctx.invoked_subcommand is None:
        from cupaged.cli.kernels import listing  # which loads CUDA's compiler, where there is one

        listing.show(architectures or tuple(MULTIPROCESSORS), every, as_json)
    elif architectures or every or as_json:
        raise click.UsageError(f"--arch, --all and --json belong to the list; {ctx.invoked_subcommand} does not take them", ctx)
