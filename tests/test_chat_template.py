"""Chat templates: rendered as transformers renders them, in a sandbox, every fault one clear line."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cupaged.errors import ChatTemplateError, RequestError
from cupaged.text.chat_template import ChatTemplate
from tests.support.text import stored

CHATS = stored("text_chats.json")
USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: Any = USER, **variables: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **variables)


@pytest.mark.parametrize("case", CHATS["cases"], ids=lambda case: f"{case['template']}-{len(case['messages'])}-{case['add_generation_prompt']}")
def test_equals_transformers(case: dict[str, Any]) -> None:
    template = ChatTemplate(CHATS["templates"][case["template"]], CHATS["special_tokens"])
    arguments = (case["messages"], case["add_generation_prompt"])
    if "refused" in case:
        with pytest.raises(ChatTemplateError, match=f"the chat template refuses these messages: {case['refused']}"):
            template.render(*arguments, **case["extra"])
    else:
        assert template.render(*arguments, **case["extra"]) == case["text"]


def test_tools_and_other_variables_reach_the_template() -> None:
    assert render("{{ tools[0] | tojson }} {{ level }}", tools=[{"name": "größe"}], level=3) == '{"name": "größe"} 3'


def test_todays_date() -> None:
    assert re.fullmatch(r"\d{2} \w+ \d{4}", render("{{ strftime_now('%d %B %Y') }}"))


def test_the_caller_s_messages_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": "hi", "name": "Ann"}]
    assert render("{{ messages[0].name }}", messages) == "Ann"
    with pytest.raises(ChatTemplateError, match="SecurityError"):
        render("{{ messages[0].update({'role': 'x'}) }}", messages)
    assert messages == [{"role": "user", "content": "hi", "name": "Ann"}]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for message in messages %}", "the chat template is broken at line 1: "),
        ("a\n\n{{ messages[ }}", "the chat template is broken at line 3: "),
        ("{{ unknown.field }}", "failed: UndefinedError: 'unknown' is undefined"),
        ("{{ messages | no_such_filter }}", "broken at line 1: No filter named 'no_such_filter'"),
        ("{{ 1 // 0 }}", "failed: ZeroDivisionError"),
        ("{{ raise_exception('one\n   two') }}", "refuses these messages: one two$"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "failed: SecurityError"),
        ("{{ raise_exception.__globals__.items() }}", "failed: SecurityError"),
        ("{% for i in range(1000000000) %}{% endfor %}", "failed: OverflowError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "failed: RecursionError"),
        ("{{ open('/etc/passwd') }}", "failed: UndefinedError"),
        ("{% include 'other' %}", "failed: TypeError"),
        ("{{ messages | tojson | attr('format') }}{{ {}.x.y }}", "failed: UndefinedError"),
    ],
)
def test_faults_are_one_line(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message) as caught:
        render(source)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        ("hi", "must be a list"),
        (None, "must be a list"),
        ({"role": "user", "content": "hi"}, "must be a list"),
        (["hi"], r"messages\[0\] must have a role and a content, not be str"),
        ([*USER, {"role": "user"}], r"messages\[1\]: 'content' must be a text, not None"),
        ([{"content": "hi"}], r"messages\[0\]: 'role' must be a text, not None"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]: 'content' must be a text, not \["),
    ],
)
def test_messages_are_checked(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render("{{ messages }}", messages)
