"""Tokens that a step finds on the device, where the step before has put them: on every backend, and in replayed graphs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged.backends import emu, kernel_specs
from cupaged.backends.base import AttentionBatch, Backend, BatchLimits
from cupaged.backends.cpu import CpuBackend
from cupaged.backends.emu_device import EmuDevice
from cupaged.backends.kernels import KernelBackend
from cupaged.backends.reference import ReferenceBackend
from cupaged.conformance.steps import Stored
from cupaged.errors import InvariantError
from cupaged.step_plan import UNREAD
from tests.support.kernels import skip_without_compiler
from tests.support.sampling import batch_of

LIMITS = BatchLimits(rows=9, sequences=6, table_width=2, vocab_size=50, positions=20, num_blocks=12, block_size=4)
TABLE = np.random.default_rng(0).standard_normal((50, 16)).astype(np.float32)


@pytest.fixture(params=["reference", "cpu", "emu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "emu":
        skip_without_compiler()
        return KernelBackend(EmuDevice("check"))
    return ReferenceBackend() if request.param == "reference" else CpuBackend(2)


def embedded(backend: Backend, batch: Any, rows: int) -> np.ndarray:
    out = backend.empty((rows, 16), np.float32)
    backend.embedding(backend.load_embedding(Stored(TABLE), tied=False), batch, out)
    return backend.download(out)


def test_rows_take_known_and_chosen_tokens(backend: Backend) -> None:
    chosen = backend.upload(np.array([40, 41, 42, 43], np.int32))
    batch = backend.new_batch(LIMITS, chosen)
    tokens, sources = np.array([7, UNREAD, 9, UNREAD, UNREAD], np.int32), np.array([-1, 3, -1, 0, 3], np.int32)
    backend.set_batch(batch, tokens, prompt_rows(5), sources)
    assert np.array_equal(embedded(backend, batch, 5), TABLE[[7, 43, 9, 40, 43]])
    backend.set_batch(batch, np.array([1, 2], np.int32), prompt_rows(2))
    assert np.array_equal(embedded(backend, batch, 2), TABLE[[1, 2]])  # no source is left over


def test_sources_that_are_not_there_are_refused(backend: Backend) -> None:
    tokens, rows = np.array([UNREAD, 3], np.int32), prompt_rows(2)
    batch = backend.new_batch(LIMITS, backend.upload(np.array([40, 41], np.int32)))
    for sources, message in (([2, -1], "token source out of bounds"), ([-2, -1], "token source out of bounds"), ([0], "1 sources for 2 tokens"), ([-1, 0], "token id out of bounds")):
        with pytest.raises(InvariantError, match=message):
            backend.set_batch(batch, tokens, rows, np.array(sources, np.int32))
    with pytest.raises(InvariantError, match="token source out of bounds"):
        backend.set_batch(backend.new_batch(LIMITS), tokens, rows, np.array([0, -1], np.int32))


def test_sampled_tokens_go_where_the_next_step_looks(backend: Backend) -> None:
    chosen = backend.upload(np.full(6, 49, np.int32))
    logits, parameters = np.random.default_rng(3).standard_normal((4, 50)).astype(np.float32), batch_of([{"temperature": 0.0}] * 4)
    expected = ReferenceBackend().sample(logits.copy(), parameters)
    backend.sample(backend.upload(logits.copy()), parameters, chosen[:4])
    assert backend.download(chosen).tolist() == [*expected.tolist(), 49, 49]


def test_a_download_keeps_what_was_there_when_it_was_asked_for(backend: Backend) -> None:
    array = backend.upload(np.array([1, 2, 3], np.int32))
    late = backend.download_later(array)
    array[:] = 9
    assert late.wait().tolist() == [1, 2, 3]
    assert backend.asynchronous is False


@pytest.mark.parametrize("rows", [1, 128, 131])
@pytest.mark.parametrize("schedule", ["forward", "random"])
def test_the_kernel_fills_in_what_was_chosen_and_nothing_else(rows: int, schedule: Any) -> None:
    skip_without_compiler()
    generator = np.random.default_rng(rows)
    chosen = generator.integers(0, 1000, 7).astype(np.int32)
    chosen[2] = -1  # a choice that failed
    sources, tokens = generator.integers(-1, 7, rows).astype(np.int32), generator.integers(0, 1000, rows).astype(np.int32)
    there = emu.array(tokens)
    EmuDevice("check", schedule).launch(kernel_specs.FILL_TOKENS.bind(sources=emu.array(sources), chosen=emu.array(chosen), token_ids=there))
    assert np.array_equal(there, np.where(sources >= 0, np.maximum(chosen[sources], 0), tokens))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_replayed_graph_takes_the_tokens_of_its_own_step(dtype: Any) -> None:
    skip_without_compiler()
    backend = KernelBackend(EmuDevice("check"), dtype)
    table = backend.load_embedding(Stored(TABLE), tied=False)
    chosen, out = backend.upload(np.zeros(6, np.int32)), backend.empty((LIMITS.rows, 16), dtype)
    batch = backend.new_batch(LIMITS, chosen)
    run = backend.record(lambda rows: backend.embedding(table, batch, out[:rows]), LIMITS.rows)
    generator = np.random.default_rng(1)
    for step in range(8):
        rows = 3 + step % 2  # with a padded lane and without
        chosen[:] = generator.integers(0, 50, 6)
        sources = generator.integers(-1, 6, rows).astype(np.int32) if step % 3 else None
        tokens = generator.integers(0, 50, rows).astype(np.int32)
        expected = tokens if sources is None else np.where(sources >= 0, chosen[sources], tokens)
        backend.set_batch(batch, tokens if sources is None else np.where(sources >= 0, UNREAD, tokens), decode_rows(rows), sources)
        run(rows)
        assert np.array_equal(out[:rows], TABLE[expected].astype(dtype))


def prompt_rows(count: int) -> AttentionBatch:
    """A prompt of two tokens or more."""
    return AttentionBatch(
        np.arange(count, dtype=np.int32), np.arange(count), np.arange(2, dtype=np.int32)[None], np.array([0, count], np.int32), np.array([count], np.int32), 0, count
    )


def decode_rows(count: int) -> AttentionBatch:
    """One new token for each of so many sequences."""
    tables = np.arange(2 * count, dtype=np.int32).reshape(count, 2)
    return AttentionBatch(
        np.zeros(count, np.int32), tables[:, 0].astype(np.int64) * 4, tables, np.arange(count + 1, dtype=np.int32), np.ones(count, np.int32), count, 1
    )
