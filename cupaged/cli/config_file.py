"""The config file: TOML with the names of options, `block-size = 32` or `block_size = 32`, for every command.

It stands below the command line and the environment and above the defaults, which is the place click gives to a
context's default_map.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def default_path() -> Path:
    """$XDG_CONFIG_HOME/cupaged/config.toml, else ~/.config/cupaged/config.toml; a user without a home has no such file."""
    shared = os.environ.get("XDG_CONFIG_HOME", "")
    folder = shared if os.path.isabs(shared) else os.path.expanduser("~/.config")
    return Path(folder, "cupaged", "config.toml")


def read(path: Path, options: Sequence[click.Parameter]) -> dict[str, Any]:
    """Parameter name -> value as a default_map takes it. Raises UsageError for a broken file or an unknown name."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
        raise click.UsageError(f"{path}: not valid TOML: {error}") from error
    except OSError as error:
        raise click.UsageError(f"{path}: {error.strerror}") from error
    known = {_plain(name): option for option in options for name in (option.name or "", *option.opts)}
    defaults = {}
    for name, value in values.items():
        option = known.get(_plain(name))
        if option is None:
            close = difflib.get_close_matches(_plain(name), known, n=1)
            hint = f"; did you mean {close[0].replace('_', '-')!r}?" if close else ""
            raise click.UsageError(f"{path}: unknown option {name!r}{hint}")
        defaults[option.name or ""] = _as_typed(value, option)
    return defaults


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _as_typed(value: Any, option: click.Parameter) -> Any:
    """The value as text, the way a user would have typed it, so that an option reads both alike."""
    if getattr(option, "multiple", False):
        return [str(item) for item in (value if isinstance(value, list) else [value])]
    return str(value)
