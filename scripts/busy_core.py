"""BusyCore: another program that keeps one core busy, for as long as a `with` block lasts."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType

_SPIN = """
import os
if hasattr(os, "sched_setaffinity"):  # elsewhere the system chooses a core, and may choose another one
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(flush=True)
while True:
    pass
"""


class BusyCore:
    """The program is there when the block begins and gone when it has ended."""

    def __enter__(self) -> BusyCore:
        self._process = subprocess.Popen([sys.executable, "-c", _SPIN], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()
