"""The real model against reference outputs computed with another implementation, on fixed block tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.model.runner import Runner
from tests.conftest import golden
from tests.support.greedy import greedy, open_runner
from tests.support.kernels import skip_without_compiler

BLOCK_SIZE, NUM_BLOCKS = 16, 100
SCATTERED = np.random.default_rng(5).permutation(NUM_BLOCKS).tolist()
MARGIN = 1e-3
"""From the first step whose two best logits are closer than this on, another float order may choose another token."""

CASES = golden("smollm2_greedy.json")["cases"]


def comparable(case: dict[str, Any]) -> int:
    return next((i for i, margin in enumerate(case["margin"]) if margin < MARGIN), len(case["greedy_ids"]))


@pytest.fixture(scope="module", params=["reference", "cpu", "cpu float32"])
def runner(request: pytest.FixtureRequest, smollm2_path: Path) -> Runner:
    device, *dtype = request.param.split()
    return open_runner(smollm2_path, device, NUM_BLOCKS, BLOCK_SIZE, dtype=dtype[0] if dtype else "auto")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_two_tokens_through_the_emulated_kernels(smollm2_path: Path, dtype: str) -> None:
    """In 16 bits: on the emulated tensor cores."""
    skip_without_compiler()
    case = min(CASES, key=lambda case: len(case["prompt_ids"]))
    tokens, _ = greedy(open_runner(smollm2_path, "emu", NUM_BLOCKS, BLOCK_SIZE, dtype=dtype), case["prompt_ids"], 2, SCATTERED, BLOCK_SIZE)
    assert tokens == case["greedy_ids"][:2]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_greedy_tokens_and_logprobs(runner: Runner, case: dict[str, Any]) -> None:
    count = comparable(case)
    assert count > 0
    tokens, logprobs = greedy(runner, case["prompt_ids"], count, SCATTERED, BLOCK_SIZE, chunk=100)
    assert tokens == case["greedy_ids"][:count]
    np.testing.assert_allclose(logprobs, case["logprobs"][:count], atol=2e-3)


def logits_of(runner: Runner, prompt: list[int], chunk: int | None = None) -> np.ndarray:
    """The logits [V] after a prompt, from the runner's own buffer."""
    kept: list[np.ndarray] = []
    sample = runner._backend.sample
    runner._backend.sample = lambda logits, *rest: (kept.append(logits[0].copy()), sample(logits, *rest))[1]
    try:
        greedy(runner, prompt, 1, SCATTERED, BLOCK_SIZE, chunk)
    finally:
        del runner._backend.sample
    return kept[-1]


PROMPT = max((case["prompt_ids"] for case in CASES), key=len)[:200]


@pytest.fixture(scope="module")
def exact(smollm2_path: Path) -> np.ndarray:
    return logits_of(open_runner(smollm2_path, "cpu", NUM_BLOCKS, BLOCK_SIZE, dtype="float32"), PROMPT)


def test_weights_left_in_their_blocks_give_the_logits_of_float32(smollm2_path: Path, exact: np.ndarray) -> None:
    blocks = logits_of(open_runner(smollm2_path, "cpu", NUM_BLOCKS, BLOCK_SIZE), PROMPT)
    assert np.abs(blocks - exact).max() <= 1e-5 * np.abs(exact).max()


@pytest.mark.parametrize(("dtype", "kv_dtype", "loss"), [("bfloat16", "auto", 0.03), ("float16", "auto", 0.003), ("auto", "bfloat16", 0.02), ("auto", "float16", 0.002), ("auto", "int8", 0.05)])
def test_narrower_numbers_cost_a_little_and_not_nothing(smollm2_path: Path, exact: np.ndarray, dtype: str, kv_dtype: str, loss: float) -> None:
    narrow = logits_of(open_runner(smollm2_path, "cpu", NUM_BLOCKS, BLOCK_SIZE, dtype=dtype, kv_dtype=kv_dtype), PROMPT)
    error = np.abs(narrow - exact).max() / np.abs(exact).max()
    assert 1e-6 < error < loss


def test_a_row_has_the_same_bits_in_any_chunks_and_for_any_number_of_threads(smollm2_path: Path) -> None:
    whole = logits_of(open_runner(smollm2_path, "cpu", NUM_BLOCKS, BLOCK_SIZE, threads=1), PROMPT)
    for threads, chunk in ((1, 7), (2, None), (3, 25)):
        assert np.array_equal(logits_of(open_runner(smollm2_path, "cpu", NUM_BLOCKS, BLOCK_SIZE, threads=threads), PROMPT, chunk), whole)
