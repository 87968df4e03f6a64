"""Opening a backend, its threads, and the kernels' disk cache; what the operations compute is test_conformance.py."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from cupaged import LLM, SamplingParams
from cupaged.backends import cpu_code, open_backend
from cupaged.backends.base import AttentionBatch
from cupaged.backends.cpu import CpuBackend
from cupaged.backends.cpu_cores import usable_cores
from cupaged.backends.cpu_threads import Crew
from cupaged.config import EngineConfig
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


CREW_OF_THREE = """
import os, signal, threading, time
import numpy as np
from cupaged.backends.cpu import CpuBackend
class Ones:
    name, storage, shape = "ones", "F32", (64, 64)
    def read(self, start=0, stop=None):
        return np.ones((64, 64), np.float32)[start:stop]
backend = CpuBackend(3)
matrix, x, y = backend.load_matrix([Ones()]), np.ones((4, 64), np.float32), np.zeros((4, 64), np.float32)
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
    python("import sys; from cupaged.backends import open_backend; open_backend('reference'); assert 'cupaged.backends.cpu_code' not in sys.modules")


WITHOUT_NUMBA = """
import importlib.metadata
known = importlib.metadata.version
def version(name):
    if name == "numba":
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)
importlib.metadata.version = version
"""
BROKEN_NUMBA = "import sys, tempfile, pathlib; folder = tempfile.mkdtemp(); pathlib.Path(folder, 'numba.py').write_text('raise ImportError(\\'needs another NumPy\\')'); sys.path.insert(0, folder)\n"


@pytest.mark.parametrize(("before", "reason"), [(WITHOUT_NUMBA, "there are no CPU kernels without Numba: no package numba"), (BROKEN_NUMBA, "cannot be compiled: ImportError: needs another NumPy")])
def test_without_numba_the_cpu_is_plain_numpy_with_one_warning(before: str, reason: str, tmp_path: Path) -> None:
    run = python(before + "from cupaged.backends import open_backend; print(open_backend('auto').name)", CUPAGED_CACHE=str(tmp_path))
    assert run.stdout == "reference\n"
    assert run.stderr.count("plain NumPy") == 1
    assert reason in run.stderr


def test_plain_numpy_in_place_of_the_kernels_is_not_called_batch_invariant() -> None:
    code = WITHOUT_NUMBA + "from cupaged import LLM\ntry: LLM({!r}, num_blocks=8, batch_invariant=True)\nexcept ValueError as error: print(error)"
    run = python(code.format(str(FAMILIES / "llama_tied")))
    assert run.stdout.startswith("batch_invariant: on the reference backend")


def test_the_engine_at_work_imports_no_compiler() -> None:
    compilers = {"numba", "llvmlite"} if cpu_code.MAPS_IMAGES else {"numba"}  # elsewhere LLVM loads objects
    python(LINEAR_AND_NORM.join(["from cupaged.backends import open_backend\nbackend = open_backend('cpu', 2)\n", f"import sys; assert not {compilers} & set(sys.modules)"]))


# ---- threads


def test_threads_default_to_the_cores_this_process_may_use() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from cupaged.backends.cpu_cores import usable_cores; print(usable_cores())"
    assert CpuBackend().threads == usable_cores() >= 1
    if hasattr(os, "sched_setaffinity"):
        assert python(code).stdout == "1\n"


def test_a_refused_operation_leaves_the_threads_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors come from Python, before any thread starts: nobody is left waiting at a barrier."""
    monkeypatch.setattr("cupaged.backends.cpu.CREW_WORK", 0)
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


def test_the_threads_end_with_the_crew() -> None:
    before = set(threading.enumerate())  # other crews may end at any time: look at our own threads only
    crew = Crew(5)
    workers = [t for t in threading.enumerate() if t not in before and t.name == "cupaged-kernel"]
    assert len(workers) == 4
    del crew
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
    code = CREW_OF_THREE + """
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system copies no processes")
def test_a_copy_of_the_process_computes_with_threads_of_its_own() -> None:
    code = CREW_OF_THREE + """
run = backend.record(lambda rows: backend.linear(x[:rows], matrix, y[:rows]), 4)
run(4)
child = os.fork()
for _ in range(100):
    y[:] = 0
    run(4)
    assert (y == 64).all()
if child:
    print(os.waitpid(child, 0)[1])
"""
    assert python(code).stdout == "0\n"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system lets no program choose its cores")
