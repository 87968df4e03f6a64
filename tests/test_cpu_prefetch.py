"""What products ask for ahead of the attention that follows: the right blocks, each once, and nothing but a hint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupaged.backends import cpu_batch, cpu_gemm, cpu_prefetch, cpu_program
from cupaged.backends.base import AttentionBatch, BatchLimits
from cupaged.backends.cpu import CpuBackend
from cupaged.backends.cpu_batch import CpuBatch
from cupaged.backends.cpu_kernels.prefetch import take_piece

LIMITS = BatchLimits(rows=64, sequences=4, table_width=8, vocab_size=9, positions=64, num_blocks=32, block_size=4)

VALUES = 1 << 40
"""Where values would lie."""


def step(runs: list[tuple[int, int]]) -> AttentionBatch:
    """Sequences whose rows first .. stop - 1 are computed, in blocks 31, 30, ..."""
    tables = np.full((len(runs), 8), -1, np.int32)
    free = iter(range(31, -1, -1))
    for table, (_, stop) in zip(tables, runs, strict=True):
        table[: -(-stop // 4)] = [next(free) for _ in range(-(-stop // 4))]
    positions = np.concatenate([np.arange(*run) for run in runs]).astype(np.int32)
    owner = np.repeat(np.arange(len(runs)), [stop - first for first, stop in runs])
    return AttentionBatch(
        positions=positions,
        slots=tables[owner, positions // 4].astype(np.int64) * 4 + positions % 4,
        block_tables=tables,
        query_start=np.cumsum([0, *(stop - first for first, stop in runs)]).astype(np.int32),
        context_lens=np.array([stop for _, stop in runs], np.int32),
        num_decode=sum(stop - first == 1 for first, stop in runs),
        max_context=max(stop for _, stop in runs),
    )


def listed(batch: CpuBatch) -> list[int]:
    return batch._blocks[: batch.words[cpu_batch.NUM_BLOCKS]].tolist()


@pytest.mark.parametrize(("window", "expected"), [(0, [29, 28, 27, 26, 25, 31, 30]), (6, [27, 26, 25, 31, 30])])
def test_a_batch_lists_the_blocks_that_its_tasks_read(window: int, expected: list[int]) -> None:
    batch = CpuBatch(replace(LIMITS, window=window), 2)
    batch.set(np.zeros(4, np.int32), step([(6, 7), (14, 17)]))
    assert listed(batch) == expected


@pytest.mark.parametrize(("parts", "block_bytes"), [(1, 100), (2, 100), (3, cpu_prefetch.PIECE), (2, 2 * cpu_prefetch.PIECE + 64)])
def test_members_take_every_piece_of_every_block_once(parts: int, block_bytes: int) -> None:
    batch = CpuBatch(LIMITS, parts)
    batch.set(np.zeros(4, np.int32), step([(6, 7), (14, 17)]))
    ahead = np.array([0, VALUES, batch.words.ctypes.data, block_bytes], np.int64)
    taken = []
    for part in range(parts):
        member = np.zeros(8, np.int64)
        member[cpu_program.PART], member[cpu_program.PARTS] = part, parts
        while (piece := take_piece(member.ctypes.data, ahead.ctypes.data, -1))[0] >= 0:
            keys, values, size = piece
            assert values == keys + VALUES
            taken += range(keys, keys + size)
    assert sorted(taken) == sorted(byte for block in listed(batch) for byte in range(block * block_bytes, (block + 1) * block_bytes))


def test_without_attention_there_is_nothing_to_fetch() -> None:
    ahead, member = np.zeros(4, np.int64), np.zeros(8, np.int64)
    assert take_piece(member.ctypes.data, ahead.ctypes.data, 7) == (7, 7, 0)


class Ones:
    name, storage, shape = "ones", "F32", (8, 8)

    def read(self, start: int = 0, stop: int | None = None) -> Any:
        return np.ones(self.shape, np.float32)[start:stop]


def test_products_are_told_of_the_attention_that_follows_them() -> None:
    backend = CpuBackend(1)
    batch = backend.new_batch(LIMITS)
    keys, values = backend.new_kv_cache(2, 32, 1, 4, 8)
    matrix = backend.load_matrix([Ones()])
    x, qkv, out = (np.zeros((4, width), np.float32) for width in (8, 24, 8))
    tables: list[np.ndarray] = []
    backend._crew.run = lambda table, **_: tables.append(table)  # type: ignore[method-assign]  # only looked at

    def build(rows: int) -> None:
        for layer in range(2):
            backend.linear(x, matrix, out=out)
            backend.attention(qkv, keys[layer], values[layer], batch, 1, 1.0, 0, out=x)
        backend.linear(x, matrix, out=out)

    batch.set(np.zeros(4, np.int32), step([(6, 7), (14, 17)]))
    backend.record(build, 4)(4)
    first, second, last = (row[cpu_gemm.AHEAD : cpu_gemm.AHEAD + 4].tolist() for row in tables[0][::2])
    assert first == [keys[0].ctypes.data, values[0].ctypes.data, batch.words.ctypes.data, keys[0].strides[0]]
    assert second == [keys[1].ctypes.data, values[1].ctypes.data, batch.words.ctypes.data, keys[1].strides[0]]
    assert last == [0, 0, 0, 0]
