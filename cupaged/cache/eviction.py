"""Which cached block goes first when the pool needs room: the end of the branch with the smallest key.

Only ends of branches can go, so a prefix always outlives what was built on it. A policy is one comparison.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from cupaged.cache.block_pool import BlockPool
from cupaged.cache.prefix_tree import Node, PrefixTree
from cupaged.errors import InvariantError

Key = tuple[float, ...]


def least_recently_used(node: Node) -> Key:
    """What was of use longest ago (the default)."""
    return (node.used,)


def first_in_first_out(node: Node) -> Key:
    """What was computed longest ago, whoever uses it."""
    return (node.born,)


def least_frequently_used(node: Node) -> Key:
    """What was of use least often; the older one of equals."""
    return (node.hits, node.used)


def prefix_weighted(node: Node) -> Key:
    """What is worth least as a prefix: deep in the tree, seldom of use, and with few branches that ever began there."""
    return ((1 + node.hits) * (1 + node.fan) / node.depth, node.used)


POLICIES: dict[str, Callable[[Node], Key]] = {
    "lru": least_recently_used,
    "fifo": first_in_first_out,
    "lfu": least_frequently_used,
    "weighted": prefix_weighted,
}


class EvictionQueue:
    """The ends of branches that nobody holds, the one that the policy values least first.

    A heap with lazy repair: whatever makes a node evictable offers it, and an entry that no longer holds (the node is
    in use, was extended or is gone, or its key has changed) is put right when it comes up. A node has one entry at most.
    """

    def __init__(self, tree: PrefixTree, pool: BlockPool, policy: Callable[[Node], Key]) -> None:
        self._tree = tree
        self._pool = pool
        self._policy = policy
        self._heap: list[tuple[Key, int, Node]] = []
        self._offered = 0

    def offer(self, node: Node) -> None:
        """The node may have become evictable."""
        if not node.queued and self._is_evictable(node):
            node.queued = True
            self._offered += 1
            heapq.heappush(self._heap, (self._policy(node), self._offered, node))

    def pop(self) -> int | None:
        """Take the least valued block out of the tree: which one, or None if none can go."""
        while self._heap:
            key, _, node = heapq.heappop(self._heap)
            node.queued = False
            if not self._is_evictable(node):
                continue
            if key != self._policy(node):
                self.offer(node)
                continue
            parent = node.parent
            block = self._tree.pop_last(node)
            self.offer(node)
            if parent is not None:
                self.offer(parent)
            return block
        return None

    def clear(self) -> None:
        for _, _, node in self._heap:
            node.queued = False
        self._heap.clear()

    def _is_evictable(self, node: Node) -> bool:
        """Whether a node is in the tree, ends a branch, and nobody holds its last block."""
        if node.children or not len(node.blocks):
            return False
        last = int(node.blocks[-1])
        return self._tree.owner(last) is node and not self._pool.counts[last]

    def check_invariants(self) -> None:
        """Raise InvariantError if eviction would not find a block that can go."""
        queued = {id(node) for _, _, node in self._heap}
        if any(self._is_evictable(node) and id(node) not in queued for node in self._tree.nodes()):
            raise InvariantError("an evictable block was lost: no eviction will find it")
