"""Where CUDA lies on this machine: in the wheels that pip installs, else in a toolkit."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

DEFAULT_TOOLKIT = "/usr/local/cuda"


def cuda_files(wheel: str, kind: str, name: str) -> Iterator[Path]:
    """Places for a file of CUDA, the likeliest first; it need not be at any of them.

    wheel   the part of CUDA that has it, such as "cublas": wheels of CUDA 12 have a folder for each part, those of 13 one for all
    kind    "include", or "lib", which a toolkit calls lib64
    """
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        yield from (Path(folder) / part / kind / name for part in (wheel, "cu13"))
    for toolkit in dict.fromkeys((os.environ.get("CUDA_PATH") or DEFAULT_TOOLKIT, DEFAULT_TOOLKIT)):
        yield Path(toolkit) / {"lib": "lib64"}.get(kind, kind) / name
