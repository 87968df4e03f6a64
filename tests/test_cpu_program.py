"""Memory of the CPU engine: aligned arrays, small and large."""

from __future__ import annotations

import numpy as np
import pytest

from cupaged.backends.cpu_program import aligned


@pytest.mark.parametrize("shape", [(3,), (5, 7), (1 << 20, 3)])
def test_an_array_begins_at_a_cache_line_and_may_be_written(shape: tuple[int, ...]) -> None:
    array = aligned(shape, np.float32)
    assert array.shape == shape
    assert array.ctypes.data % 64 == 0
    array[...] = 1
    assert array.sum() == array.size


def test_more_memory_than_there_can_be_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        aligned((1 << 60,), np.uint8)
