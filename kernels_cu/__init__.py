"""CUDA C sources of cupaged's kernels: device code only, one file an operation, all of them over `device.cuh`.

A file is one `extern "C"` kernel, or a few that belong together. What varies at compile time comes as -D macros (the
types ACT_T, OUT_T, WEIGHT_T, KV_T and numbers such as HEAD_DIM); everything else is an argument. The same text is compiled by
NVRTC for a GPU and by a C++ compiler for the emulator.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

__all__ = ["inlined", "names", "source"]

_FOLDER = Path(__file__).parent
_INCLUDE = re.compile(r'^#include "(?P<header>[^"]+)"$')


@cache
def names() -> tuple[str, ...]:
    """The .cu files, sorted."""
    return tuple(sorted(path.name for path in _FOLDER.glob("*.cu")))


@cache
def source(name: str) -> str:
    """The text of a .cu file with its own headers inlined: compilers' caches look at the text, not at what it includes.

    #line directives keep the compiler's messages at the right file and line. Raises FileNotFoundError.
    """
    return inlined((_FOLDER / name).read_text(encoding="utf-8"), name)


def inlined(text: str, name: str) -> str:
    """A text that messages shall call `name`, with this package's headers in the place of their #include lines."""
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate(text.splitlines(), start=1):
        include = _INCLUDE.match(line)
        if include is None or not (_FOLDER / include["header"]).is_file():
            lines.append(line)
        else:
            lines += [source(include["header"]).rstrip("\n"), f'#line {number + 1} "{name}"']
    return "\n".join(lines) + "\n"
