"""A code address to a line of the kernel's source, by addr2line where the machine has it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

_HEADERS = (".h", ".cuh")


class SourceLine(NamedTuple):
    file: str
    line: int
    within: str  # "device.cuh:40" when the address lies in a header's function that was inlined there, else ""


def can_look_up() -> bool:
    return shutil.which("addr2line") is not None


def look_up(library: Path, offset: int) -> SourceLine | None:
    """The line of the kernel that the code at `offset` was made for; None where that cannot be told."""
    try:
        command = ["addr2line", "-i", "-e", str(library), hex(offset)]
        output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return None
    frames = [(Path(file).name, int(line)) for file, line in re.findall(r"^(.+):(\d+)", output, re.MULTILINE)]
    frames = [frame for frame in frames if frame[1]]
    if not frames:
        return None
    chosen = next((frame for frame in frames if not frame[0].endswith(_HEADERS)), frames[0])
    within = "" if frames[0] == chosen else f"{frames[0][0]}:{frames[0][1]}"
    return SourceLine(*chosen, within)
