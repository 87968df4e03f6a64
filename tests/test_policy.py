"""The queue: what each policy prefers, and that nobody is passed over for ever."""

from __future__ import annotations

import pytest

from cupaged.admission import MAX_TIMES_PASSED
from cupaged.scheduler import Scheduler
from tests.support.integer_model import IntegerModel
from tests.support.requests import make_request, make_scheduler


def run(scheduler: Scheduler, model: IntegerModel) -> None:
    plan = scheduler.schedule()
    scheduler.apply(plan, model.run(plan))
    scheduler.check_invariants()


def order_of_service(queue: str, num_blocks: int = 40) -> list[str]:
    """One request at a time; the first one's prompt is cached when the others come."""
    scheduler, model = make_scheduler(num_blocks, 4, max_seqs=1, queue=queue), IntegerModel(num_blocks, 4)
    trunk, branch = [1] * 8, [1] * 8 + [2] * 8
    first = make_request("first", branch, 1)
    scheduler.add(first)
    while scheduler.has_unfinished():
        run(scheduler, model)
    others = {
        "stranger": [9] * 12,
        "trunk": [*trunk, 5, 5],
        "another stranger": [8] * 12,
        "branch": [*branch, 5],
        "branch again": [*branch, 6],
    }
    requests = {name: make_request(name, prompt, 1) for name, prompt in others.items()}
    for request in requests.values():
        scheduler.add(request)
    served: list[str] = []
    while scheduler.has_unfinished():
        run(scheduler, model)
        served += [name for name, r in requests.items() if r.sequences[0].finish_reason and name not in served]
    return served


def test_first_come_first_served() -> None:
    assert order_of_service("fcfs") == ["stranger", "trunk", "another stranger", "branch", "branch again"]


def test_longest_prefix_match() -> None:
    assert order_of_service("lpm") == ["branch", "branch again", "trunk", "stranger", "another stranger"]


def test_depth_first_finishes_a_branch_before_it_leaves_it() -> None:
    served = order_of_service("dfs")
    assert served[:3] == ["branch", "branch again", "trunk"]


@pytest.mark.parametrize("queue", ["fcfs", "lpm", "dfs"])
def test_nobody_is_passed_over_for_ever(queue: str) -> None:
    """Requests with a cached prefix keep coming; the stranger is served after a bounded number of them."""
    scheduler, model = make_scheduler(60, 4, max_seqs=1, queue=queue), IntegerModel(60, 4)
    scheduler.add(make_request("seed", [1] * 16, 1))
    run(scheduler, model)
    stranger = make_request("stranger", [9] * 12, 1)
    scheduler.add(make_request("favourite", [*([1] * 16), 0], 1))
    scheduler.add(stranger)
    for i in range(3 * MAX_TIMES_PASSED):
        scheduler.add(make_request(f"favourite {i}", [*([1] * 16), 2 + i], 1))
        run(scheduler, model)
        if stranger.sequences[0].finish_reason:
            break
    assert stranger.sequences[0].finish_reason == "length"
    assert (i > MAX_TIMES_PASSED - 2) == (queue != "fcfs")


def test_what_is_cached_under_another_salt_is_no_reason_to_go_first() -> None:
    scheduler, model = make_scheduler(40, 4, max_seqs=1, queue="lpm"), IntegerModel(40, 4)
    scheduler.add(make_request("first", [1] * 8, 1))
    run(scheduler, model)
    stranger = make_request("stranger", [1] * 9, 1, salt="other")
    friend = make_request("friend", [1] * 4 + [7], 1)
    scheduler.add(stranger)
    scheduler.add(friend)
    run(scheduler, model)
    assert (stranger.sequences[0].finish_reason, friend.sequences[0].finish_reason) == (None, "length")
