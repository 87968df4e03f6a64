"""What the times of a run mean: percentiles, throughput and latencies, each defined once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cupaged.errors import WorkloadError

PERCENTS = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value at `percent` of the sorted values, interpolated linearly between neighbours. Raises WorkloadError for none."""
    if not len(values):
        raise WorkloadError("there is nothing to take a percentile of: no request got that far")
    ordered = sorted(values)
    place = percent / 100 * (len(ordered) - 1)
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 by name."""
    return {f"p{percent}": percentile(values, percent) for percent in PERCENTS}


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When a request came, got its first token and was finished (seconds on one clock), and its sizes in tokens.

    num_output   tokens of one answer; num_answers: how many it got
    """

    arrival: float
    first_token: float
    finished: float
    num_prompt: int
    num_output: int
    num_answers: int = 1

    @property
    def ttft(self) -> float:
        """Time to first token, seconds."""
        return self.first_token - self.arrival

    @property
    def latency(self) -> float:
        """From arrival to the last token, seconds."""
        return self.finished - self.arrival

    @property
    def inter_token(self) -> float | None:
        """Mean seconds between the tokens of an answer; None for an answer of one token."""
        return (self.finished - self.first_token) / (self.num_output - 1) if self.num_output > 1 else None

    @property
    def normalised(self) -> float:
        """Latency over output tokens, in seconds a token: the PagedAttention paper's measure (section 6.1)."""
        return self.latency / self.num_output


def mean(values: Sequence[float]) -> float:
    """Raises WorkloadError for none."""
    if not len(values):
        raise WorkloadError("there is nothing to take a mean of: no request got that far")
    return math.fsum(values) / len(values)


def variance(values: Sequence[float]) -> float:
    """Of these values themselves (not of a population that they are drawn from)."""
    middle = mean(values)
    return mean([(value - middle) ** 2 for value in values])


def seconds(times: Sequence[RequestTimes]) -> float:
    """From the first arrival to the last finish."""
    return max(t.finished for t in times) - min(t.arrival for t in times)


@dataclass(frozen=True, slots=True)
class Throughput:
    """Per second, from the first arrival to the last finish."""

    requests: float
    output_tokens: float
    total_tokens: float


def throughput(times: Sequence[RequestTimes]) -> Throughput:
    """Raises WorkloadError where nothing was served, or in no time at all."""
    if not times:
        raise WorkloadError("nothing was served: there is no throughput")
    taken = seconds(times)
    if taken <= 0:
        raise WorkloadError("everything was served in no time: there is no throughput")
    output = sum(t.num_output * t.num_answers for t in times)
    return Throughput(len(times) / taken, output / taken, (output + sum(t.num_prompt for t in times)) / taken)
