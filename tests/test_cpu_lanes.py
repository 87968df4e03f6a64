"""The CPU kernels as they are on processors with narrower registers than this one's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SUITES = ("tests/test_cpu_attention.py", "tests/test_conformance.py")
WHICH = "(attention or linear or rope or embedding or program or same) and not emu and not reference"
RUN = """
import sys
from cupaged.backends import cpu_ir
cpu_ir.LANES, cpu_ir.REGISTERS = {lanes}, {registers}
import pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *{suites!r}, "-k", {which!r}]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("lanes", "registers"), [(8, 16), (4, 16), (4, 32)])
def test_conformance_with_narrower_vectors(lanes: int, registers: int, tmp_path: Path) -> None:
    code = RUN.format(lanes=lanes, registers=registers, suites=SUITES, which=WHICH)
    environment = os.environ | {"CUPAGED_CACHE": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:]
