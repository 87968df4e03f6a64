"""The CPU's kernels and the CUDA kernels choose what the definition chooses, on any batch."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged.backends import sampling
from cupaged.backends.cpu_kernels import sampling as kernels
from cupaged.backends.emu_device import EmuDevice
from cupaged.backends.kernel_sampling import KernelSampler
from tests.support import cpu_choice
from tests.support.kernels import skip_without_compiler
from tests.support.sampling import batch_of

# Vocabularies around the kernels' chunks, and a real one.
VOCABULARIES = (1, 2, 17, 1000, 1023, 1024, 1025, 2049, 49152)


Counts = TypeVar("Counts", sampling.TokenCounts, KernelSampler)


@st.composite
def rows(draw: st.DrawFn, vocab_size: int) -> dict[str, Any]:
    tokens = st.integers(0, vocab_size - 1)
    banned = draw(st.lists(tokens, max_size=4)) if vocab_size > 4 else []
    return {
        "temperature": draw(st.sampled_from([0.0, 0.0, 1e-5, 0.3, 0.7, 1.0, 1.0, 2.5, 1e30])),
        "top_k": draw(st.sampled_from([0, 0, 1, 2, 5, 50, 1000, vocab_size - 1, vocab_size, vocab_size + 1])),
        "top_p": draw(st.one_of(st.just(1.0), st.floats(2.0**-20, 1.0, width=32))),
        "min_p": draw(st.one_of(st.just(0.0), st.floats(0.0, 1.0, width=32), st.sampled_from([1e-30, 1e-4]))),
        "repetition": draw(st.sampled_from([1.0, 1.0, 0.7, 1.1, 2.0])),
        "presence": draw(st.sampled_from([0.0, 0.0, -2.0, 0.3, 1.5])),
        "frequency": draw(st.sampled_from([0.0, 0.0, -0.5, 0.1, 2.0])),
        "seeds": draw(st.integers(0, 2**64 - 1)),
        "positions": draw(st.integers(0, 2**31 - 1)),
        "indices": draw(st.integers(0, 1000)),
        "bias": [*draw(st.lists(st.tuples(tokens, st.floats(-100, 100, width=32)), max_size=4)), *((token, -np.inf) for token in banned)],
    }


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], list[dict[str, Any]], int]:
    vocab_size = draw(st.sampled_from(VOCABULARIES))
    batch = draw(st.lists(rows(vocab_size), min_size=1, max_size=4 if vocab_size > 5000 else 20))
    seed = draw(st.integers(0, 2**31))
    rng = np.random.RandomState(seed)
    logits = rng.standard_normal((len(batch), vocab_size)) * draw(st.sampled_from([0.0, 0.01, 1.0, 4.0, 100.0]))
    if draw(st.booleans()):
        logits = np.round(logits)  # many equal logits
    if draw(st.booleans()):
        logits[rng.random_sample(logits.shape) < 0.3] = -np.inf
        logits[:, -1] = 0.0
    return logits.astype(np.float32), batch, seed


def histories(counts: Counts, num_rows: int, vocab_size: int, seed: int) -> Counts:
    rng = np.random.RandomState(seed)
    for row_id in range(num_rows):
        counts.set_history(row_id, *(rng.randint(vocab_size, size=rng.randint(40)).astype(np.int32) for _ in range(2)))
    return counts


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems())
def test_the_same_tokens_and_counts(problem: tuple[np.ndarray[Any, Any], list[dict[str, Any]], int]) -> None:
    logits, batch, seed = problem
    num_rows, vocab_size = logits.shape
    if vocab_size <= 4:
        logits = np.nan_to_num(logits, neginf=-50.0)
    expected_counts, counts = (histories(sampling.TokenCounts(), num_rows, vocab_size, seed) for _ in range(2))
    for _ in range(2):
        expected = sampling.sample(logits.copy(), batch_of(batch), expected_counts)
        tokens = cpu_choice.sample(logits.copy(), batch_of(batch), counts)
        assert tokens.tolist() == expected.tolist()
        assert tokens.dtype == expected.dtype
    assert (counts.outputs == expected_counts.outputs).all()
    assert (counts.in_prompt == expected_counts.in_prompt).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems(), st.sampled_from([0, 1, 5, 20, 100]))
def test_the_same_logprobs(problem: tuple[np.ndarray[Any, Any], list[dict[str, Any]], int], k: int) -> None:
    logits, _, seed = problem
    chosen = np.random.RandomState(seed).randint(logits.shape[1], size=len(logits)).astype(np.int32)
    expected = sampling.token_logprobs(logits, chosen, k)
    got = cpu_choice.token_logprobs(logits, chosen, k)
    for exact in (1, 2):
        assert got[exact].tolist() == expected[exact].tolist()
    for close in (0, 3):
        np.testing.assert_allclose(got[close], expected[close], rtol=1e-6, atol=1e-12)
    assert [a.dtype for a in got] == [a.dtype for a in expected]


@pytest.fixture
def _compiler() -> None:
    skip_without_compiler()


@pytest.mark.usefixtures("_compiler")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems())
def test_the_cuda_kernels_choose_the_same_tokens_and_count_them(problem: tuple[np.ndarray[Any, Any], list[dict[str, Any]], int]) -> None:
    logits, batch, seed = problem
    num_rows, vocab_size = logits.shape
    if vocab_size <= 4:
        logits = np.nan_to_num(logits, neginf=-50.0)
    counts, sampler = histories(sampling.TokenCounts(), num_rows, vocab_size, seed), KernelSampler(EmuDevice())
    histories(sampler, num_rows, vocab_size, seed)
    for _ in range(2):  # the second round sees what the first one counted
        expected = sampling.sample(logits.copy(), batch_of(batch), counts)
        tokens = sampler.sample(logits.copy(), batch_of(batch))
        assert tokens.tolist() == expected.tolist()
        assert tokens.dtype == expected.dtype


@pytest.mark.usefixtures("_compiler")
@settings(max_examples=30, deadline=None, derandomize=True)
@given(problems(), st.sampled_from([0, 1, 5, 20, 100]))
def test_the_cuda_kernels_give_the_same_logprobs(problem: tuple[np.ndarray[Any, Any], list[dict[str, Any]], int], k: int) -> None:
    logits, _, seed = problem
    chosen = np.random.RandomState(seed).randint(logits.shape[1], size=len(logits)).astype(np.int32)
    expected = sampling.token_logprobs(logits, chosen, k)
    sampler = KernelSampler(EmuDevice())
    got = sampler.token_logprobs(logits, chosen, k)
    for exact in (1, 2):
        assert got[exact].tolist() == expected[exact].tolist()
    for close in (0, 3):
        np.testing.assert_allclose(got[close], expected[close], rtol=1e-6, atol=1e-12)
    candidates = sampler.beam_candidates(logits, k)
    assert np.array_equal(candidates[0], got[2])
    assert np.array_equal(candidates[1], got[3])


def test_the_kernels_exponential_is_exact_to_its_word() -> None:
    xs = [*np.linspace(-64.0, 0.0, 5001).tolist(), -1e-300, -0.0]
    np.testing.assert_allclose([kernels._exp(x) for x in xs], np.exp(xs), rtol=1e-13)
    assert kernels._exp(0.0) == 1.0
    assert [kernels._exp(x) for x in (-64.001, -1e300, -np.inf)] == [0.0] * 3
