"""Kernel text to a loaded library. What is compiled is kept in the cache folder under a hash of all that went into it.

    text --preprocess--> text + one entry point a kernel --compile, link--> kernel library, linked to the runtime library

A library is written beside its place and moved there in one step: processes that build the same one at once do the work
twice and agree on the result.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from cupaged.backends.emu.compiler import RUNTIME, Compiler, refusal
from cupaged.errors import BackendError
from cupaged.folders import cache_dir

# The expansion of simt.h's __global__, by which kernels are found in preprocessed text.
_KERNEL = re.compile(
    r'extern\s+"C"\s+__attribute__\(\(noinline, visibility\("hidden"\)\)\)\s*void\s+(?:__attribute__\s*\(\(.*?\)\)\s*)*'
    r"(\w+)\s*\(([^()]*)\)\s*\{"
)
_ENTRY = (
    'extern "C" __attribute__((visibility("default"), no_sanitize("thread"))) void simt_run_{0}(void** arguments) '
    "{{ simt::call(&{0}, arguments); }}\n"
    'extern "C" __attribute__((visibility("default"), no_sanitize("thread"))) void simt_spell_{0}(char* out) '
    "{{ simt::spell(&{0}, out); }}\n"
)


def load_runtime(compiler: Compiler) -> ctypes.CDLL:
    """The emulator's runtime, built by `compiler`. Kernel libraries find it by its name, so it is loaded first."""
    return _loaded(_runtime_path(compiler))


def load_kernels(compiler: Compiler, text: str, name: str, options: Sequence[str], mode: str) -> tuple[ctypes.CDLL, Path]:
    """The library of a kernel text, and where it lies. `name` is what messages call the text.

    Raises BackendError with the compiler's log for a text that does not compile, or one without kernels.
    """
    runtime, flags = _runtime_path(compiler), [*compiler.kernel_flags(mode), *options]
    key = _key(compiler.command, compiler.version, flags, compiler.link_flags(), name, text, _runtime_sources())
    path = _folder() / f"{Path(name).stem}-{mode}-{key}.so"

    def build(folder: Path) -> Path:
        unit = f'#include "simt.h"\n#include "export.h"\n#line 1 {json.dumps(name)}\n{text}\n'
        (folder / "unit.cpp").write_text(unit, encoding="utf-8")
        include = ["-I", str(RUNTIME), "-I", str(RUNTIME / "cuda")]

        def compiled(arguments: list[str]) -> str:
            done = compiler.run([*flags, *include, *arguments], folder)
            if done.returncode:
                raise refusal(name, text, done.stderr)
            return done.stdout

        plain = compiled(["-E", "unit.cpp"])
        (folder / "kernels.ii").write_text(plain + _entries(plain, name), encoding="utf-8")
        compiled(["-c", "kernels.ii", "-o", "kernels.o"])
        _link(compiler, folder, ["kernels.o", str(runtime), "-lm"], path.name)
        return folder / path.name

    _build_once(path, build)
    load_runtime(compiler)
    return _loaded(path), path


def _entries(plain: str, name: str) -> str:
    """C++ text: entry points of every kernel in preprocessed text, and a string that lists kernels and parameters."""
    kernels = {}
    for kernel, parameters in _KERNEL.findall(re.sub(r"^#.*\n", "", plain, flags=re.MULTILINE)):
        kernels[kernel] = re.findall(r"(\w+)\s*(?:,|$)", parameters) if parameters.strip() not in ("", "void") else []
    if not kernels:
        raise BackendError(f'{name} has no kernel: the emulator looks for `extern "C" __global__ void name(...)`')
    listed = json.dumps(json.dumps(kernels))
    return (
        f'\n# 1 "entry points"\n{"".join(map(_ENTRY.format, kernels))}'
        f'extern "C" __attribute__((visibility("default"))) const char simt_kernels[] = {listed};\n'
    )


@lru_cache
def _runtime_path(compiler: Compiler) -> Path:
    key = _key(compiler.command, compiler.version, compiler.runtime_flags(), _runtime_sources())
    path = _folder() / f"runtime-{key}.so"

    def build(folder: Path) -> Path:
        arguments = [*compiler.runtime_flags(), "-I", str(RUNTIME), "-c", str(RUNTIME / "runtime.cpp"), "-o", "runtime.o"]
        done = compiler.run(arguments, folder)
        if done.returncode:
            raise refusal("the emulator's runtime", "", done.stderr)
        _link(compiler, folder, ["runtime.o"], path.name)
        return folder / path.name

    _build_once(path, build)
    return path


def _link(compiler: Compiler, folder: Path, inputs: list[str], name: str) -> None:
    done = compiler.run([*compiler.link_flags(), *inputs, f"-Wl,-soname,{name}", "-o", name], folder)
    if done.returncode:
        raise BackendError(f"{name} does not link:\n{done.stderr.strip()}")


def _build_once(path: Path, build: Callable[[Path], Path]) -> None:
    if path.exists():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as folder:
            os.replace(build(Path(folder)), path)
    except OSError as error:
        raise BackendError(f"cannot write compiled kernels to {path.parent}: {error.strerror}; set CUPAGED_CACHE") from None


def _loaded(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendError(f"a compiled kernel cannot be loaded: {error}; remove it, or set CUPAGED_CACHE") from None


def _folder() -> Path:
    return cache_dir() / "emu"


@lru_cache
def _runtime_sources() -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8") for path in sorted(RUNTIME.rglob("*")) if path.is_file())


def _key(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
