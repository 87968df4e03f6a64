"""Paged attention and the cache of the CPU backend: right in every shape and width, and the same bits in any company.

Sequences lie in shuffled blocks of a pool; slots that nobody wrote hold NaN, unused entries of a block table -1.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged.backends import cpu_cache, cpu_paged_attention
from cupaged.backends.base import AttentionBatch, BatchLimits
from cupaged.backends.cpu_batch import CpuBatch
from cupaged.backends.cpu_code import address
from cupaged.backends.cpu_kv_numbers import KINDS, KvKind, kind_of
from cupaged.backends.cpu_program import operation
from cupaged.backends.cpu_threads import Crew
from cupaged.backends.reference import ReferenceBackend
from cupaged.errors import ConfigError, InvariantError

FLOAT32, BFLOAT16, FLOAT16, INT8 = KINDS
KINDS_BY_NAME = [pytest.param(kind, id=kind.name) for kind in KINDS]
RIM = 7.25


@functools.cache
def crew(threads: int) -> Crew:
    crew = Crew(threads)
    crew.reserve(cpu_paged_attention.scratch_bytes(16, 128))
    return crew


@pytest.fixture(scope="module", autouse=True)
def _no_thread_outlives_the_module() -> Any:
    yield
    crew.cache_clear()


@dataclass
class Pool:
    """Sequences of random queries, keys and values, `contexts` tokens each, and their blocks."""

    contexts: list[int]
    block_size: int = 16
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 16
    kind: KvKind = FLOAT32
    seed: int = 0
    rows: list[np.ndarray] = field(init=False)
    """What every token gives, [context, (H + 2K) * D]."""

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        need = [-(-context // self.block_size) for context in self.contexts]
        self.num_blocks = sum(need) + 3
        free = rng.permutation(self.num_blocks).tolist()
        self.tables = np.full((len(need), max(need) + 2), -1, np.int32)
        for table, n in zip(self.tables, need, strict=True):
            table[:n] = [free.pop() for _ in range(n)]
        self.heads = self.kv_heads * self.group
        self.width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.rows = [rng.standard_normal((context, self.width), dtype=np.float32) for context in self.contexts]
        angles = np.arange(max(self.contexts))[:, None] / 1e4 ** (np.arange(self.head_dim // 2) / self.head_dim * 2)
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.limits = BatchLimits(
            rows=sum(self.contexts) + 8, sequences=len(need) + 4, table_width=self.tables.shape[1], vocab_size=1,
            positions=max(self.contexts), num_blocks=self.num_blocks, block_size=self.block_size,
        )  # fmt: skip

    def slot(self, s: int, position: int) -> int:
        return int(self.tables[s, position // self.block_size]) * self.block_size + position % self.block_size

    def caches(self) -> tuple[np.ndarray, np.ndarray]:
        """One layer's, every byte a NaN's."""
        key, value = cpu_cache.new(self.kind, 1, self.num_blocks, self.kv_heads, self.block_size, self.head_dim)
        key[...], value[...] = 0xFF, 0xFF
        return key[0], value[0]

    def step(self, runs: list[tuple[int, int, int]], padded: int = 0) -> tuple[np.ndarray, AttentionBatch]:
        """Rows first .. stop - 1 of sequence s for every (s, first, stop), those of one row first, then `padded` idle lanes."""
        runs = sorted(runs, key=lambda run: run[2] - run[1] > 1)
        lanes = sum(stop - first == 1 for _, first, stop in runs)
        runs[lanes:lanes] = [(-1, 0, 1)] * padded
        tables = np.stack([self.tables[s] if s >= 0 else np.full(self.tables.shape[1], -1, np.int32) for s, _, _ in runs])
        qkv = np.concatenate([self.rows[s][first:stop] if s >= 0 else np.ones((1, self.width), np.float32) for s, first, stop in runs])
        contexts = np.array([stop if s >= 0 else 0 for s, _, stop in runs], np.int32)
        return qkv, AttentionBatch(
            positions=np.concatenate([np.arange(first, stop) for _, first, stop in runs]).astype(np.int32),
            slots=np.array([self.slot(s, p) if s >= 0 else -1 for s, first, stop in runs for p in range(first, stop)], np.int64),
            block_tables=tables,
            query_start=np.cumsum([0, *(stop - first for _, first, stop in runs)]).astype(np.int32),
            context_lens=contexts,
            num_decode=lanes + padded,
            max_context=int(contexts.max()),
        )

    def run(
        self, runs: list[tuple[int, int, int]], caches: Any, *, window: int = 0, scale: float = 0.3, threads: int = 1, padded: int = 0, write: bool = True
    ) -> dict[tuple[int, int], np.ndarray]:
        """Write the rows' keys and values, then attend: {(sequence, position): output}."""
        qkv, rows = self.step(runs, padded)
        batch = CpuBatch(replace(self.limits, window=window), threads)
        batch.set(np.zeros(len(qkv), np.int32), rows)
        out = np.full((len(qkv) + 2, self.heads * self.head_dim), RIM, np.float32)
        own = slice(1, -1)
        count = np.array([len(qkv)], np.int64)
        table = []
        if write:
            table.append(operation(address("rope_and_cache", self.kind.index), count, addresses(cpu_cache.rope_and_cache_words(qkv, self.cos, self.sin, batch, self.heads, *caches))))
        table.append(operation(address("attention"), count, addresses(cpu_paged_attention.words(self.kind, qkv, *caches, batch, self.heads, scale, window, out[own]))))
        crew(threads).run(np.stack(table))
        assert (out[[0, -1]] == RIM).all()
        owners = [s for s, context in enumerate(rows.context_lens) for _ in range(rows.query_start[s + 1] - rows.query_start[s])]
        idle = rows.context_lens[owners] == 0
        assert (out[own][idle] == 0).all()
        names = sorted(runs, key=lambda run: run[2] - run[1] > 1)
        keys = [(s, p) for s, first, stop in names for p in range(first, stop)]
        return dict(zip(keys, out[own][~idle], strict=True))

    def expected(self, window: int = 0, scale: float = 0.3) -> dict[tuple[int, int], np.ndarray]:
        """The reference's, every sequence as one prompt."""
        backend, found = ReferenceBackend(), {}
        pool = backend.new_kv_cache(1, self.num_blocks, self.kv_heads, self.block_size, self.head_dim)
        for s, context in enumerate(self.contexts):
            qkv, rows = self.step([(s, 0, context)])
            batch = backend.new_batch(self.limits)
            backend.set_batch(batch, np.zeros(context, np.int32), rows)
            backend.rope_and_cache(qkv, self.cos, self.sin, batch, self.heads, pool[0][0], pool[1][0])
            out = backend.empty((context, self.heads * self.head_dim), np.float32)
            backend.attention(qkv, pool[0][0], pool[1][0], batch, self.heads, scale, window, out)
            found |= {(s, p): out[p] for p in range(context)}
        return found

    def check(self, chunks: list[int], window: int = 0, threads: int = 2, padded: int = 0, tolerance: float = 5e-6, **options: Any) -> None:
        """Everything but each sequence's last `chunk` tokens, then these together, against the reference."""
        caches, expected = self.caches(), self.expected(window, **options)
        before = [(s, 0, context - chunk) for s, (context, chunk) in enumerate(zip(self.contexts, chunks, strict=True)) if context > chunk]
        last = [(s, context - chunk, context) for s, (context, chunk) in enumerate(zip(self.contexts, chunks, strict=True))]
        found: dict[tuple[int, int], np.ndarray] = {}
        for runs in (before, last):
            if runs:
                found |= self.run(runs, caches, window=window, threads=threads, padded=padded, **options)
        assert found.keys() == expected.keys()
        largest = max(float(np.abs(row).max()) for row in expected.values())
        for name, row in found.items():
            assert np.isfinite(row).all(), name
            assert np.abs(row - expected[name]).max() <= tolerance * largest, name


