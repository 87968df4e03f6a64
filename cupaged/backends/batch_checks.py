"""What the host checks before a kernel reads or writes through indices. A device whose memory it cannot see is trusted."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.errors import InvariantError

Indices = npt.NDArray[Any]


def check_within(what: str, indices: Indices | None, low: int, high: int) -> None:
    """Raises InvariantError unless all are in low .. high - 1."""
    if indices is not None and indices.size and (indices.min() < low or indices.max() >= high):
        raise InvariantError(f"{what} out of bounds: {indices.min()} .. {indices.max()} is not within {low} .. {high - 1}")


def check_block_pairs(pairs: npt.NDArray[np.int32], num_sources: int, num_targets: int, within_one_pool: bool) -> None:
    """Raises InvariantError for a block that is not there, and for copies whose order would matter."""
    sources, targets = pairs[:, 0], pairs[:, 1]
    check_within("block", sources, 0, num_sources)
    check_within("block", targets, 0, num_targets)
    if len(np.unique(targets)) != len(targets):
        raise InvariantError("two blocks are copied into one")
    if within_one_pool and np.intersect1d(sources, targets).size:
        raise InvariantError("a block is both the source and the target of copies")
