"""The command line's door: which commands there are, and what each way of ending means to the shell.

    0 fine   1 failed   2 wrong usage   130 interrupted   141 the reader of our output went away

A command's module is imported when the command is called, so that `cupaged --version` imports little more than click.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Sequence

import click

from cupaged._version import __version__
from cupaged.cli.lazy import LazyGroup
from cupaged.errors import ConfigError, CupagedError

COMMANDS = {
    "generate": "Complete prompts: one, or many at once.",
    "chat": "Talk with a model.",
    "perplexity": "How well a model predicts a text.",
    "bench": "Measure the engine: prediction, run, verdict.",
    "pull": "Fetch models now, to use them offline.",
    "models": "List the built-in models.",
    "kernels": "List, check and try the CUDA kernels.",
    "warmup": "Compile the CPU's kernels now.",
    "plan": "What a machine would do with a model, on paper.",
    "simulate": "Serve a workload on a machine that is not here.",
}
FAILED, USAGE, INTERRUPTED, CLOSED_PIPE = 1, 2, 130, 141


@click.group(cls=LazyGroup, package="cupaged.cli", summaries=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cupaged", message="%(prog)s %(version)s")
def cli() -> None:
    """Run language models over a paged KV cache, on any computer.

    \b
      cupaged generate "The three primary colours are"
      cupaged chat
      cupaged generate --help
    """


def run(args: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; every failure has become one line on stderr.

    click's own `main` is not used: it has other ideas about a closed pipe and an interrupt.
    """
    _open_missing_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows "?", and the answer goes on
    try:
        try:
            with cli.make_context("cupaged", list(sys.argv[1:] if args is None else args)) as context:
                cli.invoke(context)
        finally:
            sys.stdout.flush()
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        newline = "\n" if sys.stderr.isatty() else ""  # the terminal has just written ^C
        click.echo(f"{newline}interrupted", err=True)
        return INTERRUPTED
    except CupagedError as error:
        click.echo(f"error: {error}", err=True)
        return USAGE if isinstance(error, ConfigError) else FAILED
    except BrokenPipeError:
        _discard_output()
        return CLOSED_PIPE
    except OSError as error:
        _discard_output()
        click.echo(f"error: {f'{error.filename}: ' if error.filename else ''}{error.strerror or error}", err=True)
        return FAILED
    return 0


def _open_missing_streams() -> None:
    """Give a process that was started with a stream closed (`>&-`) an empty one in its place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for the life of the process


def _discard_output() -> None:
    """stdout cannot be written: what is still buffered goes nowhere, or Python would complain once more at its end."""
    with contextlib.suppress(io.UnsupportedOperation):  # not a real file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """The console script."""
    code = run()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left to tidy up, and Python's own end would show a traceback
    sys.exit(code)
