"""MappedFile: a file's bytes where the system keeps them. What is read from it was never copied.

All tensors of a file share one mapping, which the first read makes. `close` gives it up, and with it the file, which some
systems neither delete nor replace meanwhile; a later read makes it anew.

Pages that were read count as this process's memory as long as they are mapped, though they are the system's cache. Now and
then all of them are given back, so that a file of any size adds a few MB; one that is still wanted comes back by itself.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from threading import Lock

import numpy as np

from cupaged.checkpoint.codecs import U8
from cupaged.errors import CheckpointError

GIVE_BACK = 8 << 20
"""Bytes that are read before pages are given back: few beside a model, many beside what asking the system costs."""

CAN_GIVE_BACK = hasattr(mmap, "MADV_DONTNEED")


class MappedFile:
    """The file at `path`, which may be read from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()
        self._map: mmap.mmap | None = None
        self._read = 0  # bytes since pages were given back

    def read(self, start: int, stop: int, tensor: str) -> U8:
        """Bytes start..stop as a read-only array [stop - start], at any alignment. It may be kept as long as one likes, also
        when this is closed: it holds the mapping. While it is in use, the file must not be made shorter: its pages go with it.

        Raises CheckpointError, which names the tensor, if the file cannot be read or ends before `stop`.
        """
        if start == stop:
            return np.empty(0, np.uint8)
        with self._lock:
            try:
                whole = self._mapped(stop)
            except OSError as error:
                raise CheckpointError(f"cannot read tensor {tensor} from {self.path}: {error.strerror or error}") from None
            if whole is None:
                raise CheckpointError(f"{self.path} ends inside tensor {tensor}: it was cut short")
            self._read += stop - start
            if self._read > GIVE_BACK and CAN_GIVE_BACK:
                whole.madvise(mmap.MADV_DONTNEED)
                self._read = stop - start
            return np.frombuffer(whole, np.uint8, stop - start, start)

    def close(self) -> None:
        """Give up the mapping, at once or with the last array that was read from it."""
        with self._lock:
            self._map = None

    def _mapped(self, stop: int) -> mmap.mmap | None:
        """The mapping, if it and the file as it is now reach to byte `stop`: to touch what lies behind a file's end is fatal."""
        if self._map is None or stop > len(self._map):
            with open(self.path, "rb") as file:
                if file.seek(0, os.SEEK_END) < stop:
                    return None
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._map if stop <= self._map.size() else None
