"""The project's own promises: README and CI run the same tests, both packages are packaged, contracts catch a breach."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cupaged
from cupaged.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_ci_runs_the_tests_with_the_command_of_the_readme() -> None:
    (command,) = [line for line in README.splitlines() if line.endswith("scripts/test")]
    assert command == "pip install -e '.[test]' && scripts/test"
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "tests=$(grep -m 1 'scripts/test$' README.md)\neval \"$tests --require-model --require-compiler --require-nvrtc\"\n" in ci
    assert ci.rstrip().endswith('--require-nvrtc"')  # pytest's closing line is CI's last


@pytest.mark.parametrize("script", ["scripts/check", "scripts/test", ".ci/run"])
def test_scripts_can_be_run(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK)
    assert path.read_text(encoding="utf-8").startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_the_readme_names_commands_and_exports_that_exist() -> None:
    assert set(re.findall(r"^(?:.*&& )?cupaged (\w+)", README, re.MULTILINE)) <= set(COMMANDS)
    (python,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(python.strip().splitlines()) <= 10
    for statement in ast.parse(python).body:
        if isinstance(statement, ast.ImportFrom):
            assert all(hasattr(cupaged, name.name) for name in statement.names)


def test_every_path_in_the_file_tree_exists() -> None:
    (tree,) = re.findall(r"```\n(cupaged/\n.*?)```", README, re.DOTALL)
    names = 0
    for indent, listed in re.findall(r"^( *)([\w./]+(?:, [\w./]+)*)", tree, re.MULTILINE):
        for name in listed.split(", "):
            assert (ROOT / ("cupaged" if indent else "") / name).exists(), name
            names += 1
    assert names > 10


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("scheduler.py", "import cupaged.engine", "Imports go downward only"),
        ("cache/manager.py", "import cupaged.backends.base", "The scheduler and the cache see no device"),
        ("model/llama.py", "import cupaged.backends.cpu", "The model knows no backend by name"),
        ("cli/chat.py", "import cupaged.backends.cpu", "A backend is opened by the loader"),
        ("cli/kernels/check.py", "import cupy", "Native code and devices are reached through backends"),
        ("backends/cpu.py", "import numba", "Numba compiles the CPU kernels"),
        ("backends/cpu.py", "import llvmlite", "LLVM compiles them"),
        ("backends/cpu.py", "import cupaged.backends.cpu_kernels.gemm", "Numba compiles the CPU kernels"),
        ("llm.py", "import rich", "click and rich belong to the command line"),
        ("cli/pull.py", "import subprocess", "Other programs are started by backends"),
        ("new.py", "", "Imports go downward only"),
    ],
)
def test_the_import_contracts_catch_a_breach(module: str, line: str, contract: str, tmp_path: Path) -> None:
    pytest.importorskip("importlinter")
    for package in ("cupaged", "kernels_cu"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "cupaged" / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command, env = [sys.executable, "-c", code, "--no-cache"], os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    report = " ".join(done.stdout.split())
    assert re.search(re.escape(contract) + r"((?!KEPT|BROKEN).)*BROKEN", report), report
