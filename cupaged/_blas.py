"""load_numpy(): import NumPy with the BLAS policy this engine needs, which OpenBLAS reads once, while it loads.

OpenBLAS's worker threads spin for 2^26 cycles after every product, on the cores that our own kernels want next. 2^16
cycles (about 20 us) cover the gap to the next matrix of a layer and leave the cores free for a longer kernel. That can
only be said through its environment, which is put back as it was, so that child processes inherit nothing; a value
that the user has set stays. Where NumPy was imported before, nothing can be changed any more: `policy_applies()` says so.

This module imports nothing of the package, so that every entry (the command line, the lazy exports) can call it first.
"""

from __future__ import annotations

import importlib
import os
import sys

THREAD_TIMEOUT = "OPENBLAS_THREAD_TIMEOUT"

_loaded_here = False


def load_numpy() -> None:
    """Import NumPy under the policy; does nothing where NumPy is loaded already."""
    global _loaded_here
    if "numpy" in sys.modules:
        return
    unset = THREAD_TIMEOUT not in os.environ
    if unset:
        os.environ[THREAD_TIMEOUT] = "16"
    try:
        importlib.import_module("numpy")
    finally:
        if unset:
            del os.environ[THREAD_TIMEOUT]
    _loaded_here = True


def policy_applies() -> bool:
    """Whether NumPy's BLAS was loaded under this policy or under the user's own."""
    return _loaded_here or THREAD_TIMEOUT in os.environ


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