def addresses(words: tuple[Any, ...]) -> list[int]:
    return [word.ctypes.data if isinstance(word, np.ndarray) else int(word) for word in words]


def same(found: dict[tuple[int, int], np.ndarray], expected: dict[tuple[int, int], np.ndarray]) -> None:
    for name, row in found.items():
        assert np.array_equal(row.view(np.uint32), expected[name].view(np.uint32)), name


# ---- against the reference


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 256])
@pytest.mark.parametrize("chunk", [1, 2, 40])
def test_contexts_that_end_at_the_edges_of_blocks_and_tiles(block_size: int, chunk: int) -> None:
    edges = {k * unit + d for unit in (block_size, 64) for k in (1, 2, 4) for d in (-1, 0, 1)}
    contexts = sorted(c for c in edges if chunk <= c < 300)
    Pool(contexts, block_size).check([chunk] * len(contexts))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 13, 16])
@pytest.mark.parametrize("head_dim", [2, 8, 16, 32, 48, 64, 80, 128])
def test_groups_of_query_heads_and_head_widths(group: int, head_dim: int) -> None:
    Pool([19, 34, 150], group=group, head_dim=head_dim, kv_heads=1 + group % 3).check([1, 1, 70])


@pytest.mark.parametrize("window", [1, 2, 7, 16, 17, 63, 64, 65, 128, 140, 299, 300, 1000])
@pytest.mark.parametrize("block_size", [5, 16, 32])
def test_windows(window: int, block_size: int) -> None:
    Pool([300, 33, 5, 299, 40], block_size, 1, 2).check([1, 1, 1, 170, 40], window)


