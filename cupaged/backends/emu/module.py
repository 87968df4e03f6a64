"""Module and Kernel: what cupy.RawModule and its functions are to a GPU."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from cupaged.backends.emu.build import load_kernels, load_runtime
from cupaged.backends.emu.compiler import Compiler, find_compiler
from cupaged.backends.emu.launch import Failure, LaunchShape, Parameter, cover, error_of, pack
from cupaged.backends.emu.source_lines import can_look_up, look_up
from cupaged.errors import ConfigError, KernelError

Mode = Literal["fast", "check"]
Schedule = Literal["forward", "reverse", "depth", "random"]

_SCHEDULES: dict[str, int] = {name: number for number, name in enumerate(get_args(Schedule))}
_MAX_THREADS = 1024
_MAX_GRID = (2**31 - 1, 65535, 65535)
_FREE_SHARED_BYTES, _MAX_SHARED_BYTES = 48 * 1024, 227 * 1024
_one_launch = threading.Lock()  # the runtime's state is global


class Module:
    """CUDA C text, compiled for this machine on construction.

    `options` are -D macros; `name` is what messages call the text, whose #line directives are followed. `schedule` and
    `seed` are the defaults of its kernels' calls. Raises BackendError for a text that does not compile, with the
    compiler's log, and where there is no compiler, with the remedy.
    """

    def __init__(
        self,
        code: str,
        options: Sequence[str] = (),
        *,
        name: str = "kernel.cu",
        mode: Mode = "fast",
        schedule: Schedule = "forward",
        seed: int = 0,
        compiler: Compiler | None = None,
    ) -> None:
        if mode not in get_args(Mode):
            raise ConfigError(f"emulator mode {mode!r} does not exist; use fast or check")
        self.name, self.mode, self.schedule, self.seed = name, mode, schedule, seed
        compiler = compiler or find_compiler()
        self.library, self.path = load_kernels(compiler, code, name, options, mode)
        self.runtime = load_runtime(compiler)
        self.image = (ctypes.c_void_p * 2)()
        begin, end = ctypes.c_void_p(), ctypes.c_void_p()
        self.library.simt_image(ctypes.byref(begin), ctypes.byref(end))
        self.image[:] = [begin.value, end.value]
        listed = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(self.library, "simt_kernels")))
        self._parameters: dict[str, list[str]] = json.loads(listed)

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names that get_function knows."""
        return tuple(self._parameters)

    def get_function(self, name: str) -> Kernel:
        """The kernel of this name. Raises KernelError for another."""
        if name not in self._parameters:
            message = f"{self.name} has no kernel {name!r}; it has {', '.join(self._parameters)}"
            raise KernelError(message, kernel=name, kind="argument")
        return Kernel(self, name, self._parameters[name])


