"""The CuPy that CupyDevice calls, on this machine's CPU: its kernels run on the emulator, its cuBLAS multiplies in NumPy.

Names and parameters are CuPy's; tests/test_cupy_device.py compares them with the real one's where that is installed. What
a GPU does later is done as late as can be: when the host waits for it, or a stream that the host waits for waits for an event of
it. A stream that is made hasty does everything as early as can be instead. A captured stream only notes its work.
Time passes as `Clock.cost` says, and is nothing otherwise.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from cupaged.backends import cupy_device, emu, few_rows
from cupaged.errors import ConfigError


class CUDARuntimeError(RuntimeError): ...
class CUDADriverError(RuntimeError): ...
class OutOfMemoryError(MemoryError): ...
class CompileException(Exception): ...


class ndarray(np.ndarray):  # CuPy's name
    """A device array. The host sees its content through `get` only: its own attributes are shape, dtype, flags and address."""

    def __new__(cls, shape: Any, dtype: Any = float, memptr: Any = None) -> ndarray:
        if memptr is None:
            memory = emu.empty(shape, dtype)
            Stream.kept.append(memory)
            return memory.view(cls)
        memory: PinnedMemory = memptr.mem.owner
        return memory.bytes[: int(np.prod(shape)) * np.dtype(dtype).itemsize].view(cls).view(dtype).reshape(shape)

    @property
    def data(self) -> Any:  # type: ignore[override]  # as CuPy's
        return SimpleNamespace(ptr=self.ctypes.data)

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> np.ndarray:
        assert not any(s.capturing for s in Stream.all), "a copy to the host in a captured region"
        if out is None:
            out = emu.empty(self.shape, self.dtype)
        assert (out.shape, out.dtype, out.flags.c_contiguous) == (self.shape, self.dtype, True)
        for each in Stream.all if stream is None else [stream]:
            each.do(lambda: np.copyto(out, self.view(np.ndarray)))
            if blocking:
                each.synchronize()
        return out


def install(monkeypatch: Any) -> CublasLibrary:
    """Put this in place of CuPy and cuBLAS in cupy_device; what a test changes of the machine is put right after it. What is
    measured is not kept."""
    library = CublasLibrary()
    Stream.begin(monkeypatch)
    for name, value in (("cupy", sys.modules[__name__]), ("cupyx", sys.modules[__name__]), ("load_library", lambda major: library)):
        monkeypatch.setattr(cupy_device, name, value)
    monkeypatch.setattr(few_rows, "cache_dir", no_folder)
    for name in ("now", "cost"):
        monkeypatch.setattr(Clock, name, getattr(Clock, name))
    for name in ("count", "capability", "free", "total"):
        monkeypatch.setattr(Device, name, getattr(Device, name))
    return library


def no_folder() -> Any:
    raise ConfigError("a test keeps nothing")


class Clock:
    """Seconds of the GPU, by the name of a kernel, or "gemm", and its number of rows."""

    now: ClassVar[float] = 0.0
    cost: ClassVar[Callable[[str, int], float]] = lambda name, rows: 0.0

    @staticmethod
    def spend(name: str, rows: int) -> None:
        Clock.now += Clock.cost(name, rows)


class Stream:
    all: ClassVar[list[Stream]] = []
    stack: ClassVar[list[Stream]] = []
    kept: ClassVar[list[np.ndarray]] = []
    """Memory that work in a queue may name by its address; a pool, too, gives it out again in the stream's order only."""

    @staticmethod
    def begin(monkeypatch: Any) -> None:
        """For a test of its own: nothing is left of what others asked for."""
        for name in ("all", "stack", "kept"):
            monkeypatch.setattr(Stream, name, [])

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: Any = None) -> None:
        self.capturing: list[Callable[[], None]] | None = None
        self.queue: list[Callable[[], None]] = []
        self.hasty, self.non_blocking = False, non_blocking
        Stream.all.append(self)
        self.ptr = len(Stream.all)

    def __enter__(self) -> Stream:
        Stream.stack.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        Stream.stack.pop()

    def begin_capture(self, mode: Any = None) -> None:
        self.capturing = []

    def end_capture(self) -> Graph:
        assert self.capturing is not None
        graph, self.capturing = Graph(self.capturing), None
        return graph

    def synchronize(self) -> None:
        while self.queue:
            self.work()

    def work(self) -> None:
        """Do what was asked for first."""
        self.queue.pop(0)()
        if not any(stream.queue for stream in Stream.all):
            Stream.kept.clear()

    def do(self, work: Callable[[], None]) -> None:
        (self.queue if self.capturing is None else self.capturing).append(work)
        if self.hasty:
            self.synchronize()

    def wait_event(self, event: Event) -> None:
        assert self.capturing is None, "another stream's event in a captured region"
        turn = event.recorded  # it may be recorded again
        self.do(lambda: event.work_until(turn))


