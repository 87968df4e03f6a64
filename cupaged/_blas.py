"""The BLAS policy this engine needs, which OpenBLAS reads once, while NumPy loads it.

OpenBLAS's worker threads spin for 2^26 cycles after every product, on the cores that our own kernels want next. 2^16
cycles (about 20 us) cover the gap to the next matrix of a layer and leave the cores free for a longer kernel. That can
only be said through its environment, before NumPy is loaded: so `import cupaged` puts it there, and the first backend
takes it away again. A value that the user has set stays. Where NumPy was imported before cupaged, nothing can be changed
any more: `policy_applies()` says so.

This module imports nothing but the standard library's smallest.
"""

from __future__ import annotations

import os
import sys

THREAD_TIMEOUT = "OPENBLAS_THREAD_TIMEOUT"

_in_time = "numpy" not in sys.modules or THREAD_TIMEOUT in os.environ
_placed_here = False


def place_policy() -> None:
    """Tell OpenBLAS, if NumPy is not loaded yet, not to spin for long."""
    global _placed_here
    if "numpy" not in sys.modules and THREAD_TIMEOUT not in os.environ:
        os.environ[THREAD_TIMEOUT] = "16"
        _placed_here = True


def remove_policy() -> None:
    """NumPy is loaded by now: leave the environment as it was, so that child processes inherit nothing."""
    global _placed_here
    if _placed_here:
        os.environ.pop(THREAD_TIMEOUT, None)
        _placed_here = False


def policy_applies() -> bool:
    """Whether NumPy's BLAS was loaded under this policy or under the user's own."""
    return _in_time


def usable_cores() -> int:
    """The cores this process may use: its affinity, and under a Linux container's quota no more than that."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        if quota != "max":
            cores = min(cores, max(1, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # no cgroup v2 here
        pass
    return cores
