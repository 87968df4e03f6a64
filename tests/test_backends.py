"""Opening a backend, its threads, and the kernels' disk cache; what the operations compute is test_conformance.py."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from cupaged.backends import open_backend
from cupaged.backends.base import AttentionBatch
from cupaged.backends.cpu import CpuBackend
from cupaged.backends.cpu_threads import Leader, Team, usable_cores
from cupaged.conformance.steps import load_batch
from cupaged.errors import ConfigError, InvariantError
from tests.family_models import ROOT as FAMILIES

LINEAR_AND_NORM = """
import numpy as np
class Ones:
    name, storage, shape = "ones", "F32", (3, 4)
    def read(self, start=0, stop=None):
        return np.ones((3, 4), np.float32)[start:stop]
x, out, normed = np.ones((2, 4), np.float32), np.empty((2, 3), np.float32), np.empty((2, 4), np.float32)
backend.linear(x, backend.load_matrix([Ones()]), out)
backend.rms_norm(x, np.ones(4, np.float32), 0.0, normed)
assert (out == 4).all() and (normed == 1).all()
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENBLAS", "NUMBA"))}
    run = subprocess.run([sys.executable, "-c", code], env=kept | environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run


# ---- which backend


@pytest.mark.parametrize(("device", "name"), [("auto", "cpu"), ("cpu", "cpu"), ("reference", "reference")])
def test_a_device_names_its_backend(device: str, name: str) -> None:
    assert open_backend(device).name == name


@pytest.mark.parametrize("device", ["gpu", "CPU", ""])
def test_another_device_is_refused_in_one_line(device: str) -> None:
    with pytest.raises(ConfigError, match=r"^there is no device .*; use auto, cuda, cpu, reference or emu$"):
        open_backend(device)


def test_the_reference_backend_needs_no_compiler() -> None:
    python("import sys; from cupaged.backends import open_backend; open_backend('reference'); assert 'numba' not in sys.modules")


def test_without_numba_the_cpu_is_plain_numpy_with_one_warning() -> None:
    run = python("import sys; sys.modules['numba'] = None; from cupaged.backends import open_backend; print(open_backend('auto').name)")
    assert run.stdout == "reference\n"
    assert run.stderr.count("plain NumPy") == 1


def test_plain_numpy_in_place_of_the_kernels_is_not_called_batch_invariant() -> None:
    code = "import sys; sys.modules['numba'] = None\nfrom cupaged import LLM\ntry: LLM({!r}, num_blocks=8, batch_invariant=True)\nexcept ValueError as error: print(error)"
    run = python(code.format(str(FAMILIES / "llama_tied")))
    assert run.stdout.startswith("batch_invariant: on the reference backend")


# ---- threads


def test_threads_default_to_the_cores_this_process_may_use() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from cupaged.backends.cpu_threads import usable_cores; print(usable_cores())"
    assert CpuBackend().threads == usable_cores() >= 1
    if hasattr(os, "sched_setaffinity"):
        assert python(code).stdout == "1\n"


def test_every_part_runs_once_and_the_caller_waits_for_all() -> None:
    seen: list[tuple[int, int, str, bool]] = []
    lock, meet = threading.Lock(), threading.Barrier(4, timeout=10)

    def kernel(part: int, parts: int, word: str) -> None:
        meet.wait()  # passes only when all parts run at the same time
        with lock:
            seen.append((part, parts, word, threading.current_thread() is threading.main_thread()))

    Team(4).run(kernel, "w")
    assert sorted(seen) == [(p, 4, "w", p == 0) for p in range(4)]


@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_in_a_part_reaches_the_caller_and_the_team_goes_on(failing: int) -> None:
    team, done = Team(3), []

    def kernel(part: int, parts: int, fail: bool) -> None:
        if fail and part == failing:
            raise ZeroDivisionError(part)
        done.append(part)

    with pytest.raises(ZeroDivisionError, match=str(failing)):
        team.run(kernel, True)
    assert sorted(done) == sorted({0, 1, 2} - {failing})
    done.clear()
    team.run(kernel, False)
    assert sorted(done) == [0, 1, 2]


def test_an_error_in_the_leaders_call_reaches_the_caller_and_the_leader_goes_on() -> None:
    leader, done = Leader(), []

    def fail() -> None:
        raise ZeroDivisionError("led")

    for _ in range(3):
        with pytest.raises(ZeroDivisionError, match="led"):
            leader.call(fail)
        leader.call(done.append, 1)
    assert done == [1, 1, 1]


def test_a_refused_operation_leaves_the_threads_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors come from Python, before any thread starts: nobody is left waiting at a barrier."""
    monkeypatch.setattr("cupaged.backends.cpu.TEAM_WORK", 0)
    backend = CpuBackend(3)
    matrix, x, y = backend.load_matrix([Zeros(40, 8)]), np.ones((5, 8), np.float32), np.ones((5, 40), np.float32)
    run = backend.record(lambda rows: backend.linear(x[:rows], matrix, y[:rows]), 5)
    for rows in (1, 5, 3):
        with pytest.raises(InvariantError, match="linear"):
            backend.linear(x[:, :7], matrix, y)
        with pytest.raises(InvariantError, match="recorded for up to 5 rows"):
            run(6)
        with pytest.raises(ZeroDivisionError):
            backend.record(lambda rows: 1 // 0, 5)
        y[:] = 1
        run(rows)
        assert (y[:rows] == 0).all()
        assert (y[rows:] == 1).all()
        y[:] = 1
        backend.linear(x, matrix, y)
        assert (y == 0).all()


def test_an_interrupt_waits_for_the_other_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = threading.Event()

    def kernel(part: int, parts: int) -> None:
        if part == 0:
            raise KeyboardInterrupt
        threading.Event().wait(0.1)
        finished.set()

    with pytest.raises(KeyboardInterrupt):
        Team(2).run(kernel)
    assert finished.is_set()


def test_the_threads_end_with_the_team() -> None:
    before = set(threading.enumerate())  # other teams may end at any time: look at our own threads only
    team = Team(5)
    workers = [t for t in threading.enumerate() if t not in before and t.name == "cupaged-kernel"]
    assert len(workers) == 4
    del team
    for worker in workers:
        worker.join(timeout=5)
        assert not worker.is_alive()


# ---- what would let a kernel write outside its arrays, or wait for ever


def test_an_operation_on_other_rows_than_its_batch_has_is_refused() -> None:
    backend = CpuBackend(1)
    step = AttentionBatch(
        positions=np.array([3, 4, 5], np.int32), slots=np.array([3, 4, 5], np.int64), block_tables=np.zeros((1, 1), np.int32),
        query_start=np.array([0, 3], np.int32), context_lens=np.array([6], np.int32), num_decode=0, max_context=6,
    )  # fmt: skip
    batch = load_batch(backend, step, block_size=8, vocab_size=1)
    key, value = (cache[0] for cache in backend.new_kv_cache(1, 1, 1, 8, 4))
    table, matrix = np.ones((6, 2), np.float32), backend.load_matrix([Zeros(1, 4)])
    for rows in (1, 2, 4):
        qkv, out = np.zeros((rows, 12), np.float32), np.zeros((rows, 4), np.float32)
        with pytest.raises(InvariantError, match="3 rows"):
            backend.embedding(matrix, batch, out)
        with pytest.raises(InvariantError, match="3 rows"):
            backend.rope_and_cache(qkv, table, table, batch, 1, key, value)
        with pytest.raises(InvariantError, match="3 rows"):
            backend.attention(qkv, key, value, batch, 1, 1.0, 0, out)
    out = backend.empty((3, 4), np.float32)
    run = backend.record(lambda rows: backend.embedding(matrix, batch, out[:rows]), 3)
    run(3)
    with pytest.raises(InvariantError, match="3 rows"):
        run(2)
    with pytest.raises(InvariantError, match="rows"):
        backend.record(lambda rows: backend.embedding(matrix, batch, np.empty((4, 4), np.float32)), 4)


class Zeros:
    name, storage = "zeros", "F32"

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return np.zeros(self.shape, np.float32)[start:stop]


def test_interrupts_at_any_moment_neither_hang_nor_tear_a_program() -> None:
    """A member that never came to a barrier would let the others wait there for ever."""
    code = """
import os, signal, threading, time
import numpy as np
from cupaged.backends.base import AttentionBatch
from cupaged.backends.cpu import CpuBackend
class Ones:
    name, storage, shape = "ones", "F32", (64, 64)
    def read(self, start=0, stop=None):
        return np.ones((64, 64), np.float32)[start:stop]
backend = CpuBackend(3)
matrix, x, y = backend.load_matrix([Ones()]), np.ones((4, 64), np.float32), np.zeros((4, 64), np.float32)
def build(rows):
    for _ in range(20):
        backend.linear(x[:rows], matrix, y[:rows])
run = backend.record(build, 4)
stop, armed = threading.Event(), threading.Event()
def shoot():
    armed.wait()
    while not stop.is_set():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.0002)
