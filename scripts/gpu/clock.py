"""Clock: how long a device takes. On a GPU by CUDA events around replays of a graph, on the emulator by the wall."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from cupaged.backends.cupy_device import CupyDevice
from cupaged.backends.device import Device, Graph

try:
    import cupy
except ImportError:  # then nobody has a CupyDevice
    cupy = None

TARGET_SECONDS, FEWEST, MOST = 0.1, 5, 50
"""Replays of a graph: for about so long, within these limits."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one run of the work: the median of several, and the fastest."""

    median: float
    best: float
    replays: int


class Clock:
    def __init__(self, device: Device) -> None:
        self._device = device

    def graph(self, work: Callable[[], None]) -> Graph:
        """`work`, which has run once: its kernels are compiled and its memory is there."""
        work()
        return self._device.capture(work)

    def time(self, work: Callable[[], None]) -> Timing:
        """Of the work as a graph, which is replayed until it has been timed often enough."""
        return self.time_graph(self.graph(work))

    def time_graph(self, graph: Graph) -> Timing:
        graph.replay()  # the first one uploads it
        first = self._seconds(graph.replay, 1)
        count = min(MOST, max(FEWEST, int(TARGET_SECONDS / max(first[0], 1e-9)))) if isinstance(self._device, CupyDevice) else 1
        seconds = self._seconds(graph.replay, count)
        return Timing(statistics.median(seconds), min(seconds), count)

    def wall(self, work: Callable[[], None], runs: int) -> float:
        """Seconds of one run as the host sees it: asked for `runs` times, one after the other, and waited for once."""
        work()
        self.synchronize()
        started = time.perf_counter()
        for _ in range(runs):
            work()
        self.synchronize()
        return (time.perf_counter() - started) / runs

    def synchronize(self) -> None:
        if isinstance(self._device, CupyDevice):
            self._device._stream.synchronize()

    def _seconds(self, run: Callable[[], None], count: int) -> list[float]:
        if not isinstance(self._device, CupyDevice):
            return [self._wall_once(run) for _ in range(count)]
        stream, events = self._device._stream, []
        with self._device.on():
            for _ in range(count):
                pair = cupy.cuda.Event(), cupy.cuda.Event()
                pair[0].record(stream)
                run()
                pair[1].record(stream)
                events.append(pair)
            stream.synchronize()
            return [cupy.cuda.get_elapsed_time(*pair) / 1000 for pair in events]

    def _wall_once(self, run: Callable[[], None]) -> float:
        started = time.perf_counter()
        run()
        return max(time.perf_counter() - started, 1e-9)
