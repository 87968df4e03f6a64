"""Which kernels compute the attention of a step.

    head_dim without tiled kernels, or a group of more than 16   paged_attention_v1, all rows
    else decode rows     16-bit keys in blocks of whole tiles: paged_decode, merge_items
                         all others: attention_partition, merge_partitions (paged attention v2)
         other rows      16-bit: paged_prefill
                         float32, and head_dims below 64: plain_prefill
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupaged.backends import kernel_specs as specs
from cupaged.backends.base import Array, BatchLimits
from cupaged.backends.device import Device
from cupaged.backends.kernel_batch import DeviceBatch
from cupaged.backends.launch import KernelSpec, ceil_div
from cupaged.backends.split_plan import TILE, SplitPlan, largest_plan

TILED_HEAD_DIMS = specs.HEAD_DIMS
"""The head_dims for which decode and prefill have tiled kernels."""

LARGEST_GROUP = 16
"""Query heads that share a key/value head in the tiled kernels."""

PART_SIZE, MOST_PARTS = 512, 32
"""Positions of the context in one partition of paged attention v2, unless that would make more than so many."""


class KernelAttention:
    """`attention` of backends.base.Backend over a device."""

    def __init__(self, device: Device, kv_dtype: np.dtype[Any]) -> None:
        self._device, self._kv_dtype = device, kv_dtype

    def num_shares(self, limits: BatchLimits) -> int | None:
        """The grid of paged_decode, for the plan of a step; None where its decode rows are another kernel's."""
        if not (_on_tensor_cores(self._kv_dtype, limits.head_dim) and limits.block_size % TILE == 0):
            return None
        return self._device.multiprocessors * _decode_shape(self._device.capability, limits.head_dim)[1]

    def __call__(
        self, qkv: Array, key_cache: Array, value_cache: Array, batch: DeviceBatch, num_heads: int, scale: float, window: int, out: Array
    ) -> None:
        _, num_kv_heads, _, head_dim = key_cache.shape
        plan, rows = batch.rows.plan, batch.rows.attention
        same = {"key_cache": key_cache, "value_cache": value_cache, "num_heads": num_heads, "scale": scale, "window": window}
        every = {
            "qkv": qkv, "out": out, "positions": rows.positions, "block_tables": rows.block_tables,
            "query_start": rows.query_start, "context_lens": rows.context_lens,
        }  # fmt: skip
        if head_dim not in TILED_HEAD_DIMS or num_heads > LARGEST_GROUP * num_kv_heads:
            self._run(specs.PAGED_ATTENTION_V1, **same, **every)
            return
        tensor_cores = _on_tensor_cores(key_cache.dtype, head_dim) and qkv.dtype == key_cache.dtype
        n = rows.num_decode
        if n:
            of_rows = {"qkv": qkv[:n], "block_tables": rows.block_tables[:n], "positions": rows.positions[:n]} | same
            if tensor_cores and plan is not None:
                self._decode(of_rows, batch, plan, out[:n])
            else:
                self._decode_in_partitions(of_rows, batch, rows.context_lens[:n], min(rows.max_context, window or rows.max_context), out[:n])
        if len(qkv) > n:
            self._run(specs.PAGED_PREFILL if tensor_cores else specs.PLAIN_PREFILL, num_decode=n, **same, **every)

    def _decode(self, rows: dict[str, Any], batch: DeviceBatch, plan: SplitPlan, out: Array) -> None:
        """Decode rows on tensor cores: the plan's shares, then the parts of every row together."""
        (_, num_kv_heads, _, head_dim), num_heads = rows["key_cache"].shape, rows["num_heads"]
        stages, _ = _decode_shape(self._device.capability, head_dim)
        group = num_heads // num_kv_heads
        most = largest_plan(batch.limits.sequences, num_kv_heads, len(plan.item_start) - 1)
        partial = self._partial(batch, (len(plan.items), group), most * group, head_dim)
        self._run(specs.PAGED_DECODE, items=plan.items, item_start=plan.item_start, paged=1, stages=stages, **rows, **partial)
        self._run(
            specs.MERGE_ITEMS, part_start=plan.part_start, out=out, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, **partial
        )

    def _decode_in_partitions(self, rows: dict[str, Any], batch: DeviceBatch, context_lens: Array, longest: int, out: Array) -> None:
        """Paged attention v2: every partition of the context, then all of them together."""
        head_dim, num_heads, limits = rows["key_cache"].shape[3], rows["num_heads"], batch.limits
        part_size = max(PART_SIZE, ceil_div(limits.table_width * limits.block_size, MOST_PARTS))
        num_parts, most_parts = (max(1, ceil_div(context, part_size)) for context in (longest, limits.table_width * limits.block_size))
        partial = self._partial(batch, (len(out), num_heads, num_parts), limits.sequences * num_heads * most_parts, head_dim)
        self._run(specs.ATTENTION_PARTITION, context_lens=context_lens, part_size=part_size, paged=1, **rows, **partial)
        self._run(specs.MERGE_PARTITIONS, out=out, num_heads=num_heads, head_dim=head_dim, **partial)

    def _partial(self, batch: DeviceBatch, shape: tuple[int, ...], most: int, head_dim: int) -> dict[str, Array]:
        """Float32 memory for partial results, at first use as much as the largest step of the batch wants: graphs keep its
        address."""
        shapes = {"partial_out": (*shape, head_dim), "partial_max": shape, "partial_sum": shape}
        for name, wanted in shapes.items():
            if name not in batch.scratch:
                batch.scratch[name] = self._device.empty((most * (head_dim if len(wanted) > len(shape) else 1),), np.float32)
        return {name: batch.scratch[name][: math.prod(wanted)].reshape(wanted) for name, wanted in shapes.items()}

    def _run(self, spec: KernelSpec, **arguments: Any) -> None:
        self._device.launch(spec.bind(**arguments))


def _on_tensor_cores(dtype: np.dtype[Any], head_dim: int) -> bool:
    spec = specs.PAGED_PREFILL
    return dtype.name in spec.types["KV_T"] and head_dim in spec.macros["head_dim"]


def _decode_shape(capability: tuple[int, int], head_dim: int) -> tuple[int, int]:
    """(stages of a warp's ring, blocks that share a multiprocessor) of paged_decode.

    A stage of the four warps takes 256 bytes a head_dim number: 32 KiB at 128. The multiprocessors have 228 KiB (9.0), 164
    KiB (8.0) or 100 KiB (8.6, 8.9) of shared memory.
    """
    if capability >= (9, 0):
        return 3, 2
    if capability == (8, 0):
        return 2, 2
    return (3, 1) if head_dim > 64 else (3, 2)
