"""Where the cache lies: the environment's word, then the XDG one, then the user's home."""

from __future__ import annotations

from pathlib import Path

import pytest

from cupaged.errors import ConfigError
from cupaged.folders import cache_dir


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CUPAGED_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "cupaged"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the XDG specification
    assert cache_dir() == tmp_path / ".cache" / "cupaged"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/cupaged")
    monkeypatch.setenv("CUPAGED_CACHE", "~/own")
    assert cache_dir() == tmp_path / "own"


@pytest.mark.parametrize("own", ["", "~/own"])
def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    def no_home(*_: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("CUPAGED_CACHE", own)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(Path, "expanduser", no_home)
    with pytest.raises(ConfigError, match="set CUPAGED_CACHE"):
        cache_dir()