class Graph:
    def __init__(self, work: list[Callable[[], None]]) -> None:
        self.work = work

    def launch(self, stream: Any = None) -> None:
        for step in self.work:
            stream.do(step)


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.recorded = self.reached = 0
        self.stream: Any = None
        self.time: float | None = None
        self.disable_timing = disable_timing

    def record(self, stream: Any = None) -> None:
        self.recorded += 1
        self.stream, turn = stream, self.recorded
        stream.do(lambda: self.reach(turn))

    def reach(self, turn: int) -> None:
        self.reached, self.time = turn, None if self.disable_timing else Clock.now

    @property
    def done(self) -> bool:
        return self.reached == self.recorded

    def synchronize(self) -> None:
        self.work_until(self.recorded)

    def work_until(self, turn: int) -> None:
        while self.reached < turn:
            self.stream.work()


class Device:
    count, capability, free, total = 1, "90", 70 << 30, 80 << 30

    def __init__(self, device: Any = None) -> None:
        self.id = device or 0
        self.compute_capability, self.attributes = Device.capability, {"MultiProcessorCount": 2}
        self.mem_info = Device.free, Device.total

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None: ...


class PinnedMemory:
    def __init__(self, size: int, flags: int = 0) -> None:
        self.bytes = emu.empty((size,), np.uint8)
        self.ptr = self.bytes.ctypes.data


class RawModule:
    def __init__(self, code: Any = None, *, path: Any = None, options: tuple[str, ...] = (), backend: str = "nvrtc") -> None:
        self.module = emu.Module(code, tuple(o for o in options if o.startswith("-D")), name="kernel.cu", mode="check")

    def get_function(self, name: str) -> RawKernel:
        return RawKernel(self.module.get_function(name), name)


class RawKernel:
    def __init__(self, kernel: Any, name: str) -> None:
        self.name = name
        self.kernel, self.max_dynamic_shared_size_bytes = kernel, 48 << 10

    def __call__(self, grid: Any, block: Any, args: Any, **kwargs: Any) -> None:
        shared = kwargs.pop("shared_mem", 0)
        assert not kwargs
        assert shared <= self.max_dynamic_shared_size_bytes
        plain = tuple(a.view(np.ndarray) if isinstance(a, ndarray) else a for a in args)

        def run() -> None:
            self.kernel.max_dynamic_shared_size_bytes = shared
            self.kernel(grid, block, plain, shared_mem=shared)
            Clock.spend(self.name, len(plain[0]))

        Stream.stack[-1].do(run)


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:  # CuPy's name
    assert kind in (runtime.memcpyHostToDevice, runtime.memcpyDefault)
    assert Stream.all[stream - 1].capturing is None
    Stream.all[stream - 1].do(lambda: ctypes.memmove(dst, src, size) and None)


def memcpy2DAsync(dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: int, stream: int) -> None:  # CuPy's name
    assert width <= min(dpitch, spitch)
    for row in range(height):
        memcpyAsync(dst + row * dpitch, src + row * spitch, width, kind, stream)


def getDeviceCount() -> int:  # CuPy's name
    if Device.count < 0:
        raise CUDARuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version")
    return Device.count


