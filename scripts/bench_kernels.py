"""Time every operation of the CPU backend at a model's shapes, one by one.

    python scripts/bench_kernels.py [--threads N] [--rows 1,4,16,64,512] [--storage Q4_1]

Default shapes: SmolLM2-135M. Times are milliseconds, the fastest of several runs; "a step" is all layers' share of an
operation. Matrices are timed as a step runs them: several copies, so that they come from memory, in one program.
--storage is how a checkpoint would hold them: F32, BF16, F16, Q4_1, Q8_0.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from cupaged.backends import open_backend
from cupaged.backends.base import AttentionBatch, Backend, BatchLimits

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 30, 576, 1536, 9, 3, 64, 49152
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
MATRICES = {"qkv": (QKV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER), "head": (VOCABULARY, HIDDEN)}
BLOCK = 16
COPIES = 20


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


BLOCK_BYTES = {"F16": 2, "BF16": 2, "Q4_1": 20, "Q8_0": 34}
"""Of the storages that are kept as they are."""


class Random:
    """A TensorSource of random numbers."""

    name = "random"

    def __init__(self, storage: str, *shape: int) -> None:
        self.storage, self.shape = storage, shape

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return floats(len(range(self.shape[0])[start:stop]), *self.shape[1:])

    def read_blocks(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Small bytes: as float16 numbers they are small, too."""
        row_bytes = self.shape[1] // (32 if self.storage.startswith("Q") else 1) * BLOCK_BYTES[self.storage]
        return np.random.default_rng(0).integers(0, 32, (len(range(self.shape[0])[start:stop]), row_bytes), np.uint8)


def product_ms(backend: Backend, storage: str, name: str, rows: int) -> float:
    """One product of a model's matrix, among COPIES of them in a program."""
    outputs, inputs = MATRICES[name]
    copies = 1 if name == "head" else COPIES
    x = backend.empty((rows, inputs), np.float32)
    x[:] = floats(rows, inputs)
    if name == "gate_up":
        half = outputs // 2
        matrices = [backend.load_gate_up(Random(storage, half, inputs), Random(storage, half, inputs)) for _ in range(copies)]
        work, out = backend.empty((rows, outputs), np.float32), backend.empty((rows, half), np.float32)
        run = backend.record(lambda n: [backend.linear_silu_mul(x[:n], m, work[:n], out[:n]) for m in matrices], rows)
    else:
        matrices, out = [backend.load_matrix([Random(storage, outputs, inputs)]) for _ in range(copies)], backend.empty((rows, outputs), np.float32)
        run = backend.record(lambda n: [backend.linear(x[:n], m, out[:n]) for m in matrices], rows)
    return milliseconds(lambda: run(rows)) / copies


def bench_rows(backend: Backend, rows: int, storage: str) -> None:
    print(f"{rows} rows")
    total = 0.0
    for name, (outputs, inputs) in MATRICES.items():
        last = min(rows, 64) if name == "head" else rows
        ms = product_ms(backend, storage, name, last)
        total += line(f"linear {name}", ms, 1 if name == "head" else LAYERS, f"{2e-6 * last * inputs * outputs / ms:.0f} GFLOP/s")
    print(f"  {'all matrices':28}{total:21.2f} a step")
    x, out, weight = floats(rows, HIDDEN), floats(rows, HIDDEN), floats(HIDDEN)
    qkv = floats(rows, QKV)
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
    parser.add_argument("--storage", default="Q4_1", choices=("F32", *BLOCK_BYTES), help="how the checkpoint holds its matrices")
    options = parser.parse_args()
    backend = open_backend("cpu", options.threads, announce=print)
    for rows in map(int, options.rows.split(",")):
        bench_rows(backend, rows, options.storage)


if __name__ == "__main__":
    main()
