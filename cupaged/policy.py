"""Who is served next and who gives way. A policy only chooses; the scheduler acts, and sees to it that nobody starves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many
from typing import Protocol

from cupaged.cache.manager import CacheManager
from cupaged.sequence import Request

LOOK_AHEAD = 128
"""How many waiting requests a policy compares; those behind them move up in time."""


class Policy(Protocol):
    def choose(self, waiting: Many[Request], cache: CacheManager) -> Request:
        """The request to admit next, of at least one, which are in the order of their arrival."""
        ...


class FirstComeFirstServed:
    """The earliest request first (the default)."""

    def choose(self, waiting: Many[Request], cache: CacheManager) -> Request:
        return waiting[0]


class LongestPrefixMatch:
    """The request of which most tokens are cached, before the cache forgets them; of equals the earliest."""

    def choose(self, waiting: Many[Request], cache: CacheManager) -> Request:
        return max(waiting[:LOOK_AHEAD], key=lambda request: cache.cached_prefix(request.live[0].reusable, request.salt))


class DepthFirst:
    """In depth-first order of the prefix tree, the branch with the most waiting requests first.

    What was just computed is then used by all that can use it before anything else takes its place, which is optimal
    for a cache that holds the longest request (RadixAttention, arXiv 2312.07104, section 3).
    """

    def choose(self, waiting: Many[Request], cache: CacheManager) -> Request:
        found = [(*cache.path(request.live[0].reusable, request.salt), request) for request in waiting[:LOOK_AHEAD]]
        weights = Counter(node for path, _, _ in found for node in path)

        def turn(entry: tuple[tuple[int, ...], int, Request]) -> tuple[tuple[tuple[int, int], ...], int, int]:
            path, num_tokens, request = entry
            # of those on the same way the deepest comes first: all of a branch before it is left
            return (*((-weights[node], node) for node in path), (1, 0)), -num_tokens, request.arrival

        return min(found, key=turn)[2]


POLICIES: dict[str, type[Policy]] = {
    "fcfs": FirstComeFirstServed,
    "lpm": LongestPrefixMatch,
    "dfs": DepthFirst,
}
