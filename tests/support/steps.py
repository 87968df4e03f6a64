"""Steps for a backend's operations: batches with just the room they need, and caches filled through the backend."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupaged.backends.base import AttentionBatch, Backend, BatchLimits


def load_batch(
    backend: Backend, rows: AttentionBatch, token_ids: np.ndarray | None = None, *, num_blocks: int = 1, block_size: int = 16, num_kv_heads: int = 1, head_dim: int = 64,
    window: int = 0, vocab_size: int = 1, positions: int | None = None,
) -> Any:
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


def stored_slots(backend: Backend, caches: tuple[Any, Any], block_size: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """What one layer's caches hold: float32 keys and values, each [B, K, P, D]."""
    if backend.name != "cpu":
        return caches
    from cupaged.backends import cpu_cache

    return tuple(cpu_cache.read_slots(cache, backend._kv_kind, block_size, head_dim, which) for cache, which in zip(caches, ("key", "value"), strict=True))
