"""Prefill attention over the paged cache: TFLOP/s of whole prompts, and of chunks behind a long context."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from cupaged.backends.base import AttentionBatch, BatchLimits
from cupaged.backends.kernels import KernelBackend
from gpu.bench import BF16, Bench, Heads
from gpu.cases import Case, Figures

BLOCK = 16


def sizes(bench: Bench) -> list[tuple[Heads, int, int, int]]:
    """(heads, sequences, new tokens of each, context of each)"""
    if bench.tiny:
        return [(bench.heads[0], 1, 32, 32), (bench.heads[0], 2, 16, 48)]
    every = [(1, 1024, 1024), (8, 1024, 1024), (1, 4096, 4096), (1, 16384, 16384), (1, 512, 16384), (4, 2048, 8192)]
    return [(heads, *size) for heads in bench.heads[1:] for size in every]


def operations(heads: Heads, sequences: int, new: int, context: int) -> float:
    """Floating-point operations of the scores and the weighted sum, of visible positions only."""
    visible = new * (context - new) + new * (new + 1) / 2
    return 4.0 * heads.query * heads.head_dim * sequences * visible


def rows_of(sequences: int, new: int, context: int) -> AttentionBatch:
    """Every sequence in shuffled blocks, with its last `new` tokens in the step."""
    tables = np.random.default_rng(0).permutation(sequences * context // BLOCK).astype(np.int32).reshape(sequences, -1)
    positions = np.tile(np.arange(context - new, context, dtype=np.int32), sequences)
    owner = np.repeat(np.arange(sequences), new)
    slots = tables[owner, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    return AttentionBatch(
        positions, slots, tables, np.arange(0, (sequences + 1) * new, new, dtype=np.int32), np.full(sequences, context, np.int32), 0, context
    )


def seconds_of(bench: Bench, heads: Heads, sequences: int, new: int, context: int) -> float:
    """Measured once a run."""
    key = ("prefill", heads, sequences, new, context)
    if key not in bench.known:
        bench.known[key] = _measure(bench, heads, sequences, new, context)
    return bench.known[key]


def _measure(bench: Bench, heads: Heads, sequences: int, new: int, context: int) -> float:
    backend, rows = KernelBackend(bench.device, BF16, graphs=False), sequences * new
    pool = (sequences * context // BLOCK, heads.kv, BLOCK, heads.head_dim)
    ((key, value, qkv),) = bench.numbers(pool, pool, (rows, heads.width))
    batch = backend.new_batch(BatchLimits(rows, sequences, context // BLOCK, 1, context, pool[0], BLOCK, heads.kv, heads.head_dim))
    backend.set_batch(batch, np.zeros(rows, np.int32), rows_of(sequences, new, context))
    out = backend.empty((rows, heads.query * heads.head_dim), BF16)
    scale = heads.head_dim**-0.5
    return bench.clock.time(lambda: backend.attention(qkv, key, value, batch, heads.query, scale, 0, out)).median


def name(heads: Heads, sequences: int, new: int, context: int) -> str:
    return f"{heads}, {sequences} x {new} tokens of {context}"


def prefill(bench: Bench) -> Iterator[Case]:
    for size in sizes(bench):
        yield Case(name(*size), partial(_prefill, bench, *size))


def _prefill(bench: Bench, heads: Heads, sequences: int, new: int, context: int) -> Figures:
    seconds = seconds_of(bench, heads, sequences, new, context)
    return {"us": 1e6 * seconds, "TFLOP/s": 1e-12 * operations(heads, sequences, new, context) / seconds}
