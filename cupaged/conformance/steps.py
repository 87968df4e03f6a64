"""Inputs of a backend's operations: stored tensors, batches with just the room they need, what a cache holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupaged.backends import cpu_cache, cpu_kv_numbers
from cupaged.backends.base import AttentionBatch, Backend, BatchLimits, SamplingBatch

Numbers = npt.NDArray[Any]

NEUTRAL: dict[str, tuple[Any, Any]] = {
    "temperature": (np.float32, 1.0),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1.0),
    "min_p": (np.float32, 0.0),
    "repetition": (np.float32, 1.0),
    "presence": (np.float32, 0.0),
    "frequency": (np.float32, 0.0),
    "seeds": (np.uint64, 0),
    "positions": (np.int32, 0),
    "indices": (np.int32, 0),
}
"""Fields of a SamplingBatch: their types, and the values that leave the logits alone."""


@dataclass
class Stored:
    """A TensorSource over an array, which notes the bytes of the largest piece that was asked for."""

    array: Numbers
    name: str = "t"
    storage: str = "F32"
    largest: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read(self, start: int = 0, stop: int | None = None) -> Numbers:
        piece: Numbers = self.array[start:stop].copy()
        self.largest = max(self.largest, piece.nbytes)
        return piece

    def read_blocks(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint8]:
        return self.read(start, stop).view(np.uint8)


def load_batch(
    backend: Backend, rows: AttentionBatch, token_ids: npt.NDArray[np.int32] | None = None, *, num_blocks: int = 1, block_size: int = 16, num_kv_heads: int = 1, head_dim: int = 64,
    window: int = 0, vocab_size: int = 1, positions: int | None = None,
) -> Any:  # fmt: skip
    """A backend's Batch that holds these rows."""
    limits = BatchLimits(
        rows=len(rows.positions),
        sequences=len(rows.context_lens),
        table_width=rows.block_tables.shape[1],
        vocab_size=vocab_size,
        positions=int(rows.positions.max()) + 1 if positions is None else positions,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        window=window,
    )
    batch = backend.new_batch(limits)
    backend.set_batch(batch, np.zeros(len(rows.positions), np.int32) if token_ids is None else token_ids, rows)
    return batch


def changed(batch: AttentionBatch, **changes: Any) -> AttentionBatch:
    """The batch with other arrays for some of its fields."""
    fields = {name: getattr(batch, name) for name in AttentionBatch.__dataclass_fields__}
    return AttentionBatch(**(fields | changes))


def rows_of_no_sequence(count: int) -> AttentionBatch:
    """Rows that attend to nothing and are written nowhere, for operations that want only token ids."""
    return AttentionBatch(
        positions=np.zeros(count, np.int32),
        slots=np.full(count, -1, np.int64),
        block_tables=np.full((1, 1), -1, np.int32),
        query_start=np.array([0, 0], np.int32),
        context_lens=np.zeros(1, np.int32),
        num_decode=0,
        max_context=0,
    )


def stored_slots(backend: Backend, caches: tuple[Any, Any], block_size: int, head_dim: int, kv_dtype: str = "float32") -> tuple[Numbers, Numbers]:
    """What one layer's caches hold: float32 keys and values, each [B, K, P, D]."""
    if backend.name != "cpu":
        stored = [backend.download(cache) for cache in caches]
        if kv_dtype == "fp8":  # plain bytes where a device's arrays have no such type
            stored = [array.view(ml_dtypes.float8_e4m3fn) for array in stored]
        key, value = (array.astype(np.float32) for array in stored)
        return key, value
    kind = cpu_kv_numbers.kind_of(kv_dtype)
    key, value = (cpu_cache.read_slots(cache, kind, block_size, head_dim, which) for cache, which in zip(caches, ("key", "value"), strict=True))
    return key, value


def batch_of(rows: Sequence[Mapping[str, Any]]) -> SamplingBatch:
    """One row a mapping: names of SamplingBatch's fields, what is left out being neutral (temperature 1).

    `row_id` defaults to the row's place, `bias` is a list of (token id, value). A row with a penalty is penalised.
    """
    arrays = {name: np.array([row.get(name, value) for row in rows], dtype) for name, (dtype, value) in NEUTRAL.items()}
    biases = [row.get("bias", []) for row in rows]
    flat = [entry for bias in biases for entry in bias]
    penalised = (arrays["repetition"] != 1) | (arrays["presence"] != 0) | (arrays["frequency"] != 0)
    return SamplingBatch(
        **arrays,
        row_ids=np.array([row.get("row_id", r) for r, row in enumerate(rows)], np.int32),
        bias_start=np.cumsum([0, *map(len, biases)], dtype=np.int32),
        bias_ids=np.array([token for token, _ in flat], np.int32),
        bias_values=np.array([value for _, value in flat], np.float32),
        penalised=penalised,
    )
