"""Lengths of prompts and answers: log-normal, many short ones and a few long ones, with a given mean after clipping.

The PagedAttention paper (arXiv 2309.06180, section 6.1) gives mean lengths, not their spread. The spread of its answers
follows from its table of wasted memory, though. A request that holds P + O slots while it generates O tokens, one a
step, has on average P + O / 2 of them filled and O / 2 waiting, so that over all requests (P and O independent)

    token states / reservation = 1 + 2 E[P] E[O] / E[O^2]

The table says 38.2 / 25.2 for its Oracle (1.53 and 1.50 for the other two), so E[O^2] is 2.1e5, a standard deviation of
0.92 means: a log-normal with sigma = sqrt(ln(1 + 0.92^2)) = 0.78. Prompts get the same spread: that is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from cupaged.errors import WorkloadError
from cupaged.workloads.request import IntArray

SPREAD = 0.78
"""Standard deviation of the logarithm of a length."""

_QUANTILES = np.array([NormalDist().inv_cdf((i + 0.5) / 4096) for i in range(4096)])


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths in tokens, clipped to 1 .. most, whose mean after clipping is `mean`."""

    mean: float
    spread: float = SPREAD

    def draw(self, count: int, most: int, rng: np.random.Generator) -> IntArray:
        """int32 [count]. Raises WorkloadError where no length up to `most` can have such a mean."""
        if not 1 <= self.mean <= most:
            raise WorkloadError(f"lengths of 1 to {most} tokens cannot have a mean of {self.mean:g}: raise the longest sequence")
        return _clipped(self._location(most) + self.spread * rng.standard_normal(count), most)

    def _location(self, most: int) -> float:
        """The mean of the logarithms with which the clipped lengths have their mean, by bisection on their quantiles."""
        low, high = -5.0, float(np.log(most)) + 10 * self.spread + 1
        for _ in range(60):
            middle = (low + high) / 2
            if _clipped(middle + self.spread * _QUANTILES, most).mean() < self.mean:
                low = middle
            else:
                high = middle
        return (low + high) / 2


def _clipped(logarithms: np.ndarray, most: int) -> IntArray:
    lengths: IntArray = np.clip(np.rint(np.exp(np.minimum(logarithms, 21))), 1, most).astype(np.int32)
    return lengths


@dataclass(frozen=True)
class Dataset:
    """Prompts and answers of one kind."""

    prompt: Lengths
    output: Lengths

    def draw(self, count: int, max_len: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """Lengths of `count` prompts and their answers; together at most `max_len`, a prompt at most half of it."""
        prompts = self.prompt.draw(count, max(1, max_len // 2), rng)
        return prompts, self.output.draw(count, max(1, max_len - max_len // 2), rng)

    def scaled(self, factor: float) -> Dataset:
        """The same shape with all means times `factor`, at least one token: for a machine that is so much smaller."""
        prompt, output = (Lengths(max(1.0, part.mean * factor), part.spread) for part in (self.prompt, self.output))
        return Dataset(prompt, output)


SHAREGPT = Dataset(Lengths(161.31), Lengths(337.99))
ALPACA = Dataset(Lengths(19.31), Lengths(58.45))
"""Mean input and output tokens of the PagedAttention paper, figure 11."""
