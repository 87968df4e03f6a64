"""Paged: sequences in the shuffled blocks of a pool, and the attention of a step by its definition."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.backends.base import AttentionBatch, Backend
from cupaged.conformance.case import expect_equal
from cupaged.conformance.steps import changed, load_batch
from cupaged.conformance.subject import Numbers, Subject, float64, rounded


@dataclass
class Paged:
    """Each sequence is a context whose last `chunk` tokens are this step's rows. Sequences with one row come first, and
    after these `padded` lanes without a context.

    tables       int32 [S, max_blocks]
    qkv          float32 [T, (H + 2K) * D]
    keys, values what every token of every sequence has stored, float32 [context, K, D] each; the pool holds NaN elsewhere
    """

    contexts: list[int]
    chunks: list[int]
    block_size: int
    kv_heads: int
    group: int
    head_dim: int
    seed: int = 0
    padded: int = 0
    tables: npt.NDArray[np.int32] = field(init=False)
    qkv: Numbers = field(init=False)
    keys: list[Numbers] = field(init=False)
    values: list[Numbers] = field(init=False)

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
        self.keys = [rng.standard_normal((c, self.kv_heads, self.head_dim), dtype=np.float32) for c in self.contexts]
        self.values = [rng.standard_normal((c, self.kv_heads, self.head_dim), dtype=np.float32) for c in self.contexts]

    def stored_as(self, subject: Subject) -> Paged:
        """The same with numbers that the subject's types hold."""
        self.qkv = rounded(self.qkv, subject.dtype)
        self.keys, self.values = ([rounded(a, subject.kv_dtype) for a in arrays] for arrays in (self.keys, self.values))
        return self

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
        return load_batch(
            backend, changed(self.batch, **changes), num_blocks=self.num_blocks, block_size=self.block_size,
            num_kv_heads=self.kv_heads, head_dim=self.head_dim, window=window,
        )  # fmt: skip

    def fill(self, subject: Subject) -> tuple[Any, Any]:
        """One layer's caches of the backend: every token of every context in its slot, every other byte a NaN's."""
        backend = subject.backend
        key, value = (cache[0] for cache in backend.new_kv_cache(1, self.num_blocks, self.kv_heads, self.block_size, self.head_dim))
        for cache in (key, value):
            cache.view(np.uint8)[...] = 0xFF
        for s, context in enumerate(self.contexts):
            if context:
                step = AttentionBatch(
                    positions=np.arange(context, dtype=np.int32), slots=np.array([self.slot(s, p) for p in range(context)], np.int64),
                    block_tables=self.tables[s : s + 1], query_start=np.array([0, context], np.int32),
                    context_lens=np.array([context], np.int32), num_decode=0, max_context=context,
                )  # fmt: skip
                batch = load_batch(backend, step, num_blocks=self.num_blocks, block_size=self.block_size)
                qkv = np.concatenate([self.keys[s], self.keys[s], self.values[s]], 1).reshape(context, -1)
                cos, sin = (backend.upload(np.full((context, self.head_dim // 2), of_zero, np.float32)) for of_zero in (1, 0))
                backend.rope_and_cache(subject.upload(qkv), cos, sin, batch, self.kv_heads, key, value)
        return key, value

    def pool(self) -> tuple[Numbers, Numbers]:
        """Keys and values [B, K, P, D] with every token of every context in its slot."""
        key, value = np.full(self.shape, np.nan, np.float32), np.full(self.shape, np.nan, np.float32)
        for s, context in enumerate(self.contexts):
            for p in range(context):
                block, offset = divmod(self.slot(s, p), self.block_size)
                key[block, :, offset], value[block, :, offset] = self.keys[s][p], self.values[s][p]
        return key, value

    def attention(self, scale: float, window: int) -> npt.NDArray[np.float64]:
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

    def check_attention(self, subject: Subject, window: int = 0, scale: float = 0.3, tolerance: float | None = None) -> None:
        """The backend's attention is the definition's, and leaves the caches and its input alone."""
        self.stored_as(subject)
        caches, qkv, out = self.fill(subject), subject.upload(self.qkv), subject.output(self.rows, self.heads * self.head_dim)
        arrays = {"the key cache": caches[0], "the value cache": caches[1], "the input": qkv}
        before = {name: subject.download(array).copy() for name, array in arrays.items()}
        subject.backend.attention(qkv, *caches, self.load(subject.backend), self.heads, scale, window, out.array)
        out.check(self.attention(scale, window), tolerance)
        for name, array in arrays.items():
            expect_equal(subject.download(array), before[name], name)
