"""Batches and logits for the tests of sampling; numbers come from seeds, the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.backends.base import SamplingBatch

NEUTRAL: dict[str, tuple[Any, Any]] = {
    "temperature": (np.float32, 1.0),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1.0),
    "min_p": (np.float32, 0.0),
    "repetition": (np.float32, 1.0),
    "presence": (np.float32, 0.0),
    "frequency": (np.float32, 0.0),
    "seeds": (np.uint64, 0),
    "positions": (np.int32, 0),
    "indices": (np.int32, 0),
}


def random_logits(seed: int, vocab_size: int, scale: float) -> npt.NDArray[np.float32]:
    """float32 [vocab_size] from NumPy's frozen legacy generator."""
    return (np.random.RandomState(seed).standard_normal(vocab_size) * scale).astype(np.float32)


def batch_of(rows: Sequence[dict[str, Any]]) -> SamplingBatch:
    """One row a mapping: names of SamplingBatch's fields, what is left out being neutral (temperature 1).

    `row_id` defaults to the row's place, `bias` is a list of (token id, value). A row with a penalty is penalised.
    """
    arrays = {name: np.array([row.get(name, value) for row in rows], dtype) for name, (dtype, value) in NEUTRAL.items()}
    biases = [row.get("bias", []) for row in rows]
    flat = [entry for bias in biases for entry in bias]
    penalised = (arrays["repetition"] != 1) | (arrays["presence"] != 0) | (arrays["frequency"] != 0)
    return SamplingBatch(
        **arrays,
        row_ids=np.array([row.get("row_id", r) for r, row in enumerate(rows)], np.int32),
        bias_start=np.cumsum([0, *map(len, biases)], dtype=np.int32),
        bias_ids=np.array([token for token, _ in flat], np.int32),
        bias_values=np.array([value for _, value in flat], np.float32),
        penalised=penalised,
    )
