"""What the documentation shows and promises is so."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from cupaged.cli.main import run
from tests.support.kernels import skip_without_compiler

TESTS = Path(__file__).parent


def test_every_test_that_the_documentation_names_exists() -> None:
    text = (TESTS.parent / "docs" / "testing.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", text)
    assert len(named) > 20
    for file, name in named:
        source = (TESTS / file).read_text(encoding="utf-8")
        assert re.search(rf"^\s*(def|class) {name}\b", source, re.MULTILINE), f"{file} has no {name}"


def test_the_kernel_of_the_documentation_runs_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    skip_without_compiler()
    text = (TESTS.parent / "docs" / "kernels.md").read_text(encoding="utf-8")
    (source,), (command,) = re.findall(r"```cuda\n(.*?)```", text, re.DOTALL), re.findall(r"^cupaged (kernels run .*)$", text, re.MULTILINE)
    right, wrong = re.findall(r"```\n(y  float32.*?|error: .*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for content, code, shown in ((source, 0, right), (source.replace("if (i < n) ", ""), 1, wrong)):
        Path("saxpy.cu").write_text(content, encoding="utf-8")
        assert run(shlex.split(command)) == code
        captured = capsys.readouterr()
        assert captured.out + captured.err == shown