def getDeviceProperties(device: int) -> dict[str, Any]:  # CuPy's name
    return {"name": b"NVIDIA Fake"}


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Milliseconds."""
    assert start_event.done
    assert end_event.done
    assert start_event.time is not None
    assert end_event.time is not None
    return 1000 * (end_event.time - start_event.time)


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    if np.dtype(dtype) == ml_dtypes.float8_e4m3fn:
        raise TypeError("Unsupported type")  # as CuPy
    if np.prod(shape, dtype=np.int64) * np.dtype(dtype).itemsize > Device.total:
        raise OutOfMemoryError("Out of memory allocating 1 bytes")
    return ndarray(shape, dtype)


def empty_pinned(shape: Any, dtype: Any = float, order: str = "C") -> np.ndarray:
    memory = emu.empty(shape, dtype)
    Stream.kept.append(memory)
    return memory


def get_default_memory_pool() -> Any:
    return SimpleNamespace(free_bytes=lambda: 1 << 20)


runtime = SimpleNamespace(
    memcpyAsync=memcpyAsync, memcpy2DAsync=memcpy2DAsync, memcpyHostToDevice=1, memcpyDefault=4, getDeviceCount=getDeviceCount, getDeviceProperties=getDeviceProperties, runtimeGetVersion=lambda: 12090, CUDARuntimeError=CUDARuntimeError
)
cuda = SimpleNamespace(
    Stream=Stream, Event=Event, PinnedMemory=PinnedMemory, Device=Device, Graph=Graph, runtime=runtime, driver=SimpleNamespace(CUDADriverError=CUDADriverError),
    get_elapsed_time=get_elapsed_time, memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError), compiler=SimpleNamespace(CompileException=CompileException),
    UnownedMemory=lambda ptr, size, owner, device_id=-1: SimpleNamespace(owner=owner), MemoryPointer=lambda mem, offset: SimpleNamespace(mem=mem),
)  # fmt: skip


class Function:
    """A function of a ctypes library: callable, with `argtypes`, which every call must fit."""

    def __init__(self, call: Callable[..., int]) -> None:
        self.call, self.argtypes = call, ()

    def __call__(self, *arguments: Any) -> int:
        assert len(arguments) == len(self.argtypes)
        return self.call(*arguments)


class CublasLibrary:
    """cublasGemmEx on addresses, counting along columns first as cuBLAS does."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.stream = 0  # that was set last
        self.streams: dict[int, int] = {}  # of a handle
        for name in ("cublasCreate_v2", "cublasDestroy_v2", "cublasSetStream_v2", "cublasSetWorkspace_v2", "cublasGetVersion_v2", "cublasGemmEx"):
            setattr(self, name, Function(getattr(self, "_" + name)))

    def _cublasCreate_v2(self, handle: Any) -> int:  # cuBLAS's names
        handle._obj.value = 7 + self.calls.count("create")
        return self._called("create")

    def _cublasDestroy_v2(self, handle: Any) -> int:
        return self._called("destroy")

    def _cublasSetStream_v2(self, handle: Any, stream: int) -> int:
        self.stream = self.streams[handle.value] = stream
        return self._called("stream")

    def _cublasSetWorkspace_v2(self, handle: Any, workspace: int, size: int) -> int:
        assert workspace % 256 == 0
        return self._called(f"workspace {size}")

    def _cublasGetVersion_v2(self, handle: Any, version: Any) -> int:
        version._obj.value = 120901
        return 0

    def _called(self, what: str) -> int:
        self.calls.append(what)
        return 0

    def _cublasGemmEx(
        self, handle: Any, transa: int, transb: int, m: int, n: int, k: int, alpha: Any, a: int, atype: int, lda: int,
        b: int, btype: int, ldb: int, beta: Any, c: int, ctype: int, ldc: int, compute: int, algorithm: int,
    ) -> int:  # fmt: skip
        assert (transa, transb, compute) == (1, 0, 68)
        if atype != btype or ctype not in (atype, 0):
            return 15
        left, right, out = columns(a, atype, lda, m), columns(b, btype, ldb, n), columns(c, ctype, ldc, n)  # [k, m], [k, n], [m, n]
        scale, keep = alpha._obj.value, beta._obj.value

        def multiply() -> None:
            product = scale * (left[:k].astype(np.float32).T @ right[:k].astype(np.float32))
            out[:m] = (product + keep * out[:m].astype(np.float32) if keep else product).astype(out.dtype)
            Clock.spend("gemm", n)

        Stream.all[self.streams[handle.value] - 1].do(multiply)
        return self._called("gemm")


def columns(address: int, code: int, leading: int, count: int) -> np.ndarray:
    """A matrix of `count` columns of `leading` numbers at an address."""
    dtype = np.dtype({0: np.float32, 2: np.float16, 14: ml_dtypes.bfloat16}[code])
    memory = (ctypes.c_char * (leading * count * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype).reshape(count, leading).T
