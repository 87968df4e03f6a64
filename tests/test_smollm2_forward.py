"""The real model against reference outputs computed with another implementation, on fixed block tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.model.runner import Runner
from tests.conftest import golden
from tests.support.greedy import greedy, open_runner

BLOCK_SIZE, NUM_BLOCKS = 16, 100
SCATTERED = np.random.default_rng(5).permutation(NUM_BLOCKS).tolist()
MARGIN = 1e-3
"""From the first step whose two best logits are closer than this on, another float order may choose another token."""

CASES = golden("smollm2_greedy.json")["cases"]


def comparable(case: dict[str, Any]) -> int:
    return next((i for i, margin in enumerate(case["margin"]) if margin < MARGIN), len(case["greedy_ids"]))


@pytest.fixture(scope="module", params=["reference", "cpu"])
def runner(request: pytest.FixtureRequest, smollm2_path: Path) -> Runner:
    return open_runner(smollm2_path, request.param, NUM_BLOCKS, BLOCK_SIZE)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_greedy_tokens_and_logprobs(runner: Runner, case: dict[str, Any]) -> None:
    count = comparable(case)
    assert count > 0
    tokens, logprobs = greedy(runner, case["prompt_ids"], count, SCATTERED, BLOCK_SIZE, chunk=100)
    assert tokens == case["greedy_ids"][:count]
    np.testing.assert_allclose(logprobs, case["logprobs"][:count], atol=2e-3)
