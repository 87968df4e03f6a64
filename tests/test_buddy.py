"""The buddy allocator: hand-computed cases, and for any sequence of requests no overlap and nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged.cache.buddy import BuddyAllocator
from cupaged.errors import InvariantError


def test_a_run_is_rounded_up_to_a_power_of_two_and_taken_from_the_lowest_fitting_place() -> None:
    buddy = BuddyAllocator(16)
    assert buddy.allocate(3) == range(4)  # 16 is split into 8 + 4 + (4)
    assert buddy.allocate(4) == range(4, 8)
    assert buddy.allocate(1) == range(8, 9)
    assert buddy.allocate(4) == range(12, 16)  # 9 .. 11 are a 1 and a 2
    assert buddy.free_runs() == [range(9, 10), range(10, 12)]
    assert buddy.num_free == 3
    assert buddy.allocate(3) is None, "three are free, but not as one run of four"
    assert buddy.num_free == 3


def test_buddies_merge_and_neighbours_that_are_no_buddies_do_not() -> None:
    buddy = BuddyAllocator(8)
    for _ in range(4):
        buddy.allocate(2)
    buddy.free(range(2, 4))
    buddy.free(range(4, 6))
    assert buddy.free_runs() == [range(2, 4), range(4, 6)], "side by side, but halves of different wholes"
    assert buddy.allocate(4) is None
    buddy.free(range(2))
    assert buddy.free_runs() == [range(4), range(4, 6)]
    buddy.free(range(6, 8))
    assert buddy.free_runs() == [range(8)]


def test_a_size_that_is_no_power_of_two_is_a_sum_of_them() -> None:
    buddy = BuddyAllocator(983)
    assert [len(run) for run in buddy.free_runs()] == [512, 256, 128, 64, 16, 4, 2, 1]
    assert buddy.largest == 512
    runs = [buddy.allocate(128) for _ in range(7)]
    assert all(run is not None for run in runs)
    assert buddy.allocate(128) is None, "seven requests of 2,048 tokens, as in arXiv 2309.06180"
    assert buddy.num_free == 983 - 7 * 128


def test_the_smallest_run_that_fits_is_split() -> None:
    buddy = BuddyAllocator(12)  # 8 and 4
    assert buddy.allocate(4) == range(8, 12)
    assert buddy.allocate(8) == range(8)


def test_a_part_of_a_run_may_come_back_first() -> None:
    buddy = BuddyAllocator(8)
    assert buddy.allocate(8) == range(8)
    buddy.free(range(3, 8))
    assert buddy.free_runs() == [range(3, 4), range(4, 8)]
    buddy.free(range(3))
    assert buddy.free_runs() == [range(8)]


def test_a_run_grows_over_its_free_buddies() -> None:
    buddy = BuddyAllocator(16)
    assert [buddy.allocate(2) for _ in range(3)] == [range(2), range(2, 4), range(4, 6)]
    assert buddy.extend(range(2), 4) is None, "its buddy is taken"
    assert buddy.extend(range(4, 6), 5) is None, "4 .. 7 would do, but what lies before them is taken"
    assert buddy.extend(range(4, 6), 3) == range(4, 8)
    assert buddy.num_free == 8
    buddy.free(range(2))
    assert buddy.extend(range(2, 4), 4) == range(4), "the buddy may lie before it"
    assert buddy.free_runs() == [range(8, 16)]


@pytest.mark.parametrize("run", [range(2), range(5, 9), range(-1, 1)])
def test_what_is_not_out_cannot_come_back(run: range) -> None:
    buddy = BuddyAllocator(8)
    assert buddy.allocate(4) == range(4)
    buddy.free(range(2))
    with pytest.raises(InvariantError):
        buddy.free(run)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 200), st.lists(st.integers(-8, 40).filter(bool), max_size=80))
def test_runs_never_overlap_and_nothing_is_lost(size: int, commands: list[int]) -> None:
    """A positive number takes that many, a negative one gives back one of the runs that are out."""
    buddy = BuddyAllocator(size)
    fresh = buddy.free_runs()
    out: list[range] = []
    for command in commands:
        if command > 0:
            largest = max((len(run) for run in buddy.free_runs()), default=0)
            run = buddy.allocate(command)
            rounded = 1 << (command - 1).bit_length()
            assert (run is None) == (rounded > largest), "it is refused exactly where no free run is large enough"
            if run is not None:
                assert len(run) == rounded
                assert run.start % rounded == 0
                out.append(run)
        elif out:
            buddy.free(out.pop(command % len(out)))
        places = [place for run in (*out, *buddy.free_runs()) for place in run]
        assert sorted(places) == list(range(size)), "every place is free or out, once"
        assert buddy.num_free == size - sum(map(len, out))
    for run in out:
        buddy.free(run)
    assert buddy.free_runs() == fresh, "all of it merges again"
