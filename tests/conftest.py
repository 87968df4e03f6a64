"""Fixtures shared by all tests, and the switches that decide what a skip means.

--require-model     the real SmolLM2 file must be there: its tests fail instead of skipping
--require-compiler  a C++ compiler must be there, so that no test of the emulated CUDA kernels skips
--require-nvrtc     CUDA's compiler must be there, so that no test of what it makes of the kernels skips
--require-gpu       a GPU must be there, so that no test marked gpu skips
--slow              also run the proofs marked slow
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from cupaged.hub import DEFAULT_MODEL, alias_path, is_cached
from tests.support import kernels

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # started in the background, where shells ignore Ctrl-C and every child inherits that
    signal.signal(signal.SIGINT, signal.default_int_handler)

GOLDEN = Path(__file__).parent / "golden"


def pytest_configure(config: pytest.Config) -> None:
    kernels.required.update(what for what in ("compiler", "nvrtc", "gpu") if config.getoption(f"--require-{what}"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-model", action="store_true", help="fail, not skip, without the SmolLM2 model")
    parser.addoption("--require-compiler", action="store_true", help="fail, not skip, without a C++ compiler for the emulator")
    parser.addoption("--require-nvrtc", action="store_true", help="fail, not skip, without CUDA's compiler (the nvrtc extra)")
    parser.addoption("--require-gpu", action="store_true", help="fail, not skip, without a GPU")
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):  # a keyword is also the name of any folder above
        kernels.skip_without_gpu()


@pytest.fixture(scope="session")
def smollm2_path(request: pytest.FixtureRequest) -> Path:
    """The cached file of the default model: `cupaged pull` puts it there."""
    path = alias_path(DEFAULT_MODEL)
    if not is_cached(DEFAULT_MODEL):
        message = f"the SmolLM2 model is not in the cache: run `cupaged pull {DEFAULT_MODEL}`"
        if request.config.getoption("--require-model"):
            pytest.fail(message)
        pytest.skip(message)
    return path


def golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))
