"""`cupaged pull`: fetch models before they are needed."""

from __future__ import annotations

import click

from cupaged.cli.terminal import ProgressView, error_line
from cupaged.errors import HubError
from cupaged.hub import DEFAULT_MODEL, resolve_model


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
def command(names: tuple[str, ...]) -> None:
    """Fetch models (built-in names or hub ids), so that later commands need no network. Prints where each one lies.

    Without a NAME, the default model. Built-in models lie in $CUPAGED_CACHE, else in ~/.cache/cupaged.

    \b
    Examples:
      cupaged pull
      cupaged pull smollm2-135m-instruct Qwen/Qwen2.5-0.5B-Instruct
    """
    failed = False
    for name in names or (DEFAULT_MODEL,):
        try:
            with ProgressView() as progress:
                path = resolve_model(name, progress)
            click.echo(path)
        except HubError as error:
            error_line(error)
            failed = True
    if failed:
        raise click.exceptions.Exit(1)
