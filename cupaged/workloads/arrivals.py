"""When requests come: seconds from the start, in order."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from cupaged.errors import WorkloadError, shown

Seconds = npt.NDArray[np.float64]


def poisson(rate: float, count: int, rng: np.random.Generator) -> Seconds:
    """Independent arrivals, on average `rate` a second: float64 [count]. Raises WorkloadError for a rate that is none."""
    return bursty(rate, count, rng, variation=1.0)


def bursty(rate: float, count: int, rng: np.random.Generator, variation: float = 3.0) -> Seconds:
    """Arrivals in bursts with the same mean rate: gaps are gamma-distributed with a standard deviation of `variation` means.

    1 is Poisson; the larger, the more of them come close together with long silences between. The first comes after a gap.
    """
    if not (math.isfinite(rate) and rate > 0):
        raise WorkloadError(f"the arrival rate must be a positive number of requests a second, not {shown(rate)}")
    if not (math.isfinite(variation) and variation > 0):
        raise WorkloadError(f"the variation of arrivals must be a positive number, not {shown(variation)}")
    shape = 1 / variation**2
    times: Seconds = np.cumsum(rng.gamma(shape, 1 / (rate * shape), count))
    return times


def all_at_once(count: int) -> Seconds:
    """Everything is there at the start."""
    return np.zeros(count)


def times(rate: float | None, count: int, rng: np.random.Generator) -> Seconds:
    """Poisson arrivals, or for None all at once."""
    return all_at_once(count) if rate is None else poisson(rate, count, rng)
