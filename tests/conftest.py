"""Fixtures shared by all tests, and the switches that decide what a skip means.

--require-model  the real SmolLM2 file must be there: its tests fail instead of skipping
--slow           also run the proofs marked slow
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "golden"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-model", action="store_true", help="fail, not skip, without the SmolLM2 model")
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


@pytest.fixture(scope="session")
def smollm2_path(request: pytest.FixtureRequest) -> Path:
    """The cached file of the default model: `cupaged pull` puts it there."""
    root = os.environ.get("CUPAGED_CACHE")
    cache = Path(root) if root else Path.home() / ".cache" / "cupaged"
    path = cache / "models" / "smollm2-135m-instruct" / MODEL_FILE
    if not path.is_file():
        message = "the SmolLM2 model is not in the cache: run `cupaged pull smollm2-135m-instruct`"
        if request.config.getoption("--require-model"):
            pytest.fail(message)
        pytest.skip(message)
    return path


def golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))
