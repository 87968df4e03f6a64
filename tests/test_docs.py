"""What docs/testing.md promises exists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_test_that_the_documentation_names_exists() -> None:
    text = (TESTS.parent / "docs" / "testing.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", text)
    assert len(named) > 20
    for file, name in named:
        source = (TESTS / file).read_text(encoding="utf-8")
        assert re.search(rf"^\s*(def|class) {name}\b", source, re.MULTILINE), f"{file} has no {name}"
