"""Batches and logits for the tests of sampling; numbers come from seeds, the same on every machine."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cupaged.conformance.steps import batch_of

__all__ = ["batch_of", "random_logits"]


def random_logits(seed: int, vocab_size: int, scale: float) -> npt.NDArray[np.float32]:
    """float32 [vocab_size] from NumPy's frozen legacy generator."""
    return (np.random.RandomState(seed).standard_normal(vocab_size) * scale).astype(np.float32)
