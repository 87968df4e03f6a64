"""CupyDevice against a small CuPy of our own: the real kernels, on the emulator, through every call that a GPU would get."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged.backends import cublas, cupy_device, nvrtc
from cupaged.backends.cuda_folders import cuda_files
from cupaged.backends.cupy_device import CupyDevice
from cupaged.backends.kernels import KernelBackend
from cupaged.backends.reference import ReferenceBackend
from cupaged.conformance.paged import Paged
from cupaged.conformance.steps import Stored
from cupaged.conformance.subject import random
from cupaged.errors import BackendError, InvariantError
from tests.support import fake_cupy
from tests.support.kernels import skip_without_compiler

TYPES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2}


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_cupy.CublasLibrary]:
    skip_without_compiler()
    return fake_cupy.install(monkeypatch)


def close(actual: np.ndarray, expected: np.ndarray, name: str) -> None:
    wide = actual.astype(np.float32)
    assert np.isfinite(wide).all()
    assert np.abs(wide - expected).max() <= TYPES[name] * np.abs(expected).max()


# ---- memory


def test_arrays_go_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_device, "STAGE_BYTES", 64)  # so that one array takes several pieces
    device, x = CupyDevice(), random(0, 7, 9)
    there = device.upload(x)
    assert np.array_equal(device.download(there), x)
    device.fill(there[2:4], 5 + 0 * x[:2])
    x[2:4] = 5
    assert np.array_equal(device.download(there), x)
    assert device.peek(there) is None
    assert np.array_equal(device.download(device.upload(x[:, ::2])), x[:, ::2])
    assert device.download(device.upload(np.zeros((0, 3), np.float32))).shape == (0, 3)


def test_a_mailbox_has_fixed_addresses_and_takes_what_fits() -> None:
    mailbox = CupyDevice().mailbox({"ids": (5, np.int32), "slots": (3, np.int64), "none": (0, np.int32)})
    before = {name: array.data.ptr for name, array in mailbox.arrays.items()}
    for turn in range(4):
        content = {"ids": np.arange(5, dtype=np.int32) + turn, "slots": np.array([-1, 2**40 + turn], np.int64)}
        mailbox.post(content)
        for values in content.values():
            values.fill(0)  # it may change afterwards
        assert mailbox.arrays["ids"].get().tolist() == list(range(turn, 5 + turn))
        assert mailbox.arrays["slots"][:2].get().tolist() == [-1, 2**40 + turn]
    assert before == {name: array.data.ptr for name, array in mailbox.arrays.items()}
    with pytest.raises(BackendError, match="6 numbers of ids do not fit 5"):
        mailbox.post({"ids": np.zeros(6, np.int32)})


def test_downloads_are_waited_for_alone() -> None:
    device, x = CupyDevice(), np.arange(6, dtype=np.int32)
    there = device.upload(x)
    first = device.download_later(there[1:3])
    device.fill(there, x + 10)
    second = device.download_later(there.reshape(2, 3))
    dropped = device.download_later(there)
    assert device.download_later(device.empty((3, 0), np.float32)).wait().shape == (3, 0)
    device.fill(there, x + 20)
    behind = len(device._stream.queue)
    assert first.wait().tolist() == [1, 2]
    assert second.wait().tolist() == [[10, 11, 12], [13, 14, 15]]
    assert len(device._stream.queue) == behind  # what was asked for after them is not waited for
    del dropped
    assert device.download(there).tolist() == (x + 20).tolist()
    device.download_later(there)
    assert len(device._coming) == 1


def test_small_content_is_not_waited_for() -> None:
    device = CupyDevice()
    there = [device.empty((5,), np.int32) for _ in range(cupy_device.NUM_SMALL)]
    for i, array in enumerate(there):
        device.fill(array, np.full(5, i, np.int32))
    assert len(device._stream.queue) == 2 * len(there)
    assert [int(device.download(array)[0]) for array in there] == list(range(len(there)))


def test_keys_and_values_in_8_bits_are_bytes() -> None:
    device = CupyDevice()
    backend = KernelBackend(device, np.float32, ml_dtypes.float8_e4m3fn)
    assert backend.new_kv_cache(1, 2, 1, 4, 8)[0].dtype == np.uint8
    assert backend.new_swap_space(1, 2, 1, 4, 8)[0].dtype == np.uint8


# ---- products


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("result", ["float32", "same"])
@pytest.mark.parametrize("add", [False, True])
def test_products_in_every_type(name: str, result: str, add: bool) -> None:
    device, dtype = CupyDevice(), np.dtype(name)
    x, weight = (random(seed, *shape).astype(dtype) for seed, shape in ((0, (6, 40)), (1, (9, 40))))
    start = random(2, 6, 9).astype(np.float32 if result == "float32" else dtype)
    out = device.upload(start)
    device.gemm(device.upload(x), device.upload(weight), out, add=add)
    expected = x.astype(np.float32) @ weight.astype(np.float32).T + (start.astype(np.float32) if add else 0)
    close(device.download(out), expected, name)


def test_the_handle_gets_its_stream_once_and_its_workspace_after_it(library: fake_cupy.CublasLibrary) -> None:
    device = CupyDevice()
    assert library.calls == ["create", "stream", f"workspace {32 << 20}"]
    assert library.stream == device._stream.ptr
    del device
    assert library.calls[-1] == "destroy"


def test_products_that_cublas_would_read_wrongly_are_refused() -> None:
    device = CupyDevice()
    x, w = device.upload(random(0, 4, 8)), device.upload(random(1, 3, 8))
    for out_shape, weight, message in (((4, 4), w, "a product of"), ((4, 3), device.upload(random(1, 3, 9)), "a product of")):
        with pytest.raises(InvariantError, match=message):
            device.gemm(x, weight, device.empty(out_shape, np.float32))
    with pytest.raises(InvariantError, match="must be one type"):
        device.gemm(x, device.upload(random(1, 3, 8).astype(np.float16)), device.empty((4, 3), np.float32))
    with pytest.raises(InvariantError, match="all contiguous"):
        device.gemm(device.upload(random(0, 4, 16))[:, ::2], w, device.empty((4, 3), np.float32))


def test_an_error_of_cublas_says_what_failed(library: fake_cupy.CublasLibrary) -> None:
    device = CupyDevice()
    library.cublasGemmEx.call = lambda *_: 13
    x = device.upload(random(0, 4, 8))
    with pytest.raises(BackendError, match=r"cuBLAS: cublasGemmEx failed: execution failed \(13\)"):
        device.gemm(x, x, device.empty((4, 4), np.float32))


def test_a_machine_without_cublas_gets_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It was looked for in wheels, in toolkits and where the loader looks; headers are found in the same places."""
    wheels, toolkit, tried = tmp_path / "nvidia", tmp_path / "toolkit", list[str]()

    def load(path: str) -> None:
        tried.append(path)
        raise OSError(path)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(wheels)]))
    monkeypatch.setenv("CUDA_PATH", str(toolkit))
    monkeypatch.setattr(cublas.ctypes, "CDLL", load)
    with pytest.raises(BackendError, match=r"cuBLAS \(libcublas.so.13\) is not found: pip install 'cupaged\[cuda13\]'"):
        cublas.load_library(13)
    folders = wheels / "cublas" / "lib", wheels / "cu13" / "lib", toolkit / "lib64", Path("/usr/local/cuda/lib64"), Path()
    assert tried == [str(folder / "libcublas.so.13") for folder in folders]
    for folder in (toolkit / "include", wheels / "cu13" / "include", wheels / "cuda_runtime" / "include"):
        folder.mkdir(parents=True)
        (folder / "cuda_fp16.h").touch()
        assert nvrtc.include_folder() == folder
    monkeypatch.setenv("CUDA_PATH", "")
    assert [str(path) for path in cuda_files("cublas", "lib", "x")][2:] == ["/usr/local/cuda/lib64/x"]


