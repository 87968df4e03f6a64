"""The radix tree alone: matches to the token, splits at block boundaries, tails, and a model to compare with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged.cache.prefix_tree import PrefixTree
from cupaged.errors import InvariantError


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def tree_with(*entries: tuple[list[int], list[int]], block_size: int = 4) -> PrefixTree:
    tree = PrefixTree(64, block_size)
    for tokens, blocks in entries:
        tree.insert(ids(*tokens), ids(*blocks))
        tree.check_invariants()
    return tree


def match(tree: PrefixTree, *tokens: int) -> tuple[list[int], int]:
    found = tree.match(ids(*tokens))
    return found.blocks.tolist(), found.num_tokens


def test_an_empty_tree_matches_nothing() -> None:
    assert match(PrefixTree(4, 4), 1, 2, 3) == ([], 0)
    assert match(tree_with(([1, 2], [0]))) == ([], 0)


def test_a_match_goes_to_the_very_token() -> None:
    tree = tree_with(([1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11, 12]))
    assert match(tree, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10) == ([10, 11, 12], 9)
    assert match(tree, 1, 2, 3, 4, 5, 6, 7, 8, 9) == ([10, 11, 12], 9)
    assert match(tree, 1, 2, 3, 4, 5, 6, 7) == ([10, 11], 7)
    assert match(tree, 1, 2, 3, 4) == ([10], 4)
    assert match(tree, 1, 2, 9, 9, 9) == ([10], 2)
    assert match(tree, 1, 2, 3, 4, 5, 9) == ([10, 11], 5)
    assert match(tree, 2, 3) == ([], 0)


def test_matching_changes_nothing() -> None:
    tree = tree_with(([1, 2, 3, 4, 5, 6, 7, 8], [0, 1]))
    before = [(n.tokens.tolist(), n.used, n.hits) for n in tree.nodes()]
    match(tree, 1, 2, 3, 4, 5)
    assert [(n.tokens.tolist(), n.used, n.hits) for n in tree.nodes()] == before


def test_texts_that_part_inside_a_block_have_it_each_for_themselves() -> None:
    tree = tree_with(([1, 2, 3, 4, 5, 6, 7, 8], [0, 1]), ([1, 2, 3, 4, 5, 6, 9, 9], [0, 2]))
    assert match(tree, 1, 2, 3, 4, 5, 6, 9, 9) == ([0, 2], 8)
    assert match(tree, 1, 2, 3, 4, 5, 6, 7, 8) == ([0, 1], 8)
    assert match(tree, 1, 2, 3, 4, 5, 6, 7, 9)[1] == 7
    assert sorted(n.tokens.tolist() for n in tree.nodes()) == [[1, 2, 3, 4], [5, 6, 7, 8], [5, 6, 9, 9]]


def test_equal_blocks_are_merged_into_the_first() -> None:
    tree = tree_with(([1, 2, 3, 4, 5, 6, 7, 8], [0, 1]))
    held, dropped = tree.insert(ids(1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9), ids(5, 6, 7))
    assert (held.tolist(), dropped.tolist()) == ([0, 1, 7], [])
    tree.check_invariants()
    assert tree.owner(5) is None
    assert len(tree) == 3


def test_what_is_published_is_published_on_behind_it() -> None:
    tree = tree_with(([1, 2, 3, 4, 5, 6, 7, 8], [0, 1]), ([1, 2, 3, 4, 9, 9, 9, 9], [0, 2]))
    held, dropped = tree.insert(ids(1, 2, 3, 4, 5, 6, 7, 8, 1, 1, 1, 1), ids(0, 1, 3), num_published=2)
    assert (held.tolist(), dropped.tolist()) == ([0, 1, 3], [])
    tree.check_invariants()
    assert match(tree, 1, 2, 3, 4, 5, 6, 7, 8, 1, 1, 1, 1) == ([0, 1, 3], 12)
    way = tree.match(ids(1, 2, 3, 4, 5, 6, 7, 8, 1, 1, 1, 1)).nodes
    assert [node.used for node in way] == [tree.clock] * 3


def test_it_begins_at_the_root_where_the_published_part_does_not_end_a_node() -> None:
    longer = tree_with(([1, 2, 3, 4, 5, 6, 7, 8], [0, 1]))
    longer.insert(ids(1, 2, 3, 4, 9, 9, 9, 9), ids(0, 2), num_published=1)
    longer.check_invariants()
    assert match(longer, 1, 2, 3, 4, 9, 9, 9, 9) == ([0, 2], 8)
    forgotten = tree_with(([1, 2, 3, 4], [0]))
    forgotten.clear()
    held, _ = forgotten.insert(ids(1, 2, 3, 4, 5, 6, 7, 8), ids(0, 1), num_published=1)
    assert held.tolist() == [0, 1]
    assert match(forgotten, 1, 2, 3, 4, 5, 6, 7, 8) == ([0, 1], 8)


def test_a_tail_grows_in_its_own_block() -> None:
    tree = tree_with(([1, 2, 3, 4, 5], [0, 1]))
    held, dropped = tree.insert(ids(1, 2, 3, 4, 5, 6, 7), ids(0, 1))
    assert (held.tolist(), dropped.tolist()) == ([0, 1], [])
    assert tree.fill[1] == 3
    held, dropped = tree.insert(ids(1, 2, 3, 4, 5, 6, 7, 8, 9), ids(0, 1, 2))
    assert (held.tolist(), dropped.tolist()) == ([0, 1, 2], [])
    assert tree.fill[:3].tolist() == [4, 4, 1]
    tree.check_invariants()


def test_a_longer_tail_takes_a_shorter_ones_place() -> None:
    tree = tree_with(([1, 2, 3, 4, 5], [0, 1]))
    held, dropped = tree.insert(ids(1, 2, 3, 4, 5, 6), ids(0, 2))
    assert (held.tolist(), dropped.tolist()) == ([0, 2], [1])
    held, dropped = tree.insert(ids(1, 2, 3, 4, 5), ids(0, 9))
    assert (held.tolist(), dropped.tolist()) == ([0, 2], [])
    held, dropped = tree.insert(ids(1, 2, 3, 4, 5, 6, 7, 8), ids(0, 3))
    assert (held.tolist(), dropped.tolist()) == ([0, 3], [2])
    tree.check_invariants()
    assert len(tree) == 2


def test_tails_that_differ_live_side_by_side() -> None:
    tree = tree_with(([1, 2], [0]), ([1, 3], [1]))
    assert match(tree, 1, 3, 5) == ([1], 2)
    assert match(tree, 1, 2, 5) == ([0], 2)


def test_salts_keep_apart() -> None:
    tree = PrefixTree(8, 4)
    tree.insert(ids(1, 2, 3, 4), ids(0), salt="a")
    assert tree.match(ids(1, 2, 3, 4), salt="b").num_tokens == 0
    assert tree.match(ids(1, 2, 3, 4), salt="a").num_tokens == 4


def test_blocks_leave_from_the_end_of_a_branch() -> None:
    tree = tree_with(([1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 1, 2]), ([1, 2, 3, 4, 7], [0, 3]))
    leaf = tree.owner(2)
    with pytest.raises(InvariantError, match="only the end"):
        tree.pop_last(tree.owner(0))
    assert tree.pop_last(leaf) == 2
    assert tree.pop_last(tree.owner(1)) == 1
    assert match(tree, 1, 2, 3, 4, 5, 6) == ([0], 4)
    assert tree.pop_last(tree.owner(3)) == 3
    assert tree.pop_last(tree.owner(0)) == 0
    assert len(tree) == 0
    tree.check_invariants()


def test_a_block_enters_once() -> None:
    tree = tree_with(([1, 2, 3, 4], [0]))
    with pytest.raises(InvariantError, match="twice"):
        tree.insert(ids(9, 9, 9, 9), ids(0))


def test_the_same_key_bytes_of_other_tokens_are_other_tokens() -> None:
    """Tokens are compared: what begins alike in memory but ends elsewhere is another text."""
    tree = tree_with(([1, 0, 0, 0], [0]))
    assert match(tree, 1) == ([0], 1)
    assert match(tree, 256) == ([], 0)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.integers(1, 5),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=12),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), max_size=5),
)
def test_a_match_is_the_longest_that_any_inserted_text_offers(
    block_size: int, texts: list[list[int]], questions: list[list[int]]
) -> None:
    """With private blocks for every text, and each slot's content known, a match must be right and as long as can be."""
    tree = PrefixTree(400, block_size)
    content: dict[int, list[int]] = {}
    free = iter(range(400))
    for text in texts:
        blocks = [next(free) for _ in range(-(-len(text) // block_size))]
        for i, block in enumerate(blocks):
            content[block] = text[: (i + 1) * block_size]
        held, _ = tree.insert(ids(*text), ids(*blocks))
        tree.check_invariants()
        for i, block in enumerate(held.tolist()):
            assert content[block][: len(text[: (i + 1) * block_size])] == text[: (i + 1) * block_size]
    for question in texts + questions:
        found = tree.match(ids(*question))
        best = max((len(common) for common in (_prefix(text, question) for text in texts)), default=0)
        assert found.num_tokens == best
        assert len(found.blocks) == -(-best // block_size)
        for i, block in enumerate(found.blocks.tolist()):
            upto = min((i + 1) * block_size, best)
            assert content[block][:upto] == question[:upto]


def _prefix(a: list[int], b: list[int]) -> list[int]:
    size = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:size]
