"""The CPU kernels as they are on other processors: with narrower registers than this one's, or as many that do not multiply bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SUITES = ("tests/test_cpu_attention.py", "tests/test_conformance.py")
WHICH = "(attention or linear or rope or embedding or program or same) and not emu and not reference"


@pytest.mark.slow
@pytest.mark.parametrize("registers", ["16,32", "8,16", "4,16", "4,32"])
def test_conformance_with_narrower_vectors(registers: str, tmp_path: Path) -> None:
    environment = os.environ | {"CUPAGED_CACHE": str(tmp_path), "CUPAGED_CPU_REGISTERS": registers}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *SUITES, "-k", WHICH]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:]
    assert list(tmp_path.glob("kernels-*/attention.*"))
