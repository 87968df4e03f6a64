"""PrefixTree: which blocks hold the KV of which tokens, as a radix tree over token ids (RadixAttention, arXiv 2312.07104).

An edge is a run of full blocks, or one block that is filled in part: the tail that a finished sequence leaves behind,
so that the next turn of a conversation goes on to the very token.

    root
     |- [the cat sat on|the mat and th]            two full blocks, shared by everything below
     |    |- [en it .  ]                           a tail: 2 tokens of 4
     |    `- [en the dog ca|me in and b]           begins with the same token as its sibling: other blocks all the same
     `- [once upon a ti|me there was a]

Two texts that part inside a block have that block each for themselves, so nodes split at block boundaries only, and
children may begin alike. A match that ends inside a block names the block and how much of it is good.

`match` is pure. The tree holds no count on a block and does not know who uses it: that is the manager's business.
Tokens are compared, never hashes alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import numpy as np

from cupaged.errors import InvariantError
from cupaged.step_plan import IntArray, common_prefix

KEY_TYPE = np.dtype(">i4")
KEY_BYTES = KEY_TYPE.itemsize


class Match(NamedTuple):
    """Blocks (int32) whose first `num_tokens` slots hold the KV of the tokens asked for; the last one maybe in part."""

    blocks: IntArray
    num_tokens: int
    nodes: list[Node]
    """The nodes on the way, from the root down: what has just been of use."""


class Node:
    """An edge and what hangs below it.

    tokens      int32 [num_tokens], in `blocks` (int32): full blocks, or one tail
    children    key of a child's first block of tokens (see _key) -> the child
    order       the children's keys, sorted: of all children, a neighbour of some tokens' key shares most with them
    born, used  the tree's clock when it was made, and when it was last of use
    number      its own, in the order in which nodes were made
    queued      whether the eviction queue has an entry for it
    hits, fan   how often it was of use; how many children it ever got
    """

    __slots__ = ("blocks", "born", "children", "fan", "hits", "number", "order", "parent", "queued", "tokens", "used")

    def __init__(self, parent: Node | None, tokens: IntArray, blocks: IntArray, born: int, number: int) -> None:
        self.parent = parent
        self.number = number
        self.tokens = tokens
        self.blocks = blocks
        self.children: dict[bytes, Node] = {}
        self.order: list[bytes] = []
        self.born = born
        self.used = born
        self.hits = 0
        self.queued = False
        self.fan = 0

    @property
    def depth(self) -> int:
        """Tokens from the root to the end of this edge."""
        node: Node | None = self
        total = 0
        while node is not None:
            total += len(node.tokens)
            node = node.parent
        return total


class PrefixTree:
    """Maps token sequences to blocks of `block_size` tokens, of a pool of `num_blocks`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.fill = np.zeros(num_blocks, np.int32)
        """int32 [num_blocks]: how many slots of a block are published; 0 for a block that is not in the tree."""
        self._owner: list[Node | None] = [None] * num_blocks
        self._roots: dict[str, Node] = {}
        self.clock = 0
        self._numbers = count()

    # ---- looking

    def match(self, tokens: IntArray, salt: str = "") -> Match:
        """The longest prefix of `tokens` (int32) that is in the tree of this salt. Changes nothing."""
        node = self._roots.get(salt)
        blocks: list[IntArray] = []
        path: list[Node] = []
        done = 0
        while node is not None and done < len(tokens):
            child, common = self._best_child(node, tokens[done:])
            if child is None or not common:
                break
            path.append(child)
            blocks.append(child.blocks[: -(-common // self.block_size)])
            done += common
            if common < len(child.tokens) or common % self.block_size:
                break
            node = child
        return Match(np.concatenate(blocks) if blocks else np.empty(0, np.int32), done, path)

    def _best_child(self, node: Node, tokens: IntArray) -> tuple[Node | None, int]:
        """The child that shares the most tokens, and how many."""
        key = self._key(tokens)
        same = node.children.get(key) if len(tokens) >= self.block_size else None
        if same is not None:
            return same, common_prefix(same.tokens, tokens)  # no other child shares a whole block
        place = bisect_left(node.order, key)
        neighbours = [node.children[key] for key in node.order[max(0, place - 1) : place + 1]]
        found = [(common_prefix(child.tokens, tokens), child) for child in neighbours]
        return max(found, key=lambda pair: pair[0], default=(0, None))[::-1]

    # ---- adding

    def insert(self, tokens: IntArray, blocks: IntArray, salt: str = "", num_published: int = 0) -> tuple[IntArray, IntArray]:
        """Add int32 `tokens` whose KV is in int32 `blocks` (the last one maybe in part).

        The first `num_published` blocks came back from an earlier call with the same first tokens: where they are still in
        the tree, it goes on behind them without comparing these tokens again.

        Returns (the blocks that the tree holds for these tokens: an equal one that was there first stands in for the
        one given; blocks of shorter tails that are no longer in the tree, because a longer one took their place).
        """
        self.clock += 1
        full = len(tokens) // self.block_size
        held = blocks.copy()
        dropped: list[int] = []
        node, done = self._end_of(blocks, num_published), num_published
        if node is None:
            node, done = self._root(salt), 0
        while done < full:
            rest = tokens[done * self.block_size : full * self.block_size]
            child = node.children.get(self._key(rest))
            if child is None:
                dropped += self._drop_tails(node, rest, blocks[done])
                self._attach(node, rest, blocks[done:full])
                node = self._child(node, rest)
                break
            shared = common_prefix(child.tokens, rest) // self.block_size
            if shared < len(child.blocks):
                child = self._split(child, shared)
            held[done : done + shared] = child.blocks
            child.used = self.clock
            node, done = child, done + shared
        tail = tokens[full * self.block_size :]
        if len(tail):
            held[full], more = self._insert_tail(node, tail, int(blocks[full]))
            dropped += more
        return held, np.array(dropped, np.int32)

    def _root(self, salt: str) -> Node:
        if salt not in self._roots:
            self._roots[salt] = Node(None, np.empty(0, np.int32), np.empty(0, np.int32), self.clock, next(self._numbers))
        return self._roots[salt]

    def _end_of(self, blocks: IntArray, count: int) -> Node | None:
        """The node that ends with the first `count` of a path's blocks, all of it marked as used; None if there is none."""
        last = blocks.item(count - 1) if count else -1
        end = self._owner[last] if count else None
        if end is None or end.blocks[-1] != last:
            return None
        node: Node | None = end
        while node is not None:
            node.used = self.clock
            node = node.parent
        return end

    def _insert_tail(self, node: Node, tail: IntArray, block: int) -> tuple[int, list[int]]:
        """The block that holds the tail now, and the blocks of tails that it made superfluous."""
        key = self._key(tail)
        place = bisect_left(node.order, key)
        if place < len(node.order) and node.order[place].startswith(key):
            longer = node.children[node.order[place]]
            longer.used = self.clock
            return int(longer.blocks[0]), []
        dropped = self._drop_tails(node, tail, block)
        self._attach(node, tail, np.array([block], np.int32))
        return block, dropped

    def _drop_tails(self, node: Node, tokens: IntArray, block: int) -> list[int]:
        """Detach the tails that `tokens` begins with; their blocks, but not `block`, which lives on with more tokens."""
        if not node.children:
            return []
        key = self._key(tokens)
        keys = (key[: KEY_BYTES * size] for size in range(1, min(self.block_size, len(tokens) + 1)))
        covered = [node.children[key] for key in keys if key in node.children]
        for child in covered:
            self._detach(child)
        return [int(child.blocks[0]) for child in covered if child.blocks[0] != block]

    def _key(self, tokens: IntArray) -> bytes:
        """The first block of tokens as bytes that sort as the tokens do."""
        return tokens[: self.block_size].astype(KEY_TYPE).tobytes()

    def _child(self, node: Node, tokens: IntArray) -> Node:
        return node.children[self._key(tokens)]

    def _attach(self, parent: Node, tokens: IntArray, blocks: IntArray) -> None:
        if self.fill[blocks].any():
            raise InvariantError("a block enters the prefix tree twice")
        node = Node(parent, tokens.copy(), blocks.copy(), self.clock, next(self._numbers))
        key = self._key(tokens)
        parent.children[key] = node
        insort(parent.order, key)
        parent.fan += 1
        self.fill[blocks] = self.block_size
        self.fill[blocks[-1]] = len(tokens) - (len(blocks) - 1) * self.block_size
        for block in blocks.tolist():
            self._owner[block] = node

    def _split(self, node: Node, num_blocks: int) -> Node:
        """Cut a run after some blocks: a new parent takes these, `node` keeps its end and its children."""
        assert node.parent is not None
        cut, parent = num_blocks * self.block_size, node.parent
        upper = Node(parent, node.tokens[:cut], node.blocks[:num_blocks], node.born, next(self._numbers))
        upper.used, upper.hits, upper.fan = node.used, node.hits, 1
        parent.children[self._key(node.tokens)] = upper
        node.parent, node.tokens, node.blocks = upper, node.tokens[cut:], node.blocks[num_blocks:]
        upper.order = [self._key(node.tokens)]
        upper.children = {upper.order[0]: node}
        for block in upper.blocks.tolist():
            self._owner[block] = upper
        return upper

    # ---- removing

    def _detach(self, node: Node) -> None:
        assert node.parent is not None
        key = self._key(node.tokens)
        del node.parent.children[key]
        del node.parent.order[bisect_left(node.parent.order, key)]
        self.fill[node.blocks] = 0
        for block in node.blocks.tolist():
            self._owner[block] = None

    def pop_last(self, leaf: Node) -> int:
        """Take the last block of a leaf out of the tree; which one. A leaf that has no other goes with it."""
        if leaf.children:
            raise InvariantError("only the end of a branch can be taken out of the prefix tree")
        block = int(leaf.blocks[-1])
        if len(leaf.blocks) == 1:
            self._detach(leaf)
        else:
            self.fill[block] = 0
            self._owner[block] = None
            leaf.blocks = leaf.blocks[:-1]
            leaf.tokens = leaf.tokens[: len(leaf.blocks) * self.block_size]
        return block

    def clear(self) -> None:
        """Forget everything."""
        self._roots.clear()
        self.fill[:] = 0
        self._owner = [None] * len(self._owner)

    # ---- what is there

    def owner(self, block: int) -> Node | None:
        """The node that holds a block, or None."""
        return self._owner[block]

    def touch(self, nodes: list[Node]) -> None:
        """The nodes of a match were of use."""
        self.clock += 1
        for node in nodes:
            node.used = self.clock
            node.hits += 1

    def __len__(self) -> int:
        """Blocks in the tree."""
        return int(np.count_nonzero(self.fill))

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def check_invariants(self) -> None:
        """Raise InvariantError unless every node is well formed and the per-block arrays tell the same."""
        fill = np.zeros_like(self.fill)
        for node in self.nodes():
            if fill[node.blocks].any():
                raise InvariantError("two nodes of the prefix tree hold one block")
            if len(node.blocks) != -(-len(node.tokens) // self.block_size) or not len(node.tokens):
                raise InvariantError("a node's blocks do not fit its tokens")
            if len(node.tokens) % self.block_size and (len(node.blocks) > 1 or node.children):
                raise InvariantError("a tail is neither alone nor last")
            if sorted(node.children) != node.order:
                raise InvariantError("a node's children and their order differ")
            if node.parent is None or self._child(node.parent, node.tokens) is not node:
                raise InvariantError("a node's parent does not know it")
            fill[node.blocks] = self.block_size
            fill[node.blocks[-1]] = len(node.tokens) - (len(node.blocks) - 1) * self.block_size
            if any(self._owner[block] is not node for block in node.blocks.tolist()):
                raise InvariantError("a block's owner is another node")
        if not np.array_equal(fill, self.fill):
            raise InvariantError("published lengths and the prefix tree differ")