def test_pinned_threads_have_cores_of_their_own_and_the_caller_is_free_after_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere = os.sched_getaffinity(0)
    chosen: list[set[int]] = []
    choose = os.sched_setaffinity
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: (chosen.append(set(cores)), choose(thread, cores)))
    crew = Crew(len(everywhere), pin=True)
    matrix, x, y = CpuBackend(1).load_matrix([Zeros(8, 4)]), np.ones((2, 4), np.float32), np.ones((2, 8), np.float32)
    backend = CpuBackend(1)
    backend._crew = crew
    monkeypatch.setattr("cupaged.backends.cpu.CREW_WORK", 0)
    backend.linear(x, matrix, y)
    assert (y == 0).all()
    assert os.sched_getaffinity(0) == everywhere
    pinned = [cores for cores in chosen if len(cores) == 1]
    assert set().union(*pinned) == everywhere
    with pytest.raises(ConfigError, match="take fewer threads"):
        Crew(len(everywhere) + 1, pin=True)


def test_pinning_is_an_option_of_the_cpu() -> None:
    assert LLM(str(FAMILIES / "llama_tied"), num_blocks=8, threads=1, pin_threads=True).generate([[1, 2]], SamplingParams(max_tokens=2))
    with pytest.raises(ConfigError, match="pin_threads must be true or false"):
        EngineConfig(pin_threads=1)  # type: ignore[arg-type]


# ---- the kernels' cache


def test_kernels_are_kept(tmp_path: Path) -> None:
    code = """
from cupaged.backends import open_backend
said = []
backend = open_backend("cpu", announce=said.append)
assert len(said) == 1 and "compiling" in said[0]
""" + LINEAR_AND_NORM
    run = "said = []\nfrom cupaged.backends import open_backend\nbackend = open_backend('cpu', announce=said.append)\nassert not said\n"
    home = {"CUPAGED_CACHE": str(tmp_path)}
    python(code, **home)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    assert len(kept) > 10
    python(run + LINEAR_AND_NORM, **home)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")} == kept  # loaded, not compiled


def test_without_a_writable_folder_kernels_are_compiled_for_one_process_with_one_warning(tmp_path: Path) -> None:
    blocked, temporary = tmp_path / "file", tmp_path / "temporary"
    blocked.write_text("no folder")
    temporary.mkdir()
    early = "import weakref\nweakref.finalize(type('Other', (), {})(), print)\n"  # so the threads end after the folder is gone
    code = early + "from cupaged.backends import cpu\nbackend = cpu.CpuBackend(2)\n" + LINEAR_AND_NORM
    error = python(code, CUPAGED_CACHE=str(blocked), TMPDIR=str(temporary)).stderr
    assert error.count("cannot be kept") == 1
    assert len(error.splitlines()) == 1
    assert "CUPAGED_CACHE" in error
    assert not list(temporary.iterdir())


def test_the_folder_is_named_by_the_sources_and_the_registers(tmp_path: Path) -> None:
    code = "from cupaged.backends import cpu_code; print(cpu_code.folder().name)"
    first = python(code, CUPAGED_CACHE=str(tmp_path)).stdout
    changed = "import pathlib; read = pathlib.Path.read_bytes; pathlib.Path.read_bytes = lambda p: read(p) + b'# edited'\n"
    assert first == python(code, CUPAGED_CACHE=str(tmp_path)).stdout
    assert first != python(changed + code, CUPAGED_CACHE=str(tmp_path)).stdout
    assert first != python(code, CUPAGED_CACHE=str(tmp_path), CUPAGED_CPU_REGISTERS="4,16").stdout


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
