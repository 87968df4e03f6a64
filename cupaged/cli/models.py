"""`cupaged models`: the built-in models, and which of them are on this machine."""

from __future__ import annotations

import json

import click

from cupaged.hub import ALIASES, DEFAULT_MODEL, alias_path, is_cached


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object a model.")
def command(as_json: bool) -> None:
    """List the built-in models. A folder, a .gguf file or a hub id is as good a --model.

    \b
    Examples:
      cupaged models
      cupaged models --json
    """
    if as_json:
        for name, alias in ALIASES.items():
            row = {"name": name, "size": alias.size, "licence": alias.licence, "cached": is_cached(name)}
            click.echo(json.dumps(row | {"path": str(alias_path(name))}))
        return
    table = [("name", "size", "licence", "cached", "path")]
    for name, alias in ALIASES.items():
        label = f"{name} (default)" if name == DEFAULT_MODEL else name
        here = is_cached(name)
        table.append((label, f"{alias.size / 1e6:.1f} MB", alias.licence, "yes" if here else "no", str(alias_path(name)) if here else "-"))
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for line in table:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