# ---- kernels and graphs


@pytest.mark.parametrize("name", TYPES)
def test_the_whole_attention_of_a_step(name: str) -> None:
    """rope_and_cache, the tensor-core kernels and the others, through CuPy's calls, against the float64 formula."""
    backend, dtype = KernelBackend(CupyDevice(), np.dtype(name)), np.dtype(name)
    paged = Paged([15, 33, 40, 70], [1, 1, 7, 70], 16, 2, 3, 64)
    paged.qkv = paged.qkv.astype(dtype).astype(np.float32)
    paged.keys, paged.values = ([a.astype(dtype).astype(np.float32) for a in arrays] for arrays in (paged.keys, paged.values))
    caches = [backend.upload(np.nan_to_num(content).astype(dtype)) for content in paged.pool()]
    out = backend.empty((paged.rows, paged.heads * paged.head_dim), dtype)
    backend.attention(backend.upload(paged.qkv.astype(dtype)), *caches, paged.load(backend), paged.heads, 0.3, 0, out)
    close(backend.download(out), paged.attention(0.3, 0), name)


def test_a_graph_of_kernels_and_products_is_replayed() -> None:
    backend, reference = KernelBackend(CupyDevice()), ReferenceBackend()
    weight, norm = random(0, 16, 16), random(1, 16)
    matrix, expected_matrix = (b.load_matrix([Stored(weight)]) for b in (backend, reference))
    x, out = backend.empty((8, 16), np.float32), backend.empty((8, 16), np.float32)
    scale = backend.upload(norm)

    def work() -> None:
        backend.rms_norm(x, scale, 1e-5, out)
        backend.linear_add(out, matrix, x)

    graph = backend._device.capture(work)
    expected, normed = random(2, 8, 16), np.empty((8, 16), np.float32)
    backend._device.fill(x, expected)
    for _ in range(2):
        graph.replay()
        reference.rms_norm(expected, norm, 1e-5, normed)
        reference.linear_add(normed, expected_matrix, expected)
        close(backend.download(x), expected, "float32")


