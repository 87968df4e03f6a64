"""Machine code of the CPU kernels: what may become an image, how one is loaded, and what happens where none can be."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest

from cupaged.backends import cpu_code
from cupaged.backends.cpu_kernels import compiler, image
from cupaged.backends.cpu_program import float_word, numbers, operation
from cupaged.backends.cpu_threads import Crew
from cupaged.errors import BackendError

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
@pytest.mark.parametrize("damage", [b"", b"cupaged0" + bytes(100), struct.pack("<8sq", cpu_code.MAGIC, 1 << 40)])
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


# ---- compiling


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


def test_work_is_shared_so_that_processes_end_together() -> None:
    shares = cpu_code._shares(["run", "gemm-5", "attention", "sample_rows", "rms_norm"], 2)
    assert shares == [["attention", "rms_norm"], ["gemm-5", "sample_rows", "run"]]
    assert cpu_code._shares(["run"], 8) == [["run"]]
    assert cpu_code._shares([], 2) == []


def test_what_is_on_its_way_is_not_compiled_again_but_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_code, "folder", lambda: tmp_path)
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


def slow_worker(started: list[list[str]], folder: Path) -> type:
    """Files are there when they are waited for, and not before."""

    class Worker:
        def __init__(self, names: list[str]) -> None:
            self.names = names
            started.append(names)

        def wait(self) -> None:
            for name in self.names:
                cpu_code.code_file(folder, name).touch()

    return Worker


def test_why_nothing_could_be_compiled_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_code, "folder", lambda: tmp_path)
    monkeypatch.setattr(cpu_code, "_workers", {})
    monkeypatch.setattr(cpu_code, "_WORKER", "raise OSError('no space left')")
    with pytest.raises(BackendError, match=r"^the CPU kernels cannot be compiled: OSError: no space left$"):
        cpu_code.compile_missing(["rms_norm"])
    monkeypatch.setattr(cpu_code, "_workers", {})
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(BackendError, match="does not know its own program"):
        cpu_code.compile_missing(["rms_norm"])
