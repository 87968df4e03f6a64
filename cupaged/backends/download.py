"""Download: an array on its way to the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Download(Protocol):
    """What `download_later` returns. Nobody has to wait for it."""

    def wait(self) -> npt.NDArray[Any]:
        """A host array of its own, with the content that the device array had when the download was asked for."""
        ...


def put(array: npt.NDArray[Any], out: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    """`array`, in `out` if that is given."""
    if out is None:
        return array
    out[...] = array
    return out


class Coming:
    """A Download into pinned memory, with a CuPy event behind it. `on()` is a context in which the event can be waited for."""

    def __init__(self, pinned: npt.NDArray[Any], event: Any, on: Callable[[], AbstractContextManager[None]]) -> None:
        self.event = event
        self._pinned, self._on = pinned, on

    def wait(self) -> npt.NDArray[Any]:
        with self._on():
            self.event.synchronize()
        return np.array(self._pinned)


class Arrived:
    """A Download where the device computes in the host's memory, at once."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._content = np.array(array)

    def wait(self) -> npt.NDArray[Any]:
        return self._content
