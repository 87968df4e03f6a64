"""Where prompts come from: an argument, standard input, a file of lines, a file of JSON objects.

A line that cannot be used becomes a Job with an error, so that the others still run.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from cupaged.errors import RequestError

Message = dict[str, str]
_KINDS = ("prompt", "messages", "prompt_token_ids")


@dataclass(frozen=True)
class Job:
    """One request: a text, token ids or chat messages, and the parameters of its own.

    source   where it stands, "prompts.jsonl:3"; "" for a single prompt
    params   names and values as they were written; SamplingParams or BeamSearchParams checks them
    salt     the cache salt of its own, or None
    error    why it cannot run, or None
    """

    source: str
    prompt: str | list[int] | list[Message] = ""
    params: dict[str, Any] = field(default_factory=dict)
    salt: str | None = None
    error: str | None = None


def decode(data: bytes, name: str) -> str:
    """UTF-8 to text, without a byte order mark. Raises RequestError naming the first wrong byte."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not valid UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}") from error


def source_name(path: Path) -> str:
    """How errors name a file; "-" is standard input."""
    return "standard input" if str(path) == "-" else str(path)


def read_text(path: Path) -> str:
    """A whole file as text."""
    return decode(sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes(), source_name(path))


def single(argument: str | None) -> Job:
    """The prompt given as an argument, or standard input where that is "-" or absent."""
    if argument is not None and argument != "-":
        try:
            argument.encode("utf-8")
        except UnicodeEncodeError as error:  # Python hides an argument's wrong bytes in surrogates
            raise RequestError(f"the prompt is not valid UTF-8 at character {error.start}") from error
        return Job("", argument)
    if argument is None and sys.stdin.isatty():
        raise click.UsageError("no prompt: give one as an argument, on standard input or with --file")
    text = read_text(Path("-"))
    if not text.strip():
        raise RequestError("standard input is empty: there is no prompt")
    return Job("", text.removesuffix("\n").removesuffix("\r"))


def from_file(path: Path) -> list[Job]:
    """One job a line that is not blank: JSON objects if the first is one or the name ends in .jsonl, else texts."""
    name, text = source_name(path), read_text(path)
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise RequestError(f"{name} holds no prompt")
    as_json = path.suffix.lower() in (".jsonl", ".ndjson") or _is_object(lines[0][1])
    return [_from_json(f"{name}:{number}", line) if as_json else Job(f"{name}:{number}", line) for number, line in lines]


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _from_json(source: str, line: str) -> Job:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        return Job(source, error=f"not valid JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
        return Job(source, error=f"not usable JSON: {error}")
    if not isinstance(values, dict):
        return Job(source, error="a line must be a JSON object")
    kinds = [kind for kind in _KINDS if kind in values]
    if len(kinds) != 1:
        return Job(source, error=f"exactly one of {', '.join(_KINDS)} is needed, not {len(kinds)}")
    prompt = values.pop(kinds[0])
    if wrong := _wrong(kinds[0], prompt):
        return Job(source, error=wrong)
    salt = values.pop("cache_salt", None)
    if salt is not None and not isinstance(salt, str):
        return Job(source, error="cache_salt must be a string")
    return Job(source, prompt, values, salt)


def _wrong(kind: str, value: Any) -> str | None:
    """Why a value is not a prompt of its kind, or None."""
    if kind == "prompt":
        return None if isinstance(value, str) else "prompt must be a string"
    if not isinstance(value, list) or not value:
        return f"{kind} must be a list that is not empty"
    if kind == "prompt_token_ids":
        whole = all(isinstance(item, int) and not isinstance(item, bool) for item in value)
        return None if whole else "prompt_token_ids must be whole numbers"
    for item in value:
        if not isinstance(item, dict) or not all(isinstance(item.get(key), str) for key in ("role", "content")):
            return 'messages must be objects with the strings "role" and "content"'
    return None