def test_idle_lanes_are_zeros() -> None:
    Pool([5, 70, 9]).check([1, 1, 4], padded=3)


def test_large_scores_do_not_overflow() -> None:
    Pool([40, 200, 60], kv_heads=2, group=2).check([1, 60, 60], scale=30.0, tolerance=1e-4)


@st.composite
def pools(draw: st.DrawFn) -> tuple[Pool, list[int], int]:
    contexts = draw(st.lists(st.integers(1, 200), min_size=1, max_size=6))
    chunks = [draw(st.one_of(st.just(1), st.integers(1, context))) for context in contexts]
    pool = Pool(
        contexts, draw(st.sampled_from([1, 2, 3, 5, 8, 16, 31, 32, 64, 256])), draw(st.integers(1, 4)), draw(st.integers(1, 16)),
        2 * draw(st.integers(1, 40)), seed=draw(st.integers(0, 2**20)),
    )  # fmt: skip
    return pool, chunks, draw(st.one_of(st.just(0), st.integers(1, 200)))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(pools())
def test_any_step(drawn: tuple[Pool, list[int], int]) -> None:
    pool, chunks, window = drawn
    pool.check(chunks, window, padded=len(chunks) % 3)


@pytest.mark.parametrize(("kind", "tolerance"), [(BFLOAT16, 8e-3), (FLOAT16, 1e-3), (INT8, 2e-2)])
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 64), (3, 10), (32, 80)])
def test_narrow_caches(kind: KvKind, tolerance: float, block_size: int, head_dim: int) -> None:
    Pool([33, 150, 70], block_size, head_dim=head_dim, kind=kind).check([1, 1, 70], tolerance=tolerance, scale=head_dim**-0.5)


@pytest.mark.parametrize("kind", KINDS_BY_NAME[1:])
def test_a_narrow_cache_gives_what_the_numbers_in_it_give(kind: KvKind) -> None:
    """The same as float32 blocks that hold the rounded numbers: widening is exact."""
    pool = Pool([100, 70], head_dim=32, kind=kind)
    caches, runs = pool.caches(), [(0, 0, 100), (1, 0, 70)]
    expected = pool.run(runs, caches, threads=2)
    plain = replace(pool, kind=FLOAT32)
    wide = plain.caches()
    key, value = (cpu_cache.read_slots(cache, kind, 16, 32, which) for cache, which in zip(caches, ("key", "value"), strict=True))
    wide[0].view(np.float32)[...] = key.swapaxes(2, 3).reshape(*wide[0].shape[:2], -1)
    wide[1].view(np.float32)[...] = value.reshape(*wide[1].shape[:2], -1)
    queries = [pool.step([run])[0] for run in runs]
    plain.rows = [rotated(pool, qkv) for qkv in queries]
    same(plain.run(runs, wide, write=False), expected)


