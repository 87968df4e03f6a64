"""usable_cores: how many threads are worth having."""

from __future__ import annotations

import os


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