threading.Thread(target=shoot, daemon=True).start()
interrupted, end = 0, time.monotonic() + 4
while not stop.is_set():
    try:
        armed.set()
        while time.monotonic() < end:
            y[:] = 0
            run(4)
            assert (y == 64).all()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop.set()
    except KeyboardInterrupt:
        interrupted += 1
print("interrupted", interrupted > 100)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout == "interrupted True\n", run.stderr[-500:]


# ---- the kernels' cache


def test_kernels_are_kept_and_the_users_numba_settings_are_not_touched(tmp_path: Path) -> None:
    code = """
import numba
from cupaged.backends import cpu_jit
assert numba.config.CACHE_DIR == "mine" and not cpu_jit.kernels_are_cached()
said = []
from cupaged.backends import open_backend
backend = open_backend("cpu", announce=said.append)
assert len(said) == 1 and "compiling" in said[0] and cpu_jit.kernels_are_cached()
assert numba.config.CACHE_DIR == "mine"
""" + LINEAR_AND_NORM
    run = "said = []\nfrom cupaged.backends import open_backend\nbackend = open_backend('cpu', announce=said.append)\nassert not said\n"
    home = {"CUPAGED_CACHE": str(tmp_path)}
    python(code, NUMBA_CACHE_DIR="mine", **home)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")}
    assert len(kept) > 20
    python(run + LINEAR_AND_NORM, **home)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")} == kept  # loaded, not compiled