def test_a_captured_region_neither_allocates_nor_copies() -> None:
    device, host = CupyDevice(), np.zeros(4, np.float32)
    there, mailbox = device.upload(host), device.mailbox({"x": (4, np.float32)})
    for forbidden in (
        lambda: device.empty((4,), np.float32), lambda: device.empty_host((1,), np.int8), lambda: device.upload(host), lambda: device.fill(there, host),
        lambda: device.download(there), lambda: device.download_later(there), lambda: device.mailbox({}), lambda: mailbox.post({"x": host}),
        lambda: device.capture(lambda: None),
    ):  # fmt: skip
        with pytest.raises(BackendError, match="captured region"):
            device.capture(forbidden)
        assert device._stream.capturing is None
    device.empty((4,), np.float32)


def test_a_fault_of_the_step_before_shows_as_ours_when_the_next_is_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    mailbox = CupyDevice().mailbox({"x": (4, np.float32)})

    def fault(self: fake_cupy.Event) -> None:
        raise fake_cupy.CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    monkeypatch.setattr(fake_cupy.Event, "synchronize", fault)
    with pytest.raises(BackendError, match=r"^CUDA: cudaErrorIllegalAddress"):
        mailbox.post({"x": np.zeros(4, np.float32)})


def test_blocks_are_swapped_with_pinned_memory() -> None:
    backend = KernelBackend(CupyDevice())
    pool, space = backend.new_kv_cache(2, 4, 1, 4, 8), backend.new_swap_space(2, 3, 1, 4, 8)
    for i, cache in enumerate(pool):
        backend._device.fill(cache, random(i, 2, 4, 1, 4, 8))
    before = [backend.download(cache) for cache in pool]
    backend.swap_blocks(pool, space, np.array([[1, 2], [3, 0]], np.int32))
    backend.swap_blocks(space, pool, np.array([[2, 0]], np.int32))
    for cache, was in zip(pool, before, strict=True):
        assert np.array_equal(backend.download(cache)[:, 0], was[:, 1])


# ---- what a user may meet


