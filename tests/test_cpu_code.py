"""Machine code of the CPU kernels: what may become an image, how one is loaded, and what happens where none can be."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest

from cupaged.backends import cpu_code
from cupaged.backends.cpu_kernels import compiler, image
from cupaged.backends.cpu_program import float_word, numbers, operation
from cupaged.backends.cpu_threads import Crew
from cupaged.errors import BackendError, ConfigError

only_images = pytest.mark.skipif(not cpu_code.MAPS_IMAGES, reason="here LLVM loads objects")


def compiled(text: str) -> bytes:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(reloc="pic", codemodel="small")
    return machine.emit_object(llvm.parse_assembly(text))


def norm_by(address: int) -> np.ndarray:
    """A row's norm by the function at an address."""
    x, weight, out, rows = np.array([[3.0, 4.0]], np.float32), np.array([1.0, 2.0], np.float32), np.empty((1, 2), np.float32), np.ones(1, np.int64)
    words = numbers([x, x.strides[0], weight, float_word(0.0), 2, out, out.strides[0]])
    Crew(1).run(operation(address, rows, words)[None])
    return out


NORM = np.array([[3.0, 8.0]]) / np.sqrt(12.5)


# ---- images


@only_images
def test_constants_and_functions_of_an_object_find_each_other_in_its_image(tmp_path: Path) -> None:
    code = compiled("""
@table = internal constant [3 x i64] [i64 5, i64 7, i64 11]
define internal i64 @pick(i64 %i) noinline {
  %place = getelementptr [3 x i64], ptr @table, i64 0, i64 %i
  %value = load i64, ptr %place
  ret i64 %value
}
define i64 @other(i64 %i) { ret i64 0 }
define i64 @wanted(i64 %i) {
  %value = call i64 @pick(i64 %i)
  ret i64 %value
}
""")
    path = tmp_path / "image"
    path.write_bytes(image.link(code, "wanted"))
    pick = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(cpu_code.map_image(path))
    assert [pick(i) for i in range(3)] == [5, 7, 11]


@only_images
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("declare i64 @abs(i64)\ndefine i64 @wanted(i64 %i) { %v = call i64 @abs(i64 %i)\n ret i64 %v }", "abs lies outside the object"),
        ("@x = global i64 4\ndefine i64 @wanted() { %v = load i64, ptr @x\n ret i64 %v }", r"section \.data cannot be mapped"),
        ("@p = external global i64\ndefine i64 @wanted() { %v = load i64, ptr @p\n ret i64 %v }", "depends on where the image is mapped"),
    ],
)
def test_an_object_that_needs_more_than_itself_is_refused(text: str, reason: str) -> None:
    with pytest.raises(image.LinkError, match=reason):
        image.link(compiled(text), "wanted")


def test_what_is_no_object_is_refused() -> None:
    with pytest.raises(image.LinkError, match="not a relocatable object"):
        image.link(b"\x7fELF\x01" + bytes(64), "wanted")


@only_images
def test_a_mapped_image_computes_and_so_does_a_copy_where_files_cannot_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    np.testing.assert_allclose(norm_by(cpu_code.address("rms_norm")), NORM, rtol=1e-6)
    real = mmap.mmap

    def no_files(handle: int, *rest: Any, **named: Any) -> mmap.mmap:
        if handle >= 0:
            raise PermissionError("not from here")
        return real(handle, *rest, **named)

    monkeypatch.setattr(cpu_code.mmap, "mmap", no_files)
    path = cpu_code.code_file(cpu_code.folder(), "rms_norm")
    np.testing.assert_allclose(norm_by(cpu_code.map_image(path)), NORM, rtol=1e-6)
    monkeypatch.setattr(cpu_code.mmap, "mmap", lambda *_, **__: (_ for _ in ()).throw(PermissionError("nowhere")))
    with pytest.raises(BackendError, match=r"runs no code .*nowhere.*: set CUPAGED_CACHE"):
        cpu_code.map_image(path)