def test_without_a_writable_folder_one_kernel_still_compiles_with_one_warning(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    code = "from cupaged.backends import cpu\nbackend = cpu.CpuBackend(1)\n" + LINEAR_AND_NORM
    error = python(code, CUPAGED_CACHE=str(blocked)).stderr
    assert error.count("cannot be kept") == 1
    assert "CUPAGED_CACHE" in error


def test_the_folder_is_named_by_the_sources(tmp_path: Path) -> None:
    code = "from cupaged.backends import cpu_jit; print(cpu_jit.FOLDER.name)"
    first = python(code, CUPAGED_CACHE=str(tmp_path)).stdout
    changed = "import pathlib; read = pathlib.Path.read_bytes; pathlib.Path.read_bytes = lambda p: read(p) + b'# edited'\n"
    assert first == python(code, CUPAGED_CACHE=str(tmp_path)).stdout
    assert first != python(changed + code, CUPAGED_CACHE=str(tmp_path)).stdout


def test_a_step_of_a_warm_backend_compiles_nothing() -> None:
    code = """
from numba.core import event
compiled = []
class Listener(event.Listener):
    def on_start(self, event): compiled.append(event.data)
    def on_end(self, event): pass
from cupaged.backends import open_backend
backend = open_backend("cpu", 2)
event.register("numba:compile", Listener())
""" + LINEAR_AND_NORM + "assert not compiled, compiled"
    python(code)


def test_memory_for_a_matrix_stays_near_its_size() -> None:
    psutil = pytest.importorskip("psutil")
    rows, columns = 24_000, 1024  # 98 MB

    class Ones:
        name, storage, shape = "ones", "F32", (rows, columns)

        def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
            return np.ones((len(range(*slice(start, stop).indices(rows))), columns), np.float32)

    process = psutil.Process()
    before = process.memory_info().rss
    matrix = CpuBackend(1).load_matrix([Ones()])
    grown = process.memory_info().rss - before
    assert grown < 1.25 * matrix.parts[0].weight.nbytes