@pytest.mark.parametrize(
    ("changes", "index", "message"),
    [
        ({"count": -1}, 0, r"^no NVIDIA GPU can be used \(CUDA driver version is insufficient for CUDA runtime version\): install a driver, or use device cpu$"),
        ({"count": 0}, 0, "^this machine has no NVIDIA GPU: use device cpu$"),
        ({"count": 2}, 2, "^there is no GPU 2: this machine has 2, counted from 0$"),
        ({"capability": "75"}, 0, r"^GPU 0 is too old \(sm_75\): the kernels want sm_80 or newer; use device cpu$"),
        ({"capability": "100"}, 0, None),
    ],
)
def test_machines_that_will_not_do(changes: dict[str, Any], index: int, message: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in changes.items():
        monkeypatch.setattr(fake_cupy.Device, name, value)
    if message is None:
        assert CupyDevice(index).capability == (10, 0)
        return
    with pytest.raises(BackendError, match=message):
        CupyDevice(index)


def test_without_cupy_there_is_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_device, "cupy", None)
    monkeypatch.setattr(cupy_device, "_missing", "No module named 'cupy'")
    with pytest.raises(BackendError, match=r"^no CuPy \(No module named 'cupy'\): pip install 'cupaged\[cuda12\]' or 'cupaged\[cuda13\]'$"):
        CupyDevice()


def test_full_memory_names_the_knobs() -> None:
    with pytest.raises(BackendError, match=r"^the GPU's memory is full .*num_blocks, gpu_memory_utilization, max_num_batched_tokens or max_num_seqs$"):
        CupyDevice().empty((1 << 40,), np.float32)
    assert CupyDevice().memory() == ((70 << 30) + (1 << 20), 80 << 30)


# ---- time


def test_work_is_timed_between_two_events() -> None:
    device = CupyDevice()
    fake_cupy.Clock.cost = lambda name, rows: rows / 8
    x = device.upload(random(0, 4, 40))

    def work() -> None:
        device.gemm(x, x, out)
        device.gemm(x[:2], x, out[:2])

    out = device.empty((4, 4), np.float32)
    work()  # before, and not in it
    assert device.seconds(work) == 0.75
    graph = device.capture(work)
    assert device.seconds(lambda: [graph.replay(), graph.replay()]) == 1.5
    with pytest.raises(BackendError, match="a captured region measures time"):
        device.capture(lambda: device.seconds(work))
    assert device.seconds(work) == 0.75


def test_what_measurements_are_kept_under() -> None:
    assert CupyDevice().kind == "NVIDIA Fake, sm_90, 2 multiprocessors, cuBLAS 120901"


# ---- the fake is like the real one

CALLS = {
    "cuda.Stream": "null non_blocking ptds priority", "cuda.Stream.begin_capture": "mode", "cuda.Stream.end_capture": "", "cuda.Stream.synchronize": "",
    "cuda.Stream.wait_event": "event", "cuda.runtime.memcpy2DAsync": "dst dpitch src spitch width height kind stream",
    "cuda.Event": "block disable_timing interprocess", "cuda.Event.record": "stream", "cuda.Event.synchronize": "", "cuda.Graph.launch": "stream",
    "cuda.Device": "device", "cuda.PinnedMemory": "size flags", "RawModule": "code path options backend", "RawModule.get_function": "name", "RawKernel.__call__": "grid block args kwargs",
    "ndarray.get": "stream order out blocking", "empty": "shape dtype order", "empty_pinned": "shape dtype order",
    "cuda.runtime.memcpyAsync": "dst src size kind stream", "cuda.runtime.getDeviceCount": "",
    "cuda.runtime.getDeviceProperties": "device", "cuda.get_elapsed_time": "start_event end_event",
}  # fmt: skip


def find(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module


@pytest.mark.parametrize("name", CALLS)
def test_the_fake_has_the_parameters_that_are_used(name: str) -> None:
    parameters = [p for p in inspect.signature(find(fake_cupy, name)).parameters if p != "self"]
    assert parameters == CALLS[name].split()


@pytest.mark.parametrize("name", CALLS)
def test_the_real_one_has_them_too(name: str) -> None:
    cupy = pytest.importorskip("cupy", exc_type=ImportError)
    real = find(__import__("cupyx") if name == "empty_pinned" else cupy, name)
    try:
        parameters = list(inspect.signature(real).parameters)
    except ValueError:  # compiled: its documentation begins with the signature
        declared = re.match(r"[\w.]+\((.*?)\)(?: ->|\n|$)", (real.__doc__ or "").strip(), re.DOTALL)
        assert declared, real.__doc__
        parameters = re.findall(r"(\w+)(?:=[^,]*)?(?:,|$)", re.sub(r"\([^)]*\)", "", declared[1]))
    assert set(CALLS[name].split()) <= {p.split()[-1].lstrip("*") for p in parameters}
