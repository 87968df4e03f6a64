"""The device of a run, and what must stand beside every figure: GPU, driver, CUDA, date and command."""

from __future__ import annotations

import gc
import re
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from cupaged.backends.cupy_device import CupyDevice
from cupaged.backends.device import Device
from cupaged.backends.emu_device import EmuDevice

try:
    import cupy
except ImportError:  # not installed, or a CUDA installation that cannot be loaded; CupyDevice says which
    cupy = None

ROOT = Path(__file__).resolve().parent.parent.parent
UNKNOWN, USUAL_L2_BYTES = "unknown", 64 << 20
_PACKAGES = ("cupaged", "numpy", "ml_dtypes", "cupy-cuda12x", "cupy-cuda13x", "torch", "flashinfer-python", "transformers")
_QUERY = "driver_version,power.limit,clocks.max.sm,clocks.max.mem,clocks.sm,temperature.gpu"


def open_device(name: str) -> Device:
    """cuda, cuda:1 or emu. Raises BackendError, in a line, where it cannot be used."""
    kind, _, index = name.partition(":")
    return EmuDevice() if kind == "emu" else CupyDevice(int(index or 0))


def l2_bytes(device: Device) -> int:
    """Of the cache that a cold measurement must overflow."""
    if not isinstance(device, CupyDevice):
        return 0
    return int(device._device.attributes.get("L2CacheSize", USUAL_L2_BYTES))


def free_memory(device: Device) -> int | None:
    """Bytes, after giving back what nobody holds any longer; None where memory is the host's."""
    gc.collect()
    if isinstance(device, CupyDevice):
        with device.on():
            cupy.get_default_memory_pool().free_all_blocks()
    memory = device.memory()
    return None if memory is None else memory[0]


def describe(device: Device) -> dict[str, str]:
    """What a system does not tell is "unknown"."""
    facts = {"device": device.name, "architecture": f"sm_{device.capability[0]}{device.capability[1]}", "multiprocessors": str(device.multiprocessors)}
    if isinstance(device, CupyDevice):
        facts |= _of_gpu(device)
    return facts | {
        "commit": _commit(),
        "versions": ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES if _installed(name)),
        "python": sys.version.split()[0],
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", *sys.argv]),
    }


def _commit() -> str:
    """Of the source, and whether its files were changed since."""
    commit, changes = (_output(["git", "-C", str(ROOT), *what]) for what in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "-uno"]))
    return commit + ("" if changes == UNKNOWN else " (changed)")


def _of_gpu(device: CupyDevice) -> dict[str, str]:
    runtime, index = cupy.cuda.runtime, device._device.id
    name: Any = runtime.getDeviceProperties(index)["name"]
    queried = _output(["nvidia-smi", f"--id={index}", f"--query-gpu={_QUERY}", "--format=csv,noheader"]).split(", ")
    told = dict(zip(_QUERY.split(","), queried, strict=False)) if len(queried) == _QUERY.count(",") + 1 else {}
    return {
        "GPU": name.decode() if isinstance(name, bytes) else str(name),
        "driver": told.pop("driver_version", _kernel_driver()),
        "CUDA": f"runtime {_version(runtime.runtimeGetVersion())}, driver's {_version(runtime.driverGetVersion())}",
        "L2 bytes": str(l2_bytes(device)),
        "memory bytes": str(device.memory()[1]),
        **told,
    }


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _kernel_driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", path.read_text(encoding="utf-8")) if path.exists() else None
    return found[0] if found else UNKNOWN


def _output(command: list[str]) -> str:
    """What a program prints; UNKNOWN if that is nothing, or it is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return done.stdout.strip() or UNKNOWN


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
