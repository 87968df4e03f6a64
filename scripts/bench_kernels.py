"""Time every operation of the CPU backend at a model's shapes, one by one.

    python scripts/bench_kernels.py [--threads N] [--rows 1,4,16,64,512] [--dtype float32]

Default shapes: SmolLM2-135M. Times are milliseconds, the fastest of several runs; a matrix is one of several copies in
turn, so that it comes from memory as in a real step. "a step" is all layers' share of an operation.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import cycle

import numpy as np

from cupaged.backends import open_backend
from cupaged.backends.base import AttentionBatch, Backend, BatchLimits

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 30, 576, 1536, 9, 3, 64, 49152
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
MATRICES = {"qkv": (QKV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER), "head": (VOCABULARY, HIDDEN)}
BLOCK = 16


def milliseconds(call: Callable[[], object], seconds: float = 0.25) -> float:
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def line(name: str, ms: float, times: int, note: str = "") -> float:
    print(f"  {name:28}{ms:9.3f}{ms * times:12.2f} a step   {note}")
    return ms * times


def attention_batch(context: int, sequences: int, rows: int) -> AttentionBatch:
    """`sequences` of `context` tokens in shuffled blocks, each with its last `rows` tokens in the step."""
    blocks = -(-context // BLOCK)
    tables = np.random.default_rng(0).permutation(sequences * blocks).astype(np.int32).reshape(sequences, blocks)
    positions = np.tile(np.arange(context - rows, context, dtype=np.int32), sequences)
    slots = np.repeat(tables, rows, axis=0)[np.arange(len(positions)), positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    return AttentionBatch(
        positions, slots, tables, np.arange(0, (sequences + 1) * rows, rows, dtype=np.int32),
        np.full(sequences, context, np.int32), sequences if rows == 1 else 0, context,
    )  # fmt: skip


class Random:
    """A TensorSource of random numbers."""

    name, storage = "random", "F32"

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return floats(len(range(self.shape[0])[start:stop]), *self.shape[1:])


def bench_rows(backend: Backend, rows: int) -> None:
    print(f"{rows} rows")
    total = 0.0
    for name, (outputs, inputs) in MATRICES.items():
        copies = 1 if name == "head" else 10
        matrices = cycle([backend.load_matrix([Random(outputs, inputs)]) for _ in range(copies)])
        last = min(rows, 64) if name == "head" else rows
        x, out = floats(last, inputs), floats(last, outputs)
        ms = milliseconds(lambda x=x, out=out, m=matrices: backend.linear(x, next(m), out))
        total += line(f"linear {name}", ms, 1 if name == "head" else LAYERS, f"{2e-6 * last * inputs * outputs / ms:.0f} GFLOP/s")
    print(f"  {'all matrices':28}{total:21.2f} a step")
    x, out, weight = floats(rows, HIDDEN), floats(rows, HIDDEN), floats(HIDDEN)
    qkv, gate_up, inner = floats(rows, QKV), floats(rows, 2 * INNER), floats(rows, INNER)
    table, head_weight = floats(2048, HEAD_DIM // 2), floats(HEAD_DIM)
    sequences, per = (rows, 1) if rows <= 64 else (1, rows)
    context = 300 if per == 1 else per
    step = attention_batch(context, sequences, per)
    num_blocks = step.block_tables.size
    limits = BatchLimits(rows, sequences, step.block_tables.shape[1], 1, 2048, num_blocks, BLOCK, KV_HEADS)
    batch = backend.new_batch(limits)
    backend.set_batch(batch, np.zeros(rows, np.int32), step)
    key, value = (cache[0] for cache in backend.new_kv_cache(1, num_blocks, KV_HEADS, BLOCK, HEAD_DIM))
    for cache in (key, value):
        cache.fill(0)
    fused = backend.load_gate_up(Random(INNER, HIDDEN), Random(INNER, HIDDEN))
    line("linear_silu_mul", milliseconds(lambda: backend.linear_silu_mul(x, fused, gate_up, inner)), LAYERS, "(one matrix, from the cache)")
    line("rms_norm", milliseconds(lambda: backend.rms_norm(x, weight, 1e-5, out)), 2 * LAYERS)
    line("head_rms_norm", milliseconds(lambda: backend.head_rms_norm(qkv, head_weight, head_weight, HEADS, KV_HEADS, 1e-5)), LAYERS)
    line("rope_and_cache", milliseconds(lambda: backend.rope_and_cache(qkv, table, table, batch, HEADS, key, value)), LAYERS)
    qkv = floats(rows, QKV)
    ms = milliseconds(lambda: backend.attention(qkv, key, value, batch, HEADS, 0.125, 0, out))
    line("attention", ms, LAYERS, f"{sequences} x {per} rows over {context}: {(key.nbytes + value.nbytes) / ms / 1e6:.1f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rows", default="1,4,16,64,512")
    parser.add_argument("--dtype", default="float32", help="how weights are kept: float32, float16, bfloat16, int8")
    options = parser.parse_args()
    backend = open_backend("cpu", options.threads, announce=print, dtype=options.dtype)
    for rows in map(int, options.rows.split(",")):
        bench_rows(backend, rows)


if __name__ == "__main__":
    main()