class Kernel:
    """One kernel, called like CuPy's RawKernel over NumPy arrays.

    `max_dynamic_shared_size_bytes` must be raised before a launch may ask for more than 48 KiB of dynamic shared memory.
    """

    def __init__(self, module: Module, name: str, parameters: Sequence[str]) -> None:
        self.module, self.name = module, name
        self.max_dynamic_shared_size_bytes = _FREE_SHARED_BYTES
        spelt = ctypes.create_string_buffer(2 * len(parameters) + 1)
        getattr(module.library, f"simt_spell_{name}")(spelt)
        letters = spelt.value.decode()
        self.parameters = tuple(Parameter(p, letters[2 * i], letters[2 * i + 1]) for i, p in enumerate(parameters))
        self._entry = ctypes.cast(getattr(module.library, f"simt_run_{name}"), ctypes.c_void_p)

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
        schedule: Schedule | None = None,
        seed: int | None = None,
        reachable: Sequence[npt.NDArray[Any]] = (),
    ) -> None:
        """Runs `grid` blocks of `block` threads to their end.

        args: for each parameter a C-contiguous array of its dtype, or None for a null pointer, or a NumPy scalar of its
        type. `shared_mem`: bytes of dynamic shared memory. `reachable`: arrays that the kernel finds through a table of
        pointers. Raises KernelError for arguments that do not fit, and for the first rule that the kernel breaks.
        """
        seed = self.module.seed if seed is None else seed
        shape = self._shape(grid, block, shared_mem, schedule or self.module.schedule, seed)
        self._check_arguments(args)
        pointers, kept = pack(self.parameters, args)
        pairs = zip(self.parameters, args, strict=True)
        named = [(p.name, a, p.kind == "P") for p, a in pairs if isinstance(a, np.ndarray)]
        named += [(f"reachable[{i}]", a, a.flags.writeable) for i, a in enumerate(reachable)]
        ranges, cells = cover(named, track=bool(shape.check))
        failure = Failure()
        with _one_launch:
            failed = self.module.runtime.simt_launch(
                self._entry,
                pointers,
                ctypes.byref(shape),
                ranges,
                sum(1 for r in ranges if r.end),
                ctypes.c_uint64(cells),
                self.module.image,
                ctypes.byref(failure),
            )
        del kept
        if failed:
            raise self._explained(failure)

    def _refuse(self, message: str) -> KernelError:
        return KernelError(f"{self.name}: {message}", kernel=self.name, kind="argument")

    def _shape(self, grid: Sequence[int], block: Sequence[int], shared: int, schedule: str, seed: int) -> LaunchShape:
        if schedule not in _SCHEDULES:
            raise ConfigError(f"schedule {schedule!r} does not exist; use {', '.join(_SCHEDULES)}")
        grid3, block3 = (*grid, 1, 1, 1)[:3], (*block, 1, 1, 1)[:3]
        if not 1 <= len(grid) <= 3 or any(not 1 <= n <= most for n, most in zip(grid3, _MAX_GRID, strict=True)):
            raise self._refuse(f"grid {tuple(grid)} is not 1 to 3 sizes of at least 1 and at most {_MAX_GRID}")
        if not 1 <= len(block) <= 3 or min(block3) < 1 or block3[0] * block3[1] * block3[2] > _MAX_THREADS:
            raise self._refuse(f"block {tuple(block)} is not 1 to 3 sizes with a product of 1 to {_MAX_THREADS}")
        allowed = min(max(self.max_dynamic_shared_size_bytes, _FREE_SHARED_BYTES), _MAX_SHARED_BYTES)
        if not 0 <= shared <= allowed:
            remedy = "" if shared > _MAX_SHARED_BYTES else "; raise max_dynamic_shared_size_bytes"
            raise self._refuse(f"{shared} bytes of dynamic shared memory, of {allowed} allowed{remedy}")
        check = int(self.module.mode == "check")
        return LaunchShape(grid3, block3, shared, _SCHEDULES[schedule], seed & 0xFFFFFFFF, check)

    def _check_arguments(self, args: Sequence[Any]) -> None:
        if len(args) != len(self.parameters):
            names = ", ".join(p.name for p in self.parameters)
            raise self._refuse(f"{len(args)} arguments for {len(self.parameters)} parameters ({names})")
        for parameter, argument in zip(self.parameters, args, strict=True):
            refusal = parameter.refusal_of(argument)
            if refusal is not None:
                raise self._refuse(f"parameter {parameter.name!r} {refusal}")

    def _explained(self, failure: Failure) -> KernelError:
        address, file, line, note = failure.address, Path(failure.file.decode()).name or None, failure.line or None, ""
        begin, end = self.module.image
        found = look_up(self.module.path, address - 1 - begin) if address and begin < address < end else None
        if found is not None:
            file, line, note = found.file, found.line, f" (in {found.within})" if found.within else ""
        elif address and file is None and not can_look_up():
            note = " (addr2line, of binutils, would tell the source line)"
        return error_of(failure, self.name, file, line, note)