def rotated(pool: Pool, qkv: np.ndarray) -> np.ndarray:
    """Rows after rope_and_cache."""
    qkv, count = qkv.copy(), np.array([len(qkv)], np.int64)
    _, rows = pool.step([(pool.contexts.index(len(qkv)), 0, len(qkv))])
    batch = CpuBatch(pool.limits, 1)
    batch.set(np.zeros(len(qkv), np.int32), rows)
    words = cpu_cache.rope_and_cache_words(qkv, pool.cos, pool.sin, batch, pool.heads, *pool.caches())
    crew(1).run(operation(address("rope_and_cache", pool.kind.index), count, addresses(words))[None])
    return qkv


# ---- the same bits


@pytest.mark.parametrize("window", [0, 1, 50, 90])
@pytest.mark.parametrize(("block_size", "head_dim", "group"), [(16, 64, 3), (32, 32, 1), (3, 10, 5), (16, 80, 16)])
@pytest.mark.parametrize("kind", KINDS_BY_NAME)
def test_chunks_threads_and_company_change_no_bit(kind: KvKind, block_size: int, head_dim: int, group: int, window: int) -> None:
    pool = Pool([200, 131, 64], block_size, 2, group, head_dim, kind)
    alone: dict[tuple[int, int], np.ndarray] = {}
    for s, context in enumerate(pool.contexts):
        alone |= pool.run([(s, 0, context)], pool.caches(), window=window)
    together = pool.caches()
    same(pool.run([(0, 0, 77), (1, 0, 131), (2, 0, 1)], together, window=window, threads=3), alone)
    same(pool.run([(0, 77, 78), (2, 1, 64)], together, window=window, threads=3, padded=2), alone)
    for p in range(78, 190):
        same(pool.run([(0, p, p + 1)], together, window=window, threads=1), alone)
    same(pool.run([(0, 190, 200)], together, window=window, threads=3), alone)


# ---- the cache


@pytest.mark.parametrize("kind", KINDS_BY_NAME)
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 64), (3, 10), (1, 2)])
def test_rows_are_rounded_to_the_nearest_number_and_nothing_else_is_written(kind: KvKind, block_size: int, head_dim: int) -> None:
    pool = Pool([40, 5], block_size, head_dim=head_dim, kind=kind)
    caches = pool.caches()
    pool.run([(0, 0, 37), (1, 0, 5)], caches, threads=3, padded=2)
    wide = replace(pool, kind=FLOAT32)
    exact = wide.caches()
    wide.run([(0, 0, 37), (1, 0, 5)], exact)
    for cache, full, which in zip(caches, exact, ("key", "value"), strict=True):
        found = cpu_cache.read_slots(cache, kind, block_size, head_dim, which)
        expected = cpu_cache.read_slots(full, FLOAT32, block_size, head_dim, which)
        assert np.array_equal(np.isnan(found), np.isnan(expected))
        assert np.isnan(expected).any()
        found, expected = np.nan_to_num(found), np.nan_to_num(expected)
        if kind is FLOAT16:
            assert np.array_equal(found, expected.astype(np.float16).astype(np.float32))
        bound = {"float32": 0, "bfloat16": 2**-8 * np.abs(expected), "float16": 2**-11 * np.abs(expected) + 2**-25}.get(
            kind.name, np.abs(expected).max(-1, keepdims=True) / 127 * 0.5001
        )
        assert (np.abs(found - expected) <= bound).all()


