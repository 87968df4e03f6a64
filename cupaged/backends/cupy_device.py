"""CupyDevice: the kernels on an NVIDIA GPU, by CuPy. The only module that imports cupy.

Everything is asked for on one stream of its own, in order; swaps on a second one, by the GPU's copy engines, so that they
take nothing from the kernels that run meanwhile. Events order the two. Kernels are compiled by NVRTC when they are first
launched; CuPy keeps them on disk by their text, which has its headers inlined, so a changed header is another kernel.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import kernels_cu
from cupaged.backends.cublas import Cublas, load_library
from cupaged.backends.device import Graph, Mailbox
from cupaged.backends.download import Coming
from cupaged.backends.kernel_swaps import runs_of
from cupaged.backends.launch import Launch, Variant
from cupaged.errors import BackendError

try:
    import cupy
    import cupyx

    _missing = None
except ImportError as error:  # not installed, or a CUDA installation that cannot be loaded
    cupy = cupyx = None
    _missing = " ".join(str(error).split())

Array = Any

OLDEST = (8, 0)
"""The first architecture with cp.async and bfloat16 tensor cores (Ampere)."""

STAGE_BYTES = 8 << 20
"""A pinned buffer that host memory is copied through: twice so much is pinned."""

SMALL_BYTES, NUM_SMALL = 16 << 10, 64
"""Pinned buffers for small content: which rows are wanted, which blocks are copied. Two steps need fewer, so the host never
waits for the first of them while it asks for the second."""

PLAIN_SHARED_BYTES = 48 << 10
"""Dynamic shared memory that a kernel may have without asking."""

ALIGNMENT = 256

LARGEST_PITCH = 2**31 - 1
"""Bytes from one row to the next in a copy of rows: cudaDeviceProp's memPitch."""

_KNOBS = "take a smaller model, or lower num_blocks, gpu_memory_utilization, max_num_batched_tokens or max_num_seqs"