@only_images
@pytest.mark.parametrize("damage", [b"", b"cupaged0" + bytes(100), struct.pack("<8sqq", cpu_code.MAGIC, 1000, 64)])
def test_a_damaged_file_is_named(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "gemm-5.code"
    path.write_bytes(damage)
    with pytest.raises(BackendError, match=r"gemm-5\.code holds no CPU kernel: delete it"):
        cpu_code.map_image(path)


@only_images
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"cannot read the CPU kernel .*gemm-5\.code: No such file"):
        cpu_code.map_image(tmp_path / "gemm-5.code")


def test_where_no_image_is_mapped_llvm_loads_the_object(tmp_path: Path) -> None:
    path = tmp_path / "rms_norm.o"
    path.write_bytes(compiler.compile_object(compiler.operation("rms_norm")))
    np.testing.assert_allclose(norm_by(cpu_code.load_object(path)), NORM, rtol=1e-6)


EXIT_AT_WORK = """
import threading, time
import numpy as np
from cupaged.backends.cpu import CpuBackend
backend = CpuBackend(threads=2)
x, weight, out = np.ones((64, 4096), np.float32), np.ones(4096, np.float32), np.empty((64, 4096), np.float32)
def build(rows):
    for _ in range(300):
        backend.rms_norm(x[:rows], weight, 1e-5, out[:rows])
def compute(program):
    while True:
        program(64)
threading.Thread(target=compute, args=(backend.record(build, 64),), daemon=True).start()
time.sleep(0.2)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_that_ends_leaves_its_parents_own_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = """
import os, sys
from cupaged.backends import cpu_code
own = cpu_code.folder()
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
print(own == cpu_code.kept_folder(), own.exists(), own)
"""
    environment = os.environ | {"CUPAGED_CACHE": str(tmp_path / "file")}
    kept, exists, own = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout.split()
    assert (kept, exists) == ("False", "True")
    assert not Path(own).exists()


def test_python_may_end_while_a_daemon_thread_computes() -> None:
    assert subprocess.run([sys.executable, "-c", EXIT_AT_WORK], timeout=60).returncode == 0


def test_threads_that_cannot_be_started_are_an_error_of_one_line_and_leave_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def start_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(ConfigError, match=r"^no 5 threads can be started here \(can't start new thread\): take fewer"):
        Crew(5)
    for thread in started:
        thread.join(10)
    assert [thread.is_alive() for thread in started] == [False, False]


def test_a_cache_that_cannot_be_written_serves_as_long_as_nothing_is_missing(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from cupaged.backends import cpu_code
def refuse(*_, **__):
    raise PermissionError("read-only")
cpu_code.tempfile.TemporaryFile = refuse
print(cpu_code.address("rms_norm") > 0, cpu_code._places)
print(cpu_code.address("dismiss") > 0, [len(list(place.iterdir())) for place in cpu_code._places])
"""
    environment = os.environ | {"CUPAGED_CACHE": str(tmp_path)}
    warm = "from cupaged.backends import cpu_code; cpu_code.compile_missing(['rms_norm'])"
    subprocess.run([sys.executable, "-c", warm], env=environment, check=True)
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.stdout == "True []\nTrue [1]\n", run.stderr
    assert run.stderr.count("cannot be kept") == 1


# ---- compiling


def take_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(cpu_code, "folder", lambda: folder)
    monkeypatch.setattr(cpu_code, "kept_folder", lambda: folder)


def test_every_operation_has_a_source() -> None:
    for name in cpu_code.OPERATIONS:
        assert compiler.operation(f"{name}-0" if name in ("embedding", "gemm", "rope_and_cache") else name)