def test_float16_keeps_numbers_that_are_too_large_finite() -> None:
    pool = Pool([3], head_dim=4, kind=FLOAT16)
    pool.rows[0][:] = [[1e6], [-1e6], [6e-8]]
    caches = pool.caches()
    pool.run([(0, 0, 3)], caches)
    value = cpu_cache.read_slots(caches[1], FLOAT16, 16, 4, "value")[pool.tables[0, 0], 0, :3, 0]
    assert value.tolist() == [65504.0, -65504.0, float(np.float16(6e-8))]


def test_kinds_are_known_by_their_names() -> None:
    assert kind_of("auto") is kind_of("float32") is FLOAT32
    assert kind_of("int8") is INT8
    with pytest.raises(ConfigError, match="int4"):
        kind_of("int4")


# ---- the batch


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": [-1, 0, 1, 2]}, "position"),
        ({"positions": [30, 0, 1, 200]}, "position"),
        ({"positions": [30, 0, 2, 3]}, "sequence 1"),
        ({"positions": [29, 8, 9, 10]}, "sequence 1"),
        ({"slots": [10**9, 1, 2, 3]}, "slot"),
        ({"slots": [-2, 1, 2, 3]}, "slot"),
        ({"slots": [1, 1, 2, 3]}, "slot"),
        ({"query_start": [0, 1]}, "rows"),
        ({"query_start": [0, 1, 5]}, "rows"),
        ({"query_start": [0, 2, 4]}, "sequence 0"),
        ({"query_start": [0, 3, 2]}, "sequence"),
        ({"query_start": [0, 1, -(2**31)]}, "sequence"),
        ({"context_lens": [32, 10]}, "sequence 0"),
        ({"context_lens": [-1, 10]}, "sequence 0"),
        ({"token_ids": [0, 0, 0, 9]}, "token id"),
    ],
)
def test_a_step_that_points_outside_is_refused_and_the_one_before_kept(changes: dict[str, Any], message: str) -> None:
    limits = BatchLimits(rows=6, sequences=3, table_width=8, vocab_size=9, positions=40, num_blocks=20, block_size=4)
    step: dict[str, Any] = {"positions": [30, 7, 8, 9], "slots": [2, 29, 32, 33], "query_start": [0, 1, 4], "context_lens": [31, 10], "token_ids": [0] * 4}

    def arrays(numbers: dict[str, Any]) -> tuple[np.ndarray, AttentionBatch]:
        tables = np.full((2, 8), -1, np.int32)
        tables[0], tables[1, :3] = range(1, 9), [0, 7, 8]
        dtypes = {name: np.int64 if name == "slots" else np.int32 for name in numbers}
        given = {name: np.array(value, dtypes[name]) for name, value in numbers.items()}
        return given.pop("token_ids"), AttentionBatch(**given, block_tables=tables, num_decode=1, max_context=31)

    batch = CpuBatch(limits, 1)
    batch.set(*arrays(step))
    before = batch.words.copy(), batch.token_ids.copy()
    with pytest.raises(InvariantError, match=message):
        batch.set(*arrays(step | changes))
    assert np.array_equal(batch.words, before[0])
    assert np.array_equal(batch.token_ids, before[1])
    batch.set(*arrays(step))  # the check leaves nothing behind


@pytest.mark.parametrize("name", ["rows", "sequences", "table_width"])
def test_a_step_that_is_larger_than_its_batch_is_refused(name: str) -> None:
    pool = Pool([20, 9])
    qkv, rows = pool.step([(0, 19, 20), (1, 0, 9)])
    sizes = {"rows": 10, "sequences": 2, "table_width": rows.block_tables.shape[1]}
    CpuBatch(replace(pool.limits, **sizes), 1).set(np.zeros(len(qkv), np.int32), rows)
    with pytest.raises(InvariantError, match="fit"):
        CpuBatch(replace(pool.limits, **sizes | {name: sizes[name] - 1}), 1).set(np.zeros(len(qkv), np.int32), rows)