class CupyDevice:
    """Implements device.Device on GPU number `index`.

    Raises BackendError, in one line with the remedy: no CuPy, no driver, no such GPU, one that is too old, no NVRTC or
    cuBLAS, no memory.
    """

    name = "cuda"
    asynchronous = True

    def __init__(self, index: int = 0) -> None:
        if cupy is None:
            raise BackendError(f"no CuPy ({_missing}): pip install 'cupaged[cuda12]' or 'cupaged[cuda13]'")
        self._device = cupy.cuda.Device(_check_index(index))
        self.capability = _capability(self._device)
        self.multiprocessors = int(self._device.attributes["MultiProcessorCount"])
        self._kernels: dict[tuple[Variant, int], Any] = {}
        self._capturing = False
        self._coming: list[Coming] = []  # for those that nobody waits for: their memory must stay, too
        with self._device:
            self._stream = cupy.cuda.Stream()  # ordered with the null stream, on which others use CuPy
            self._swapping = cupy.cuda.Stream(non_blocking=True)
            self._stage, self._small = _Stage(self._stream, 2, STAGE_BYTES), _Stage(self._stream, NUM_SMALL, SMALL_BYTES)
            workspace = (32 if self.capability >= (9, 0) else 4) << 20
            self._workspace = self.empty((workspace,), np.uint8)
            library = load_library(cupy.cuda.runtime.runtimeGetVersion() // 1000)
            self._cublas = Cublas(library, self._stream.ptr, self._workspace.data.ptr, workspace)

    @contextmanager
    def on(self) -> Iterator[None]:
        """With this GPU and stream as CuPy's own, and CuPy's errors as ours."""
        try:
            with self._device, self._stream:
                yield
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise BackendError(f"the GPU's memory is full ({error}): {_KNOBS}") from error
        except cupy.cuda.compiler.CompileException as error:
            raise BackendError(f"a kernel does not compile for sm_{self.capability[0]}{self.capability[1]}:\n{error}") from error
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise BackendError(f"CUDA: {error}") from error
        except cupy.cuda.driver.CUDADriverError as error:
            raise BackendError(f"CUDA's driver: {error}") from error

    @property
    def kind(self) -> str:
        name = cupy.cuda.runtime.getDeviceProperties(self._device.id)["name"].decode()
        major, minor = self.capability
        return f"{name}, sm_{major}{minor}, {self.multiprocessors} multiprocessors, cuBLAS {self._cublas.version}"

    # ---- memory

    def memory(self) -> tuple[int, int]:
        """Bytes of the GPU: free, counting what CuPy holds and does not use, and all."""
        with self.on():
            free, total = self._device.mem_info
            pool = cupy.get_default_memory_pool()
            return int(free) + pool.free_bytes(), int(total)

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        self.not_in_a_graph("allocates")
        with self.on():
            return cupy.empty(shape, _stored(dtype))

    def empty_host(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Pinned memory as a device array: what the GPU copies by itself must not be paged out meanwhile."""
        self.not_in_a_graph("allocates")
        with self.on():
            stored = _stored(dtype)
            size = max(math.prod(shape) * stored.itemsize, 1)
            pinned = cupy.cuda.PinnedMemory(size)  # not from CuPy's pool, which rounds up to a power of two
            memory = cupy.cuda.UnownedMemory(pinned.ptr, size, pinned, self._device.id)
            return cupy.ndarray(shape, stored, cupy.cuda.MemoryPointer(memory, 0))

    def mailbox(self, sizes: Mapping[str, tuple[int, npt.DTypeLike]]) -> Mailbox:
        self.not_in_a_graph("allocates")
        with self.on():
            return CupyMailbox(self, self._stream, sizes)

    def upload(self, array: npt.NDArray[Any]) -> Array:
        target = self.empty(array.shape, array.dtype)
        self.fill(target, array)
        return target

    def fill(self, target: Array, content: npt.NDArray[Any]) -> None:
        self.not_in_a_graph("uploads")
        with self.on():
            stage = self._small if content.nbytes <= SMALL_BYTES else self._stage
            if target.flags.c_contiguous:
                stage.copy(target.data.ptr, np.ascontiguousarray(content))
            elif content.size:
                stage.copy_rows(target.data.ptr, target.strides[0], np.ascontiguousarray(content))

    def download(self, array: Array) -> npt.NDArray[Any]:
        self.not_in_a_graph("downloads")
        with self.on():
            host: npt.NDArray[Any] = array.get(stream=self._stream)
            return host

    def download_later(self, array: Array) -> Coming:
        self.not_in_a_graph("downloads")
        with self.on():
            self._coming = [download for download in self._coming if not download.event.done]
            memory, event = cupyx.empty_pinned((max(array.nbytes, 1),), np.uint8), cupy.cuda.Event(disable_timing=True)
            pinned = memory[: array.nbytes].view(array.dtype).reshape(array.shape)
            array.get(stream=self._stream, out=pinned, blocking=False)
            event.record(self._stream)
            self._coming.append(Coming(pinned, event, self.on))
        return self._coming[-1]

    def peek(self, array: Array) -> None:
        return None

    # ---- work

    def launch(self, launch: Launch) -> None:
        if launch.is_empty:
            return
        with self.on():
            kernel = self._kernel(launch.variant, launch.shared_bytes)
            kernel(launch.grid, launch.block, launch.arguments, shared_mem=launch.shared_bytes)

    def gemm(self, x: Array, weight: Array, out: Array, *, add: bool = False) -> None:
        if len(x):
            with self.on():
                self._cublas.gemm(x, weight, out, add=add)

    def swap(self, source: tuple[Array, Array], target: tuple[Array, Array], pairs: npt.NDArray[np.int32], after: Any) -> CupyMark:
        self.not_in_a_graph("swaps")
        with self.on():
            self._swapping.wait_event(after.event)
            for old, new in zip(source, target, strict=True):
                _copy_blocks(self._swapping, old, new, pairs)
            return CupyMark(self._swapping, self.on)

    def mark(self) -> CupyMark:
        self.not_in_a_graph("marks")
        with self.on():
            return CupyMark(self._stream, self.on)

    def wait_for(self, mark: Any) -> None:
        self.not_in_a_graph("waits")
        with self.on():
            self._stream.wait_event(mark.event)

    def seconds(self, work: Callable[[], None]) -> float:
        self.not_in_a_graph("measures time")
        with self.on():
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(self._stream)
            work()
            end.record(self._stream)
            end.synchronize()
            return float(cupy.cuda.get_elapsed_time(start, end)) / 1000

    def capture(self, work: Callable[[], None]) -> Graph:
        self.not_in_a_graph("captures")
        with self.on():
            self._stream.begin_capture()
            self._capturing = True
            try:
                work()
            except BaseException:
                with suppress(cupy.cuda.runtime.CUDARuntimeError):  # a stream that goes on capturing would refuse all else
                    self._stream.end_capture()
                raise
            finally:
                self._capturing = False
            return CupyGraph(self, self._stream.end_capture())

    def replay(self, graph: Any) -> None:
        """Launch a CuPy graph."""
        with self.on():
            graph.launch(self._stream)

    def not_in_a_graph(self, what: str) -> None:
        if self._capturing:
            raise BackendError(f"a captured region {what}: a graph would keep an address that is not its own")

    def _kernel(self, variant: Variant, shared_bytes: int) -> Any:
        """The compiled kernel, allowed so much dynamic shared memory."""
        if (variant, shared_bytes) not in self._kernels:
            options = ("-std=c++17", *variant.options)
            kernel = cupy.RawModule(code=kernels_cu.source(variant.source), options=options, backend="nvrtc").get_function(variant.kernel)
            if shared_bytes > PLAIN_SHARED_BYTES:
                kernel.max_dynamic_shared_size_bytes = shared_bytes
            self._kernels[variant, shared_bytes] = kernel
        return self._kernels[variant, shared_bytes]


class CupyMark:
    """Implements device.Mark: an event behind what a stream was asked for until now."""

    def __init__(self, stream: Any, on: Callable[[], AbstractContextManager[None]]) -> None:
        self.event, self._on = cupy.cuda.Event(disable_timing=True), on
        self.event.record(stream)

    @property
    def done(self) -> bool:
        with self._on():
            return bool(self.event.done)


class CupyGraph:
    """Implements device.Graph."""

    def __init__(self, device: CupyDevice, graph: Any) -> None:
        self._device, self._graph = device, graph

    def replay(self) -> None:
        self._device.replay(self._graph)


class CupyMailbox:
    """Implements device.Mailbox: one stretch of the GPU's memory, filled by one copy from pinned memory.

    There are two pinned copies, so a step can be posted while the one before is still on its way.
    """

    def __init__(self, device: CupyDevice, stream: Any, sizes: Mapping[str, tuple[int, npt.DTypeLike]]) -> None:
        self._device, self._stream = device, stream
        self._places: dict[str, tuple[int, int, np.dtype[Any]]] = {}
        end = 0
        for name, (size, dtype) in sizes.items():
            stored = np.dtype(dtype)
            self._places[name] = (end, size, stored)
            end += -(-size * stored.itemsize // ALIGNMENT) * ALIGNMENT
        self._memory = cupy.empty((max(end, 1),), np.uint8)
        self._pinned = [cupyx.empty_pinned((max(end, 1),), np.uint8) for _ in range(2)]
        self._sent = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]
        self._turn = 0
        self.arrays = {
            name: self._memory[at : at + size * stored.itemsize].view(stored) for name, (at, size, stored) in self._places.items()
        }

    def post(self, content: Mapping[str, npt.NDArray[Any]]) -> None:
        self._device.not_in_a_graph("uploads")
        turn, self._turn = self._turn, 1 - self._turn
        pinned, sent, end = self._pinned[turn], self._sent[turn], 0
        with self._device.on():
            sent.synchronize()  # of two posts ago
            for name, values in content.items():
                at, size, stored = self._places[name]
                if len(values) > size:
                    raise BackendError(f"{len(values)} numbers of {name} do not fit {size}")
                pinned[at : at + values.nbytes].view(stored)[:] = values
                end = max(end, at + values.nbytes)
            try:
                _send(self._stream, pinned[:end], self._memory.data.ptr)
            finally:  # interrupted or not: it may be on its way
                sent.record(self._stream)


class _Stage:
    """Host memory to the GPU through a few pinned buffers: one is filled while the others travel."""

    def __init__(self, stream: Any, count: int, size: int) -> None:
        self._stream, self._size = stream, size
        self._pinned = [cupyx.empty_pinned((size,), np.uint8) for _ in range(count)]
        self._sent = [cupy.cuda.Event(disable_timing=True) for _ in range(count)]
        self._turn = 0

    def copy(self, target: int, content: npt.NDArray[Any]) -> None:
        """`content`, contiguous, to the address `target`; it may change afterwards."""
        source = content.reshape(-1).view(np.uint8)
        for start in range(0, source.nbytes, self._size):
            with self._pin(source[start : start + self._size]) as pinned:
                _send(self._stream, pinned, target + start)

    def copy_rows(self, target: int, pitch: int, content: npt.NDArray[Any]) -> None:
        """The same, of rows that begin `pitch` bytes apart."""
        width, runtime = content.nbytes // len(content), cupy.cuda.runtime
        step = self._size // width
        for start in range(0, len(content), step):
            with self._pin(content[start : start + step].reshape(-1).view(np.uint8)) as pinned:
                rows, to = len(pinned) // width, target + start * pitch
                runtime.memcpy2DAsync(to, pitch, pinned.ctypes.data, width, width, rows, runtime.memcpyHostToDevice, self._stream.ptr)

    @contextmanager
    def _pin(self, piece: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[np.uint8]]:
        """A pinned copy of `piece`, to be sent on inside."""
        turn, self._turn = self._turn, (self._turn + 1) % len(self._pinned)
        self._sent[turn].synchronize()
        pinned = self._pinned[turn][: len(piece)]
        pinned[:] = piece
        try:
            yield pinned
        finally:  # interrupted or not: it may be on its way
            self._sent[turn].record(self._stream)


def _send(stream: Any, pinned: npt.NDArray[np.uint8], target: int) -> None:
    """Ask for pinned memory to be copied to an address."""
    cupy.cuda.runtime.memcpyAsync(target, pinned.ctypes.data, pinned.nbytes, cupy.cuda.runtime.memcpyHostToDevice, stream.ptr)


def _copy_blocks(stream: Any, source: Array, target: Array, pairs: npt.NDArray[np.int32]) -> None:
    """See Device.swap, of keys or values. A run of blocks has one row of bytes in every layer: one copy of rows is all of it."""
    runtime, layers = cupy.cuda.runtime, len(source)
    pitch, target_pitch = source.nbytes // layers, target.nbytes // layers
    block = pitch // source.shape[1]
    for first, target_first, count in runs_of(pairs):
        start, target_start, width = source.data.ptr + first * block, target.data.ptr + target_first * block, count * block
        if max(pitch, target_pitch) <= LARGEST_PITCH:
            runtime.memcpy2DAsync(target_start, target_pitch, start, pitch, width, layers, runtime.memcpyDefault, stream.ptr)
            continue
        for layer in range(layers):
            at, target_at = start + layer * pitch, target_start + layer * target_pitch
            runtime.memcpyAsync(target_at, at, width, runtime.memcpyDefault, stream.ptr)


def _stored(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """CuPy has no 8-bit floats: their bytes are stored, and KernelSpec knows what they are."""
    wanted = np.dtype(dtype)
    return np.dtype(np.uint8) if wanted == ml_dtypes.float8_e4m3fn else wanted


def _check_index(index: int) -> int:
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        reason = re.sub(r"^\w+: ", "", str(error))
        raise BackendError(f"no NVIDIA GPU can be used ({reason}): install a driver, or use device cpu") from error
    if not 0 <= index < count:
        raise BackendError(f"there is no GPU {index}: this machine has {count}, counted from 0" if count else "this machine has no NVIDIA GPU: use device cpu")
    return index


def _capability(device: Any) -> tuple[int, int]:
    digits = str(device.compute_capability)
    capability = int(digits[:-1]), int(digits[-1])
    if capability < OLDEST:
        raise BackendError(f"GPU {device.id} is too old (sm_{digits}): the kernels want sm_80 or newer; use device cpu")
    return capability