def test_two_processes_may_compile_the_same_at_once(tmp_path: Path) -> None:
    code = "from cupaged.backends import cpu_code; print(cpu_code.compile_missing(['rms_norm', 'run']), cpu_code.address('rms_norm') > 0)"
    command, environment = [sys.executable, "-c", code], os.environ | {"CUPAGED_CACHE": str(tmp_path)}
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert {process.communicate()[0] for process in both} <= {"2 True\n", "1 True\n", "0 True\n"}
    (folder,) = tmp_path.iterdir()
    assert {path.stem for path in folder.iterdir()} == {"rms_norm", "run"}
    if os.name == "posix":  # a cache that one user fills serves others
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o644}


def test_a_file_that_cannot_be_written_leaves_no_half_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiler.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        compiler.compile_to(tmp_path, "dismiss")
    assert list(tmp_path.iterdir()) == []


def test_work_is_shared_so_that_processes_end_together() -> None:
    shares = cpu_code._shares(["run", "gemm-5", "attention", "sample_rows", "rms_norm"], 2)
    assert shares == [["attention", "rms_norm"], ["gemm-5", "sample_rows", "run"]]
    assert cpu_code._shares(["run"], 8) == [["run"]]
    assert cpu_code._shares([], 2) == []


def test_what_is_on_its_way_is_not_compiled_again_but_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    take_folder(monkeypatch, tmp_path)
    monkeypatch.setattr(cpu_code, "_workers", {})
    started: list[list[str]] = []
    monkeypatch.setattr(cpu_code, "_Worker", slow_worker(started, tmp_path))
    cpu_code.prepare(["gemm-5", "run"])
    cpu_code.prepare(["gemm-5"])
    assert cpu_code.compile_missing(["run", "gemm-5"]) == 2
    assert sorted(name for names in started for name in names) == ["gemm-5", "run"]
    assert cpu_code.compile_missing(["run", "gemm-5"]) == 0
    cpu_code.code_file(tmp_path, "run").unlink()
    assert cpu_code.compile_missing(["run", "gemm-5"]) == 1
    assert started[-1] == ["run"]


def test_who_asks_again_after_an_interrupt_waits_for_no_compiler_that_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    take_folder(monkeypatch, tmp_path)
    monkeypatch.setattr(cpu_code, "_workers", {})
    monkeypatch.setattr(cpu_code, "usable_cores", lambda: 2)
    compiler_of_old = cpu_code._WORKER
    monkeypatch.setattr(cpu_code, "_WORKER", "import time; time.sleep(60)")
    cpu_code.prepare(["rms_norm", "run"])
    both = list(cpu_code._workers.values())
    for worker in both:  # as Ctrl-C in a terminal does: it reaches all of them, and one is reported
        worker._process.kill()
    with pytest.raises(BackendError, match="ended with -9"):
        both[0].wait()
    both[1]._process.wait()
    monkeypatch.setattr(cpu_code, "_WORKER", compiler_of_old)
    assert cpu_code.compile_missing(["rms_norm", "run"]) == 2
    assert cpu_code.missing(["rms_norm", "run"]) == []


def slow_worker(started: list[list[str]], folder: Path) -> type:
    """Files are there when they are waited for, and not before."""

    class Worker:
        def __init__(self, names: list[str]) -> None:
            self.names = names
            started.append(names)

        def is_at_work(self) -> bool:
            return True

        def wait(self) -> None:
            for name in self.names:
                cpu_code.code_file(folder, name).touch()

    return Worker


def test_why_nothing_could_be_compiled_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    take_folder(monkeypatch, tmp_path)
    monkeypatch.setattr(cpu_code, "_workers", {})
    monkeypatch.setattr(cpu_code, "_WORKER", "raise OSError('no space left')")
    with pytest.raises(BackendError, match=r"^the CPU kernels cannot be compiled: OSError: no space left$"):
        cpu_code.compile_missing(["rms_norm"])
    monkeypatch.setattr(cpu_code, "_workers", {})
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(BackendError, match="does not know its own program"):
        cpu_code.compile_missing(["rms_norm"])
