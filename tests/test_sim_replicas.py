"""Many replicas: what routers choose, by hand, and that sending like to like finds more in the caches."""

from __future__ import annotations

import numpy as np
import pytest

from cupaged.presets import DEVICES, MODELS
from cupaged.sim.replicas import GRACE, PrefixMap, Router, fleet_workload, simulate_fleet
from cupaged.sim.report import simulate
from cupaged.sim.setup import Setup
from cupaged.workloads.generators import make


def tokens(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_a_prefix_map_knows_whole_blocks_and_the_longest_first() -> None:
    known = PrefixMap(2)
    known.sent(tokens(1, 2, 3, 4, 5), 7)
    known.sent(tokens(1, 2, 9, 9), 8)
    assert known.deepest(tokens(1, 2, 3, 4)) == [{7}, {7, 8}]
    assert known.deepest(tokens(1, 2, 3, 5)) == [{7, 8}]
    assert known.deepest(tokens(1)) == []
    assert known.deepest(tokens(3, 4)) == [], "the same block elsewhere is another prefix"


def test_the_prefix_router_follows_prefixes_until_a_replica_has_too_much() -> None:
    router = Router("prefix", 3, 2)
    assert router.route(tokens(1, 2, 3)) == 0
    router.load = [1, 0, 0]
    assert router.route(tokens(1, 2, 8)) == 0, "there it is known"
    assert router.route(tokens(5, 6, 7)) == 1, "nowhere known: where the fewest are"
    router.load = [9, 2, 1]  # 1.5 times the mean of 4, and 4
    assert router.route(tokens(1, 2, 9)) == 0
    router.load = [9 + GRACE, 2, 1]
    assert router.route(tokens(1, 2, 9)) == 2
    router.load = [0, 0, 3]
    assert router.route(tokens(1, 2, 9)) == 0, "both know it by now: the one with fewer requests"


def test_random_and_least_by_hand() -> None:
    least = Router("least", 3, 2)
    least.load = [2, 1, 1]
    assert least.route(tokens(1)) == 1
    chosen = [Router("random", 4, 2, seed=3).route(tokens(1)) for _ in range(3)]
    assert chosen[0] == chosen[1] == chosen[2], "the lot is the seed's"
    router = Router("random", 4, 2)
    assert {router.route(tokens(1)) for _ in range(100)} == {0, 1, 2, 3}


@pytest.fixture(scope="module")
def world() -> Setup:
    return Setup(MODELS["llama-3-8b"], DEVICES["h100"], num_blocks=400, max_len=1024)


def test_one_replica_is_the_simulator(world: Setup) -> None:
    workload = make("chats", 40, 20.0, 0, 1000, 1024)
    one, alone = simulate_fleet(workload, world, 1, "prefix"), simulate(workload, world)
    assert one.seconds == alone.seconds
    assert one.computed_tokens == alone.computed_tokens


def test_more_replicas_have_more_conversations() -> None:
    one, many = (fleet_workload("chats", 60, 10.0, 0, 1000, 1024, replicas) for replicas in (1, 16))
    assert len({request.session for request in many.requests}) > 2 * len({request.session for request in one.requests})
    assert fleet_workload("alpaca", 5, None, 0, 1000, 1024, 9).describe() == make("alpaca", 5, None, 0, 1000, 1024).describe()


def test_sending_like_to_like_computes_less(world: Setup) -> None:
    workload = fleet_workload("chats", 300, 100.0, 0, 1000, 1024, 16)
    by_lot, by_prefix = (simulate_fleet(workload, world, 8, routing) for routing in ("random", "prefix"))
    assert by_prefix.hit_rate > 2 * by_lot.hit_rate
    assert by_prefix.computed_tokens < 0.8 * by_lot.computed_tokens
    assert by_prefix.first_token["p50"] < by_lot.first_token["p50"]
    again = simulate_fleet(workload, world, 8, "prefix")
    assert again == by_prefix


def test_where_nothing_is_shared_routing_by_prefix_only_balances(world: Setup) -> None:
    workload = make("alpaca", 100, 100.0, 0, 1 << 24, 1024)
    by_prefix, least = (simulate_fleet(workload, world, 4, routing) for routing in ("prefix", "least"))
    assert by_prefix.computed_tokens == least.computed_tokens
    assert by_prefix.hit_rate == least.hit_rate == 0
