"""The cores that threads compute on: how many are worth having, and which."""

from __future__ import annotations

import os

from cupaged.errors import ConfigError


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


def own_cores(threads: int) -> list[int]:
    """A core for each thread. Raises ConfigError where a thread cannot be kept on one, or there are too few."""
    try:
        cores = sorted(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        raise ConfigError("pin_threads: this system does not let a program choose its cores; leave it out") from None
    if threads > len(cores):
        raise ConfigError(f"pin_threads: {threads} threads, but this process may use {len(cores)} cores; take fewer threads")
    return cores[:threads]
