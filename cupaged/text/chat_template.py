"""Chat templates: Jinja source that comes with a model and writes a conversation the way the model was trained on it.

Templates are foreign code, so they run in Jinja's immutable sandbox, with the names that Hugging Face's convention
promises them: messages, add_generation_prompt, tools, documents, the special tokens by name, the functions
raise_exception and strftime_now, loop controls, the `generation` tag, and a tojson that does not escape HTML.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cupaged.errors import ChatTemplateError, RequestError, shown


class ChatTemplate:
    """A chat template; compiled when it is first used, so that a broken one disturbs no one who does not chat."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: names to texts, as the template writes them: {"bos_token": "<s>", ...}."""
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as text, up to the point where the answer begins if `add_generation_prompt`.

        `variables` go to the template and win over the names it gets anyway. Raises RequestError for messages that are
        not {"role": text, "content": text}; ChatTemplateError for a template that is broken or refuses them.
        """
        names: dict[str, Any] = {
            "messages": _checked(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        template = self._template
        try:
            return template.render({**names, **self._special_tokens, **variables})
        except _Refusal as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {_one_line(error)}") from None
        except Exception as error:  # foreign code may raise anything
            raise ChatTemplateError(f"the chat template failed: {type(error).__name__}: {_one_line(error)}") from error

    @cached_property
    def _template(self) -> Template:
        try:
            return _environment().from_string(self.source)
        except TemplateError as error:
            line = f" at line {line}" if (line := getattr(error, "lineno", None)) else ""
            raise ChatTemplateError(f"the chat template is broken{line}: {_one_line(error)}") from error


class _Refusal(TemplateError):
    """A template called raise_exception."""


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks what the model wrote, for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError("messages must be a list of at least one {'role': ..., 'content': ...}")
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{position}] must have a role and a content, not be {type(message).__name__}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise RequestError(f"messages[{position}]: {key!r} must be a text, not {shown(message.get(key))}")
    return [dict(message) for message in messages]


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."
