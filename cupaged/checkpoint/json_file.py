"""Reading a JSON object from a model's folder; damage becomes one line that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cupaged.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a UTF-8 JSON file. Raises CheckpointError if it cannot be read or holds something else."""
    try:
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None


def parse_json(text: bytes, origin: str) -> dict[str, Any]:
    """The object in `text`. Raises CheckpointError, which names `origin`."""
    try:
        value = json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise CheckpointError(f"{origin} is not UTF-8 text") from None
    except ValueError as error:  # JSONDecodeError, or a number too long to convert
        raise CheckpointError(f"{origin} is not valid JSON: {error}") from None
    except RecursionError:
        raise CheckpointError(f"{origin} is not valid JSON: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{origin} holds a JSON {type(value).__name__}, not an object")
    return value
