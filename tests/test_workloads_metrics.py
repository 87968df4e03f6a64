"""Every metric against a case worked out by hand."""

from __future__ import annotations

import pytest

from cupaged.errors import WorkloadError
from cupaged.workloads.metrics import (
    RequestTimes,
    mean,
    percentile,
    percentiles,
    throughput,
    variance,
)


@pytest.mark.parametrize(("percent", "expected"), [(0, 1.0), (50, 2.5), (90, 3.7), (99, 3.97), (100, 4.0)])
def test_percentiles_are_interpolated(percent: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(expected)
    assert percentile([7.0], percent) == 7.0


def test_percentiles_by_name() -> None:
    assert percentiles([float(i) for i in range(101)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}


def test_mean_and_variance() -> None:
    assert mean([1.0, 2.0, 6.0]) == 3.0
    assert variance([1.0, 2.0, 6.0]) == pytest.approx((4 + 1 + 9) / 3)


def test_one_requests_latencies() -> None:
    times = RequestTimes(arrival=10.0, first_token=10.5, finished=12.5, num_prompt=8, num_output=5)
    assert times.ttft == 0.5
    assert times.latency == 2.5
    assert times.inter_token == 0.5
    assert times.normalised == 0.5


def test_one_token_has_no_time_between_tokens() -> None:
    assert RequestTimes(0.0, 1.0, 1.0, 8, 1).inter_token is None


def test_throughput_of_two_requests() -> None:
    times = [RequestTimes(0.0, 1.0, 4.0, 10, 6), RequestTimes(2.0, 3.0, 5.0, 20, 4, num_answers=2)]
    found = throughput(times)
    assert (found.requests, found.output_tokens, found.total_tokens) == (0.4, 14 / 5, 44 / 5)


def test_nothing_has_no_metrics() -> None:
    for measure in (mean, lambda v: percentile(v, 50), lambda v: throughput([])):
        with pytest.raises(WorkloadError):
            measure([])
    with pytest.raises(WorkloadError, match="no time"):
        throughput([RequestTimes(1.0, 1.0, 1.0, 1, 1)])
