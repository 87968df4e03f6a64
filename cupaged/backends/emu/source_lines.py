"""A code address to a line of the kernel's source, by addr2line where the machine has it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

_HEADERS = (".h", ".cuh")
_NEARBY, _STEP = 80, 8  # bytes of code


class SourceLine(NamedTuple):
    file: str
    line: int
    within: str  # "device.cuh:40" when the address lies in a header's function that was inlined there, else ""


def can_look_up() -> bool:
    return shutil.which("addr2line") is not None


def look_up(library: Path, offset: int) -> SourceLine | None:
    """The line of the kernel that the code at `offset` was made for; None where that cannot be told.

    An optimiser that moved the instruction may have left it without a line: then it is the nearest one before it.
    """
    for nearby in range(offset, offset - _NEARBY, -_STEP):
        frames = _frames(library, nearby)
        if frames:
            break
    else:
        return None
    chosen = next((frame for frame in frames if not frame[0].endswith(_HEADERS)), frames[0])
    within = "" if frames[0] == chosen else f"{frames[0][0]}:{frames[0][1]}"
    return SourceLine(*chosen, within)


def _frames(library: Path, offset: int) -> list[tuple[str, int]]:
    """(file, line) of the code at `offset`, the innermost inlined function first."""
    try:
        command = ["addr2line", "-i", "-e", str(library), hex(offset)]
        output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return []
    return [(Path(file).name, int(line)) for file, line in re.findall(r"^(.+):(\d+)", output, re.MULTILINE) if int(line)]
