"""The machine's C++ compiler: which one, with which flags, and what it says about a kernel that it refuses."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cupaged.errors import BackendError

NO_COMPILER = "the emulator needs a C++17 compiler: install g++ or clang++, or `pip install ziglang`, or set CUPAGED_CXX"
RUNTIME = Path(__file__).parent / "runtime"

# One rounding for each operation, so that a result does not depend on what the optimiser fuses.
_FLAGS = [
    "-std=c++17",
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fstack-clash-protection",
]
_KERNEL_FLAGS = ["-w", "-g1", "-gdwarf-4"]
_MODE_FLAGS = {
    "fast": ["-O2"],
    "check": [
        "-O1",
        "-DCUPAGED_EMU_CHECK",
        "-fno-optimize-sibling-calls",
        "-fsanitize=thread",  # by itself: zig ignores the list that it heads
        "-fsanitize=bounds,alignment,signed-integer-overflow,shift,integer-divide-by-zero",
        "-fno-sanitize-recover=all",
    ],
}
_NO_FUNCTION_HOOKS = {
    "gcc": ["--param=tsan-instrument-func-entry-exit=0"],
    "clang": ["-mllvm", "-tsan-instrument-func-entry-exit=0"],
}


@dataclass(frozen=True)
class Compiler:
    """A command that compiles C++. `version` is what it prints for --version: with it the compiled objects are named."""

    command: tuple[str, ...]
    version: str

    @property
    def family(self) -> str:
        return "clang" if "clang" in self.version or "zig" in " ".join(self.command) else "gcc"

    def kernel_flags(self, mode: str) -> list[str]:
        flags = [*_FLAGS, *_KERNEL_FLAGS, *_MODE_FLAGS[mode]]
        if mode == "check":
            return [*flags, *_NO_FUNCTION_HOOKS[self.family]]
        return [*flags, "-fno-sanitize=all"]  # zig turns its own on

    def link_flags(self) -> list[str]:
        return ["-shared", "-O2", "-fno-sanitize=all"]  # -O2: else zig links its own sanitizer runtime

    def runtime_flags(self) -> list[str]:
        return [*_FLAGS, "-O2", "-fno-sanitize=all"]

    def run(self, arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run([*self.command, *arguments], cwd=folder, capture_output=True, text=True, check=False)
        except OSError as error:
            raise BackendError(f"the compiler {shlex.join(self.command)} cannot be started: {error.strerror}") from None


def find_compiler() -> Compiler:
    """$CUPAGED_CXX, $CXX, g++, clang++, c++, then the ziglang wheel. Raises BackendError, with the remedy, for none.

    Raises BackendError, too, on other systems than Linux, whose linkers and signals the runtime is written for.
    """
    if not sys.platform.startswith("linux"):
        raise BackendError(f"the emulator runs on Linux, not on {sys.platform}")
    return _find(os.environ.get("CUPAGED_CXX", ""), os.environ.get("CXX", ""), os.environ.get("PATH", ""))


@lru_cache
def _find(own: str, shared: str, path: str) -> Compiler:
    if own:
        if shutil.which(shlex.split(own)[0], path=path) is None:
            raise BackendError(f"CUPAGED_CXX names {own!r}, which is no program that can be run")
        return _described(shlex.split(own))
    for candidate in (shared, "g++", "clang++", "c++"):
        command = shlex.split(candidate)
        if command and shutil.which(command[0], path=path):
            return _described(command)
    if importlib.util.find_spec("ziglang") is not None:
        return _described([sys.executable, "-m", "ziglang", "c++"])
    raise BackendError(NO_COMPILER)


def _described(command: list[str]) -> Compiler:
    bare = Compiler(tuple(command), "")
    done = bare.run(["--version"], Path.cwd())
    if done.returncode:
        raise BackendError(f"the compiler {shlex.join(command)} fails at --version: {done.stderr.strip()[:200]}")
    return Compiler(tuple(command), done.stdout)


def refusal(name: str, text: str, log: str) -> BackendError:
    """The error for a kernel text that did not compile: the first complaint with its source line, then the whole log."""
    found = re.search(r"^([^\s:][^:\n]*):(\d+):(?:\d+:)? (?:fatal )?error: (.*)$", log, re.MULTILINE)
    if found is None:
        return BackendError(f"{name} does not compile:\n{log.strip()}")
    file, line, complaint = found[1], int(found[2]), found[3]
    shown = _source_line(name, text, file, line)
    head = f"{name} does not compile: {file}:{line}: {complaint}"
    return BackendError(f"{head}\n{line:>6} | {shown}\n{log.strip()}" if shown else f"{head}\n{log.strip()}")


def _source_line(name: str, text: str, file: str, line: int) -> str:
    """The line of `text` that its #line directives call `file`:`line`; "" where there is none."""
    at_file, at_line = name, 1
    for source in text.splitlines():
        directive = re.match(r'\s*#\s*line\s+(\d+)(?:\s+"([^"]*)")?', source)
        if directive:
            at_file, at_line = directive[2] or at_file, int(directive[1])
            continue
        if (at_file, at_line) == (file, line):
            return source
        at_line += 1
    return ""
