"""RadixAttention's optimum (arXiv 2312.07104, theorem 3.1): requests served one at a time in depth-first order of their
radix tree compute each of its edges once, even where the pool holds little more than the longest request.

Outputs do not count (max_tokens is 1: the token that is sampled is never computed), prompts are distinct and parents
come before children. A prompt that is itself a cached prefix costs one token more: its last one is always computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.support.integer_model import IntegerModel, expected_output
from tests.support.requests import make_request, make_scheduler


@dataclass
class Edge:
    """A prompt of the radix tree: its parent's tokens and those of its own edge."""

    prompt: list[int]
    length: int
    children: list[Edge] = field(default_factory=list)

    def depth_first(self) -> list[Edge]:
        return [self, *(edge for child in self.children for edge in child.depth_first())]


def random_forest(seed: int, num_prompts: int, longest_edge: int) -> list[Edge]:
    """Distinct prompts; children of one parent begin with different tokens, so the edges are those of the radix tree."""
    random = np.random.default_rng(seed)
    root = Edge([], 0)
    edges = [root]
    for _ in range(num_prompts):
        # a recent parent half of the time: deep branches beside broad ones
        parent = edges[-1] if random.random() < 0.5 else edges[random.integers(len(edges))]
        length = int(random.integers(1, longest_edge))
        edge = Edge([*parent.prompt, len(parent.children), *random.integers(0, 3, length - 1).tolist()], length)
        parent.children.append(edge)
        edges.append(edge)
    return root.depth_first()[1:]


def breadth_first(forest: list[Edge]) -> list[Edge]:
    return sorted(forest, key=lambda edge: len(edge.prompt))


def serve(order: list[Edge], num_blocks: int, block_size: int, eviction: str = "lru") -> list[int]:
    """Prompts one at a time through the scheduler: the tokens that each of them computed."""
    scheduler = make_scheduler(num_blocks, block_size, budget=64, eviction=eviction)
    model = IntegerModel(num_blocks, block_size)
    computed = []
    for number, edge in enumerate(order):
        before = model.computed
        sequence = scheduler.add(make_request(str(number), edge.prompt, 1))
        while scheduler.has_unfinished():
            plan = scheduler.schedule()
            scheduler.apply(plan, model.run(plan))
            model.poison(scheduler.cache)
        scheduler.check_invariants()
        assert sequence.output_ids.tolist() == expected_output(np.array(edge.prompt), 1)
        computed.append(model.computed - before)
    return computed


def tight(forest: list[Edge], block_size: int) -> int:
    """Blocks of the longest prompt, and one for the copy of the block that it goes on in."""
    return -(-max(len(edge.prompt) for edge in forest) // block_size) + 1


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("seed", range(5))
def test_depth_first_order_computes_every_edge_once_in_a_pool_of_one_request(seed: int, block_size: int) -> None:
    forest = random_forest(seed, 60, 40)
    assert serve(forest, tight(forest, block_size), block_size) == [edge.length for edge in forest]


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("eviction", ["lru", "fifo", "lfu", "weighted"])
def test_in_a_roomy_pool_any_order_of_parents_before_children_does(eviction: str, block_size: int) -> None:
    forest = random_forest(7, 60, 40)
    order = breadth_first(forest)
    assert sum(serve(order, 3000 // block_size + 100, block_size, eviction)) == sum(edge.length for edge in forest)


def test_in_a_tight_pool_the_order_matters() -> None:
    forest = random_forest(3, 60, 40)
    optimum = sum(edge.length for edge in forest)
    assert sum(serve(breadth_first(forest), tight(forest, 16), 16)) > 1.5 * optimum


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_prompt_that_is_a_cached_prefix_costs_its_last_token(block_size: int) -> None:
    """Children before parents: every prompt with a child is then such a prefix."""
    forest = random_forest(5, 60, 40)
    computed = serve(forest[::-1], 3000 // block_size + 100, block_size)
    parents = sum(bool(edge.children) for edge in forest)
    assert parents > 10
    assert sum(computed) == sum(edge.length for edge in forest) + parents
