"""The PagedAttention paper's tables, simulated: what must come out near, what in the same order, and a setting that breaks it."""

from __future__ import annotations

import json

import pytest

from cupaged.cli.main import run
from cupaged.sim.paper import BATCH, WASTE, batch_table, paper_run, waste_table

POLICIES = ["max", "pow2", "oracle", "paged"]


def test_the_paper_s_rows_add_up() -> None:
    assert all(sum(row) == pytest.approx(100, abs=0.15) for row in WASTE.values())


@pytest.fixture(scope="module")
def waste() -> dict[str, dict[str, float]]:
    return waste_table(200)


def test_waste_is_in_the_paper_s_order_and_near_its_figures(waste: dict[str, dict[str, float]]) -> None:
    filled = {name: row["token_states"] for name, row in waste.items()}
    assert sorted(filled, key=filled.__getitem__) == POLICIES
    for name in POLICIES:
        assert filled[name] == pytest.approx(WASTE[name][0], abs=5), name
        assert sum(waste[name].values()) == pytest.approx(100)
    assert waste["max"]["external"] == pytest.approx(WASTE["max"][3], abs=0.5), "what 7 times 2,048 slots leave of 15.7K"
    assert waste["oracle"]["internal"] == 0


def test_a_low_rate_leaves_the_pages_empty() -> None:
    """The setting that makes the 96 % fail: a pool that nobody asks for is not full of token states, paged or not."""
    assert paper_run("paged", "sharegpt", 0.5, 60).memory["token_states"] < 0.5


def test_contiguous_batches_are_predicted() -> None:
    """The one constant is fitted on the paged row; these rows are predictions."""
    found = batch_table("sharegpt", 200)
    for name in ("max", "pow2", "oracle"):
        assert found[name] == pytest.approx(BATCH["sharegpt", 2.0][name], rel=0.1), name
    assert found["paged"] > 1.5 * found["oracle"]


def test_short_requests_fill_a_batch_where_their_prompts_take_steps_of_their_own() -> None:
    """The setting that makes Alpaca's row fail: mixed with answers, prompts that come 30 times a second cost no steps."""
    apart, mixed = (paper_run("paged", "alpaca", 30.0, 800, batching=batching).mean_batch for batching in ("separate", "continuous"))
    assert apart == pytest.approx(BATCH["alpaca", 30.0]["paged"], rel=0.25)
    assert mixed < 0.6 * apart


def test_growth_on_demand_preempts_where_pages_do_much_less() -> None:
    demand, paged = (paper_run(name, "sharegpt", 4.0, 150).preemptions for name in ("demand", "paged"))
    assert demand > 4 * paged
    assert paper_run("oracle", "sharegpt", 4.0, 60).preemptions == 0


def test_the_command_sets_the_tables_beside_the_paper_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--paper", "--requests", "12"]) == 0
    out = capsys.readouterr().out
    assert "paged   nobody had to wait" in out
    assert "(20.4)" in out
    assert "(30.42)" in out
    assert run(["simulate", "--paper", "--requests", "12", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["waste"]) == set(POLICIES)
