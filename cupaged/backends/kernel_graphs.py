"""ForwardGraphs: the recorded forward pass on a device. Steps of decode rows only are captured once for each number of
lanes, and replayed; all others run their kernels one by one.

A small model's decode step is nothing but launches, several hundred of them; a replay asks for all at once.
"""

from __future__ import annotations

from collections.abc import Callable

from cupaged.backends.device import Device, Graph


class ForwardGraphs:
    """What `Backend.record` returns. `lanes_of_step` says how many lanes the step has that was set last, or None.

    The first step of a number of lanes runs at once: that compiles its kernels and makes the memory that they share, so
    nothing is left to allocate when it is captured after that.
    """

    def __init__(self, device: Device, build: Callable[[int], None], lanes_of_step: Callable[[], int | None]) -> None:
        self._device, self._build, self._lanes_of_step = device, build, lanes_of_step
        self._graphs: dict[int, Graph] = {}

    def __call__(self, rows: int) -> None:
        lanes = self._lanes_of_step()
        if lanes is None:
            self._build(rows)
        elif lanes in self._graphs:
            self._graphs[lanes].replay()
        else:
            self._build(lanes)
            self._graphs[lanes] = self._device.capture(lambda: self._build(lanes))
