"""What a figure's machine is: printed with every result, because no figure means anything without it."""

from __future__ import annotations

import os
import platform
import resource
import time
from datetime import date
from pathlib import Path

_ISA = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "sve")


def describe() -> dict[str, str]:
    """Processor, cores, instruction sets, memory, system and date. What a system does not tell is "unknown"."""
    cpu = _fields(Path("/proc/cpuinfo"))
    flags = cpu.get("flags", cpu.get("Features", "")).split()
    family = "/".join(cpu[name] for name in ("cpu family", "model") if name in cpu)
    return {
        "processor": cpu.get("model name", platform.processor() or "unknown") + (f" (family/model {family})" if family else ""),
        "cores": str(usable_cores()),
        "instructions": " ".join(name for name in _ISA if name in flags) or "unknown",
        "memory": _fields(Path("/proc/meminfo")).get("MemTotal", "unknown"),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "load before": f"{os.getloadavg()[0]:.2f}",
        "date": date.today().isoformat(),
    }


class Disturbance:
    """The share of all cores that processes other than this one and its (finished) children took since it was made."""

    def __init__(self) -> None:
        self._wall, self._foreign = time.perf_counter(), _foreign_seconds()

    def share(self) -> float:
        """0 .. 1; 0 where the system does not tell."""
        seconds = (time.perf_counter() - self._wall) * (os.cpu_count() or 1)
        return max(0.0, _foreign_seconds() - self._foreign) / seconds


def _foreign_seconds() -> float:
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, *rest = (int(field) for field in first.split()[1:9])
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK") - sum(usage.ru_utime + usage.ru_stime for usage in own)


def usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def _fields(path: Path) -> dict[str, str]:
    """The first value of each "name : value" line."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in reversed(lines) if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}
