"""Every backend computes the same operations: the reference against the formulas, the others against both.

The oracles below are written from the operations' docstrings in float64, one number at a time where that is clearest,
and share no code with a backend. Slots that no sequence owns hold NaN, table entries that are not in use hold -1, and
arrays lie inside larger ones whose rim must stay as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged.backends import open_backend
from cupaged.backends.base import AttentionBatch, Backend
from cupaged.errors import InvariantError
from tests.support.kernels import skip_without_compiler
from tests.support.steps import load_batch, rows_of_no_sequence, stored_slots

BACKENDS = ("reference", "cpu", "cpu team", "emu")
RIM = 7.25
TOLERANCE = 1e-5


@contextmanager
def opened(name: str) -> Iterator[Backend]:
    """A backend by name; "cpu team" hands even the smallest work to its three threads."""
    if name == "emu":
        skip_without_compiler()
    with pytest.MonkeyPatch.context() as patch:
        if name == "cpu team":
            patch.setattr("cupaged.backends.cpu.TEAM_WORK", 0)
        yield _open(name.split()[0], threads=3 if name == "cpu team" else 1)


_open = functools.cache(open_backend)


@pytest.fixture(scope="module", autouse=True)
def _no_backend_outlives_the_module() -> Iterator[None]:
    yield
    _open.cache_clear()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with opened(request.param) as backend:
        yield backend


@dataclass
class Stored:
    """A TensorSource over an array, which counts the largest piece that was asked for."""

    array: np.ndarray
    name: str = "t"
    storage: str = "F32"
    largest: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        piece = self.array[start:stop].copy()
        self.largest = max(self.largest, piece.nbytes)
        return piece


class Output:
    """An array to write in full, with a rim of rows around it that must not change."""

    def __init__(self, *shape: int) -> None:
        self.whole = np.full((shape[0] + 4, *shape[1:]), RIM, np.float32)
        self.array = self.whole[2:-2]
        self.array[:] = np.nan

    def check(self, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
        assert (self.whole[:2] == RIM).all()
        assert (self.whole[-2:] == RIM).all()
        close(self.array, expected, tolerance)


def close(actual: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    largest = float(np.abs(expected).max(initial=1e-30))
    assert np.abs(actual - expected).max(initial=0) <= tolerance * largest


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def float64(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


# ---- matrices and rows

ROWS = (1, 2, 3, 4, 17, 64, 127, 128, 129, 300)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("inputs", "outputs"), [(5, (7,)), (3, (16, 1)), (64, (33, 1, 16)), (576, (576, 192, 192))])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_multiplies_by_the_stacked_tensors_and_adds_the_stacked_bias(
    backend: Backend, rows: int, inputs: int, outputs: tuple[int, ...], biased: bool
) -> None:
    weights = [random(n, n, inputs) for n in outputs]
    biases = [10 * random(n, n) for n in outputs]
    matrix = backend.load_matrix([Stored(w) for w in weights], [Stored(b) for b in biases] if biased else None)
    x, out = random(1, rows, inputs), Output(rows, sum(outputs))
    backend.linear(x, matrix, out.array)
    out.check(float64(x) @ float64(np.concatenate(weights)).T + (float64(np.concatenate(biases)) if biased else 0))


def test_loading_reads_a_large_tensor_in_pieces() -> None:
    backend = open_backend("cpu")
    source = Stored(random(0, 5000, 1024))
    matrix = backend.load_matrix([source, source])
    assert source.largest <= 5 << 20
    x, out = random(1, 3, 1024), Output(3, 10000)
    backend.linear(x, matrix, out.array)
    out.check(np.tile(float64(x) @ float64(source.array).T, 2))


def test_a_vector_is_loaded_as_it_is_stored(backend: Backend) -> None:
    vector = random(0, 77)
    assert np.array_equal(backend.download(backend.load_vector(Stored(vector))), vector)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_gathers_rows_and_a_tied_one_is_also_the_head(backend: Backend, rows: int, tied: bool) -> None:
    table = random(3, 301, 24)
    embedding = backend.load_embedding(Stored(table), tied=tied)
    ids = np.random.default_rng(rows).integers(0, 301, rows, dtype=np.int32)
    ids[0], ids[-1] = 300, 0
    out = Output(rows, 24)
    backend.embedding(embedding, load_batch(backend, rows_of_no_sequence(rows), ids, vocab_size=301), out.array)
    out.check(float64(table)[ids], 0)
    if tied:
        logits = Output(rows, 301)
        backend.linear(out.array, embedding, logits.array)
        logits.check(float64(table)[ids] @ float64(table).T)


@pytest.mark.parametrize("bad", [-1, 301, 2**31 - 1, -(2**31)])
def test_a_token_id_outside_the_table_is_an_error(backend: Backend, bad: int) -> None:
    with pytest.raises(InvariantError, match="token id"):
        load_batch(backend, rows_of_no_sequence(3), np.array([0, bad, 1], np.int32), vocab_size=301)


@pytest.mark.parametrize("rows", ROWS)
def test_gather_rows_takes_any_rows_in_any_order(backend: Backend, rows: int) -> None:
    x = random(0, 50, 13)
    which = np.random.default_rng(rows).integers(0, 50, rows, dtype=np.int32)
    out = Output(rows, 13)
    backend.gather_rows(x, which, out.array)
    out.check(float64(x)[which], 0)


@pytest.mark.parametrize("bad", [-1, 50])
def test_gathering_a_row_outside_is_an_error(backend: Backend, bad: int) -> None:
    with pytest.raises(InvariantError, match="row"):
        backend.gather_rows(random(0, 50, 3), np.array([1, bad], np.int32), np.empty((2, 3), np.float32))


def normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return float64(x) / np.sqrt((float64(x) ** 2).mean(-1, keepdims=True) + eps) * float64(weight)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1, 17, 576])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_rms_norm(backend: Backend, rows: int, width: int, scale: float) -> None:
    x, weight, out = scale * random(0, rows, width), random(1, width), Output(rows, width)
    x = x.astype(np.float32)
    before = x.copy()
    backend.rms_norm(x, weight, 1e-5, out.array)
    out.check(normed(x, weight, 1e-5))
    assert np.array_equal(x, before)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("inputs", "outputs"), [(5, 7), (3, 17), (64, 50), (576, 200)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_add_adds_to_what_is_there(backend: Backend, rows: int, inputs: int, outputs: int, biased: bool) -> None:
    weight, bias, x = random(0, outputs, inputs), 10 * random(1, outputs), random(2, rows, inputs)
    out = Output(rows, outputs)
    out.array[:] = random(3, rows, outputs)
    expected = float64(out.array) + float64(x) @ float64(weight).T + (float64(bias) if biased else 0)
    backend.linear_add(x, backend.load_matrix([Stored(weight)], [Stored(bias)] if biased else None), out.array)
    out.check(expected)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 32), (16, 1, 128), (2, 1, 6)])
def test_head_rms_norm_normalises_queries_and_keys_by_head(
    backend: Backend, rows: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    qkv = Output(rows, (heads + 2 * kv_heads) * head_dim)
    qkv.array[:] = random(0, *qkv.array.shape)
    expected = float64(qkv.array).reshape(rows, -1, head_dim)
    q_weight, k_weight = random(1, head_dim), random(2, head_dim)
    expected[:, :heads] = normed(expected[:, :heads], q_weight, 1e-6)
    expected[:, heads : heads + kv_heads] = normed(expected[:, heads : heads + kv_heads], k_weight, 1e-6)
    backend.head_rms_norm(qkv.array, q_weight, k_weight, heads, kv_heads, 1e-6)
    qkv.check(expected.reshape(rows, -1))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("inputs", "width"), [(1, 1), (7, 17), (40, 96), (576, 100)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_silu_mul(backend: Backend, rows: int, inputs: int, width: int, biased: bool) -> None:
    gate, up, x = random(0, width, inputs), random(1, width, inputs), random(2, rows, inputs)
    biases = [random(3, width), random(4, width)]
    matrix = backend.load_gate_up(Stored(gate), Stored(up), [Stored(b) for b in biases] if biased else None)
    out = Output(rows, width)
    backend.linear_silu_mul(x, matrix, np.full((rows, 2 * width), np.nan, np.float32), out.array)
    g, u = (float64(x) @ float64(w).T + (float64(b) if biased else 0) for w, b in zip((gate, up), biases, strict=True))
    out.check(g / (1 + np.exp(-g)) * u)


def test_silu_is_right_number_by_number_and_neither_overflows_nor_loses_a_sign(backend: Backend) -> None:
    gate = np.concatenate([np.linspace(-60, 60, 4001), [-1e4, -200.0, 200.0, 1e4, 0.0]]).astype(np.float32)
    matrix, out = backend.load_gate_up(Stored(gate[:, None]), Stored(np.ones_like(gate)[:, None])), Output(1, len(gate))
    with np.errstate(over="raise"):
        backend.linear_silu_mul(np.ones((1, 1), np.float32), matrix, np.empty((1, 2 * len(gate)), np.float32), out.array)
    x = float64(gate)
    expected = x / (1 + np.exp(-np.clip(x, -700, None)))
    assert np.allclose(out.array[0], expected, rtol=2e-6, atol=1e-30)


# ---- the paged cache


@dataclass
class Paged:
    """Sequences in shuffled blocks of a pool: each a context whose last `chunk` tokens are this step's rows."""

    contexts: list[int]
    chunks: list[int]
    block_size: int
    kv_heads: int
    group: int
    head_dim: int
    seed: int = 0
    padded: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        order = sorted(range(len(self.chunks)), key=lambda i: self.chunks[i] > 1)
        self.contexts, self.chunks = [self.contexts[i] for i in order], [self.chunks[i] for i in order]
        lanes = sum(c == 1 for c in self.chunks)  # padded lanes come after the live decode rows
        self.contexts[lanes:lanes] = [0] * self.padded
        self.chunks[lanes:lanes] = [1] * self.padded
        need = [-(-c // self.block_size) for c in self.contexts]
        self.num_blocks = sum(need) + 3
        free = list(rng.permutation(self.num_blocks))
        self.tables = np.full((len(need), max(need) + 2), -1, np.int32)
        for table, n in zip(self.tables, need, strict=True):
            table[:n] = [free.pop() for _ in range(n)]
        self.rows = sum(self.chunks)
        self.heads = self.kv_heads * self.group
        self.shape = (self.num_blocks, self.kv_heads, self.block_size, self.head_dim)
        self.qkv = rng.standard_normal((self.rows, (self.heads + 2 * self.kv_heads) * self.head_dim), dtype=np.float32)
        # what every token of every sequence has stored, [context, K, D]; the pool holds NaN elsewhere
        self.keys = [rng.standard_normal((c, self.kv_heads, self.head_dim), dtype=np.float32) for c in self.contexts]
        self.values = [rng.standard_normal((c, self.kv_heads, self.head_dim), dtype=np.float32) for c in self.contexts]

    @property
    def batch(self) -> AttentionBatch:
        positions, slots = [], []
        for s, (context, chunk) in enumerate(zip(self.contexts, self.chunks, strict=True)):
            for p in range(context - chunk, context) if context else [0]:
                positions.append(p)
                slots.append(self.slot(s, p) if context else -1)
        return AttentionBatch(
            positions=np.array(positions, np.int32),
            slots=np.array(slots, np.int64),
            block_tables=self.tables,
            query_start=np.concatenate([[0], np.cumsum(self.chunks)]).astype(np.int32),
            context_lens=np.array(self.contexts, np.int32),
            num_decode=sum(c == 1 for c in self.chunks),
            max_context=max(self.contexts),
        )

    def slot(self, s: int, position: int) -> int:
        return int(self.tables[s, position // self.block_size]) * self.block_size + position % self.block_size

    def load(self, backend: Backend, window: int = 0, **changes: Any) -> Any:
        """The backend's batch of the step."""
        return load_batch(backend, _with(self.batch, **changes), num_blocks=self.num_blocks, block_size=self.block_size, num_kv_heads=self.kv_heads, head_dim=self.head_dim, window=window)

    def empty_pool(self, backend: Backend) -> tuple[Any, Any]:
        """One layer's caches of a backend, every byte of them a NaN's."""
        caches = [cache[0] for cache in backend.new_kv_cache(1, self.num_blocks, self.kv_heads, self.block_size, self.head_dim)]
        for cache in caches:
            cache.view(np.uint8)[...] = 0xFF
        return caches[0], caches[1]

    def fill(self, backend: Backend) -> tuple[Any, Any]:
        """The backend's caches with every token of every context in its slot."""
        caches = self.empty_pool(backend)
        for s, context in enumerate(self.contexts):
            if context:
                step = AttentionBatch(
                    positions=np.arange(context, dtype=np.int32), slots=np.array([self.slot(s, p) for p in range(context)], np.int64),
                    block_tables=self.tables[s : s + 1], query_start=np.array([0, context], np.int32),
                    context_lens=np.array([context], np.int32), num_decode=0, max_context=context,
                )  # fmt: skip
                batch = load_batch(backend, step, num_blocks=self.num_blocks, block_size=self.block_size)
                qkv = np.concatenate([self.keys[s], self.keys[s], self.values[s]], 1).reshape(context, -1)
                still = np.ones((context, self.head_dim // 2), np.float32), np.zeros((context, self.head_dim // 2), np.float32)
                backend.rope_and_cache(qkv, *still, batch, self.kv_heads, *caches)
        return caches

    def pool(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values [B, K, P, D] with every token of every context in its slot."""
        key, value = np.full(self.shape, np.nan, np.float32), np.full(self.shape, np.nan, np.float32)
        for s, context in enumerate(self.contexts):
            for p in range(context):
                block, offset = divmod(self.slot(s, p), self.block_size)
                key[block, :, offset], value[block, :, offset] = self.keys[s][p], self.values[s][p]
        return key, value

    def attention(self, scale: float, window: int) -> np.ndarray:
        """The definition, for one row and one head after the other, from the tokens and not from the pool."""
        out = np.zeros((self.rows, self.heads, self.head_dim))
        query = float64(self.qkv).reshape(self.rows, -1, self.head_dim)
        row = 0
        for context, chunk, key, value in zip(self.contexts, self.chunks, self.keys, self.values, strict=True):
            for p in range(context - chunk, context) if context else [-1]:
                seen = [t for t in range(p + 1) if not window or t > p - window]
                for h in range(self.heads if seen else 0):
                    kv = h // (self.heads // self.kv_heads)
                    scores = float64(key[seen, kv]) @ query[row, h] * scale
                    weights = np.exp(scores - scores.max())
                    out[row, h] = weights @ float64(value[seen, kv]) / weights.sum()
                row += 1
        return out.reshape(self.rows, -1)

    def check_attention(self, backend: Backend, window: int = 0, scale: float = 0.3, tolerance: float = TOLERANCE) -> None:
        caches = self.fill(backend)
        before, out = (*(cache.copy() for cache in caches), self.qkv.copy()), Output(self.rows, self.heads * self.head_dim)
        backend.attention(self.qkv, *caches, self.load(backend), self.heads, scale, window, out.array)
        out.check(self.attention(scale, window), tolerance)
        for now, then in zip((*caches, self.qkv), before, strict=True):
            assert np.array_equal(now.view(np.uint8), then.view(np.uint8))


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 256])
@pytest.mark.parametrize("chunk", [1, 2, 40])
def test_attention_at_the_edges_of_blocks(backend: Backend, block_size: int, chunk: int) -> None:
    edges = [k * block_size + d for k in (1, 2, 5) for d in (-1, 0, 1)] if block_size < 256 else [255, 256, 257]
    contexts = [c for c in edges if c >= chunk] or [chunk]
    Paged(contexts, [chunk] * len(contexts), block_size, kv_heads=2, group=3, head_dim=16).check_attention(backend)


@pytest.mark.parametrize("group", range(1, 17))
@pytest.mark.parametrize(("head_dim", "kv_heads"), [(64, 3), (128, 1), (32, 2), (2, 5), (80, 1), (6, 1)])
def test_attention_maps_query_heads_to_key_heads(backend: Backend, group: int, head_dim: int, kv_heads: int) -> None:
    Paged([19, 34, 50], [1, 1, 22], 16, kv_heads, group, head_dim).check_attention(backend)


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 128, 140, 299, 300, 301, 1000])
@pytest.mark.parametrize("block_size", [8, 16])
def test_a_window_ends_where_it_should(backend: Backend, window: int, block_size: int) -> None:
    Paged([300, 33, 5, 300, 40], [1, 1, 1, 170, 40], block_size, 1, 2, 16).check_attention(backend, window)


@pytest.mark.parametrize("context", [127, 128, 129, 255, 256, 257, 300])
@pytest.mark.parametrize("chunk", [2, 63, 64, 65, 127])
def test_chunks_of_a_long_prompt(backend: Backend, context: int, chunk: int) -> None:
    Paged([context], [chunk], 16, 1, 3, 8).check_attention(backend)


@pytest.mark.parametrize("window", [0, 1, 600])
@pytest.mark.parametrize("contexts", [[511, 513], [1030, 700]])
def test_chunks_of_prompts_longer_than_a_tile(backend: Backend, contexts: list[int], window: int) -> None:
    Paged(contexts, [100, 70], 16, 2, 3, 8).check_attention(backend, window)


def test_large_scores_in_a_later_tile_do_not_overflow(backend: Backend) -> None:
    paged = Paged([1200], [80], 16, 1, 2, 16)
    paged.keys[0] *= np.geomspace(1e-3, 30, 1200, dtype=np.float32)[:, None, None]
    with np.errstate(all="raise", under="ignore"):
        paged.check_attention(backend, scale=3.0, tolerance=1e-4)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_decode_of_few_and_many_sequences_with_padded_lanes(backend: Backend, count: int) -> None:
    contexts = [1, 17, 60, 33, 2, 300, 16, 48, 15][:count]
    Paged(contexts, [1] * count, 16, 3, 3, 64, padded=count - 1).check_attention(backend)


def test_attention_over_large_scores_does_not_overflow(backend: Backend) -> None:
    with np.errstate(all="raise", under="ignore"):
        Paged([40, 200, 60], [1, 60, 60], 16, 2, 2, 16).check_attention(backend, scale=30.0, tolerance=1e-4)


def test_scores_that_are_all_far_below_zero(backend: Backend) -> None:
    paged = Paged([40, 60], [1, 60], 16, 2, 2, 16)
    paged.qkv[:] = 1
    for key in paged.keys:
        np.copyto(key, -20 * np.abs(key))
    paged.check_attention(backend, scale=1.0, tolerance=1e-3)


def test_a_nan_in_a_query_shows_in_its_row_and_in_no_other(backend: Backend) -> None:
    paged = Paged([70, 90], [1, 20], 16, 1, 2, 32)
    paged.qkv[3, :32] = np.nan
    out = np.empty((21, 64), np.float32)
    backend.attention(paged.qkv, *paged.fill(backend), paged.load(backend), 2, 0.3, 0, out)
    assert np.isnan(out[3, :32]).all()
    out[3, :32] = 0
    assert np.isfinite(out).all()


def test_rows_of_no_sequence_are_zeros(backend: Backend) -> None:
    paged = Paged([5, 9], [1, 4], 4, 1, 2, 8)
    batch, extra = paged.batch, 3
    qkv = np.concatenate([paged.qkv, random(0, extra, paged.qkv.shape[1])])
    padded = AttentionBatch(
        np.concatenate([batch.positions, np.zeros(extra, np.int32)]), np.concatenate([batch.slots, np.full(extra, -1)]),
        batch.block_tables, batch.query_start, batch.context_lens, batch.num_decode, batch.max_context,
    )  # fmt: skip
    out = Output(len(qkv), 16)
    loaded = load_batch(backend, padded, num_blocks=paged.num_blocks, block_size=4)
    backend.attention(qkv, *paged.fill(backend), loaded, 2, 0.3, 0, out.array)
    out.check(np.concatenate([paged.attention(0.3, 0), np.zeros((extra, 16))]))


@st.composite
def paged_steps(draw: st.DrawFn) -> tuple[Paged, int]:
    count = draw(st.integers(1, 6))
    contexts = [draw(st.integers(1, 180)) for _ in range(count)]
    chunks = [draw(st.one_of(st.just(1), st.integers(1, c))) for c in contexts]
    paged = Paged(
        contexts, chunks,
        block_size=draw(st.sampled_from([1, 2, 3, 5, 8, 16, 31, 64, 256])),
        kv_heads=draw(st.integers(1, 4)), group=draw(st.integers(1, 16)), head_dim=2 * draw(st.integers(1, 40)),
        seed=draw(st.integers(0, 2**20)), padded=draw(st.integers(0, 2)),
    )  # fmt: skip
    return paged, draw(st.one_of(st.just(0), st.integers(1, 200)))


@pytest.mark.parametrize("name", BACKENDS)
def test_attention_on_any_mixed_step(name: str) -> None:
    with opened(name) as backend:

        @settings(max_examples=40, deadline=None, derandomize=True)
        @given(paged_steps())
        def check(step: tuple[Paged, int]) -> None:
            paged, window = step
            paged.check_attention(backend, window)

        check()


def _with(batch: AttentionBatch, **changes: Any) -> AttentionBatch:
    fields = {name: getattr(batch, name) for name in AttentionBatch.__dataclass_fields__}
    return AttentionBatch(**(fields | changes))


@pytest.mark.parametrize("bad", [-1, -7, 10**6])
@pytest.mark.parametrize("sequence", [0, 1])
def test_a_block_outside_the_pool_is_an_error(backend: Backend, bad: int, sequence: int) -> None:
    paged = Paged([30, 30], [1, 7], 8, 1, 1, 4)
    tables = paged.tables.copy()
    tables[sequence, 2] = bad
    with pytest.raises(InvariantError, match="block"):
        paged.load(backend, block_tables=tables)


def test_blocks_behind_the_window_may_be_missing_but_none_within(backend: Backend) -> None:
    paged = Paged([40, 30], [1, 9], 8, 1, 1, 4)
    caches, tables = paged.fill(backend), paged.tables.copy()
    tables[0, :3] = tables[1, :1] = -1  # the rows see 29 .. 39 and 11 .. 29
    out = Output(10, 4)
    backend.attention(paged.qkv, *caches, paged.load(backend, window=11, block_tables=tables), 1, 0.3, 11, out.array)
    out.check(paged.attention(0.3, 11))
    tables[1, 1] = -1
    with pytest.raises(InvariantError, match="block"):
        paged.load(backend, window=11, block_tables=tables)


# ---- writing the cache


@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (2, 2, 32), (4, 1, 128), (1, 1, 2)])
def test_rope_and_cache_rotates_in_place_and_writes_the_rows_slots_only(
    backend: Backend, block_size: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    paged = Paged([40, 5, 70, 300], [1, 1, 70, 120], block_size, kv_heads, heads // kv_heads, head_dim, padded=2)
    batch = paged.batch
    angles = np.arange(301)[:, None] / 1e4 ** (np.arange(head_dim // 2) / head_dim * 2)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    caches = paged.fill(backend)
    expected_key, expected_value = paged.pool()
    expected = float64(paged.qkv).reshape(paged.rows, -1, head_dim)
    half = head_dim // 2
    for row, position in enumerate(batch.positions):
        for head in expected[row, : heads + kv_heads]:
            for i in range(half):
                a, b, c, s = head[i], head[i + half], cos[position, i], sin[position, i]
                head[i], head[i + half] = a * c - b * s, a * s + b * c
        if batch.slots[row] >= 0:
            block, offset = divmod(int(batch.slots[row]), block_size)
            expected_key[block, :, offset] = expected[row, heads : heads + kv_heads]
            expected_value[block, :, offset] = expected[row, heads + kv_heads :]
    qkv = Output(*paged.qkv.shape)
    qkv.array[:] = paged.qkv
    backend.rope_and_cache(qkv.array, cos, sin, paged.load(backend), heads, *caches)
    qkv.check(expected.reshape(paged.rows, -1))
    for cache, wanted in zip(stored_slots(backend, caches, block_size, head_dim), (expected_key, expected_value), strict=True):
        assert np.array_equal(np.isnan(cache), np.isnan(wanted))
        close(np.nan_to_num(cache), np.nan_to_num(wanted))


@pytest.mark.parametrize(("field", "bad"), [("slots", 10**9), ("slots", 12), ("positions", 50), ("positions", -1)])
def test_a_slot_or_position_outside_is_an_error(backend: Backend, field: str, bad: int) -> None:
    arrays = {"positions": np.array([0, 1], np.int32), "slots": np.array([0, 1], np.int64)}
    arrays[field][1] = bad
    tables, starts, contexts = np.zeros((2, 1), np.int32), np.arange(3, dtype=np.int32), np.ones(2, np.int32)
    batch = AttentionBatch(arrays["positions"], arrays["slots"], tables, starts, contexts, 2, 1)
    with pytest.raises(InvariantError, match=field[:-1]):
        load_batch(backend, batch, num_blocks=3, block_size=4, positions=50)


def test_a_batch_keeps_its_step_when_the_next_one_is_refused(backend: Backend) -> None:
    paged = Paged([30], [1], 8, 1, 1, 4)
    batch = paged.load(backend)
    with pytest.raises(InvariantError):
        backend.set_batch(batch, np.zeros(1, np.int32), _with(paged.batch, slots=np.array([10**6])))
    out = Output(1, 4)
    backend.attention(paged.qkv, *paged.fill(backend), batch, 1, 0.3, 0, out.array)
    out.check(paged.attention(0.3, 0))


@pytest.mark.parametrize("shape", [(1, 4, 1, 1, 2), (3, 9, 3, 16, 64), (2, 9, 1, 3, 6)])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_copy_blocks_copies_whole_blocks_in_all_layers(backend: Backend, shape: tuple[int, ...], count: int) -> None:
    caches = random_caches(backend, shape)
    order = np.random.default_rng(2).permutation(shape[1])
    pairs = np.array([[order[0], order[i + 1]] for i in range(count)], np.int32).reshape(count, 2)
    wanted = [cache.copy() for cache in caches]
    for source, destination in pairs:
        for cache, expected in zip(caches, wanted, strict=True):
            expected[:, destination] = cache[:, source]
    backend.copy_blocks(*caches, pairs)
    for cache, expected in zip(caches, wanted, strict=True):
        assert np.array_equal(cache.view(np.uint8), expected.view(np.uint8))


def random_caches(backend: Backend, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """A pool of [layers, blocks, heads, block size, head_dim] with random bytes, NaNs among them."""
    caches = backend.new_kv_cache(*shape)
    for cache in caches:
        cache.view(np.uint8)[...] = np.random.default_rng(0).integers(0, 256, cache.view(np.uint8).shape, np.uint8)
    return caches


@pytest.mark.parametrize("pair", [(0, 4), (-1, 2), (5, 0)])
def test_copying_a_block_outside_the_pool_is_an_error(backend: Backend, pair: tuple[int, int]) -> None:
    with pytest.raises(InvariantError, match="block"):
        backend.copy_blocks(*random_caches(backend, (1, 4, 1, 2, 2)), np.array([pair], np.int32))


def test_swapping_moves_whole_blocks_out_and_back(backend: Backend) -> None:
    pool = random_caches(backend, (3, 7, 2, 4, 6))
    before = [cache.copy() for cache in pool]
    host = backend.new_swap_space(3, 5, 2, 4, 6)
    backend.swap_blocks(pool, host, np.array([[6, 0], [1, 4]], np.int32))
    for array in pool:
        array.view(np.uint8)[:, [1, 6]] = 0xFF
    backend.swap_blocks(host, pool, np.array([[4, 3], [0, 2]], np.int32))
    for array, original in zip(pool, before, strict=True):
        now, then = array.view(np.uint8), original.view(np.uint8)
        assert np.array_equal(now[:, 3], then[:, 1])
        assert np.array_equal(now[:, 2], then[:, 6])
        assert np.array_equal(now[:, [0, 4, 5]], then[:, [0, 4, 5]])


@pytest.mark.parametrize("pair", [(7, 0), (0, 5), (-1, 0), (0, -1)])
def test_swapping_a_block_that_is_not_there_is_an_error(backend: Backend, pair: tuple[int, int]) -> None:
    pool = random_caches(backend, (1, 7, 1, 2, 2))
    with pytest.raises(InvariantError, match="block"):
        backend.swap_blocks(pool, backend.new_swap_space(1, 5, 1, 2, 2), np.array([pair], np.int32))


def test_a_new_cache_has_a_layer_and_a_block_where_the_contract_says(backend: Backend) -> None:
    for cache in backend.new_kv_cache(2, 5, 3, 16, 8):
        assert len(cache) == 2
        assert len(cache[0]) == 5
        assert cache.flags.c_contiguous


# ---- programs


def test_a_program_runs_its_operations_for_any_number_of_rows(backend: Backend) -> None:
    weight, other = random(0, 40, 24), random(1, 24, 40)
    first, second = backend.load_matrix([Stored(weight)]), backend.load_matrix([Stored(other)])
    x, hidden = backend.empty((50, 24), np.float32), backend.empty((50, 40), np.float32)

    def build(rows: int) -> None:
        backend.linear(x[:rows], first, hidden[:rows])
        backend.linear_add(hidden[:rows], second, x[:rows])

    run = backend.record(build, 50)
    for rows in (50, 1, 17, 50, 8):
        x[:] = random(rows, 50, 24)
        expected = float64(x)
        expected[:rows] += float64(x[:rows]) @ float64(weight).T @ float64(other).T
        run(rows)
        close(x, expected)
