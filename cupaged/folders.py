"""Where this user's files lie: one cache folder for models and compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

from cupaged.errors import ConfigError


def cache_dir() -> Path:
    """$CUPAGED_CACHE, else $XDG_CACHE_HOME/cupaged, else ~/.cache/cupaged.

    A relative $XDG_CACHE_HOME is ignored, as the XDG Base Directory specification asks. Raises ConfigError for a user
    without a home.
    """
    own, shared = os.environ.get("CUPAGED_CACHE", ""), os.environ.get("XDG_CACHE_HOME", "")
    try:
        if own:
            return Path(own).expanduser()
        return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "cupaged"
    except RuntimeError:
        raise ConfigError("this user has no home folder: set CUPAGED_CACHE to a folder for models and kernels") from None
