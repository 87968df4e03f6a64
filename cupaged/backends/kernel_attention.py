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
from cupaged.backends.kernel_batch import DeviceRows
from cupaged.backends.launch import KernelSpec, ceil_div
from cupaged.backends.split_plan import TILE, SplitPlan

TILED_HEAD_DIMS = specs.HEAD_DIMS
"""The head_dims for which decode and prefill have tiled kernels."""

LARGEST_GROUP = 16
"""Query heads that share a key/value head in the tiled kernels."""

PART_SIZE = 512
"""Positions of the context in one partition of paged attention v2."""


class KernelAttention:
    """`attention` of backends.base.Backend over a device, and the memory for partial results."""

    def __init__(self, device: Device, kv_dtype: np.dtype[Any]) -> None:
        self._device, self._kv_dtype = device, kv_dtype
        self._scratch: dict[str, Array] = {}

    def num_shares(self, limits: BatchLimits) -> int | None:
        """The grid of paged_decode, for the plan of a step; None where its decode rows are another kernel's."""
        if not (_on_tensor_cores(self._kv_dtype, limits.head_dim) and limits.block_size % TILE == 0):
            return None
        return self._device.multiprocessors * _decode_shape(self._device.capability, limits.head_dim)[1]

    def __call__(
        self, qkv: Array, key_cache: Array, value_cache: Array, rows: DeviceRows, num_heads: int, scale: float, window: int, out: Array
    ) -> None:
        _, num_kv_heads, _, head_dim = key_cache.shape
        batch = rows.attention
        same = {"key_cache": key_cache, "value_cache": value_cache, "num_heads": num_heads, "scale": scale, "window": window}
        every = {
            "qkv": qkv, "out": out, "positions": batch.positions, "block_tables": batch.block_tables,
            "query_start": batch.query_start, "context_lens": batch.context_lens,
        }  # fmt: skip
        if head_dim not in TILED_HEAD_DIMS or num_heads > LARGEST_GROUP * num_kv_heads:
            self._run(specs.PAGED_ATTENTION_V1, **same, **every)
            return
        tensor_cores = _on_tensor_cores(key_cache.dtype, head_dim) and qkv.dtype == key_cache.dtype
        n = batch.num_decode
        if n:
            of_rows = {"qkv": qkv[:n], "block_tables": batch.block_tables[:n], "positions": batch.positions[:n]} | same
            if tensor_cores and rows.plan is not None:
                self._decode(of_rows, rows.plan, out[:n])
            else:
                longest = min(batch.max_context, window or batch.max_context)
                self._decode_in_partitions(of_rows, batch.context_lens[:n], max(1, ceil_div(longest, PART_SIZE)), out[:n])
        if len(qkv) > n:
            self._run(specs.PAGED_PREFILL if tensor_cores else specs.PLAIN_PREFILL, num_decode=n, **same, **every)

    def _decode(self, rows: dict[str, Any], plan: SplitPlan, out: Array) -> None:
        """Decode rows on tensor cores: the plan's shares, then the parts of every row together."""
        (_, num_kv_heads, _, head_dim), num_heads = rows["key_cache"].shape, rows["num_heads"]
        stages, _ = _decode_shape(self._device.capability, head_dim)
        partial = self._partial((len(plan.items), num_heads // num_kv_heads), head_dim)
        self._run(specs.PAGED_DECODE, items=plan.items, item_start=plan.item_start, paged=1, stages=stages, **rows, **partial)
        self._run(
            specs.MERGE_ITEMS, part_start=plan.part_start, out=out, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, **partial
        )

    def _decode_in_partitions(self, rows: dict[str, Any], context_lens: Array, num_parts: int, out: Array) -> None:
        """Paged attention v2: every partition of the context, then all of them together."""
        head_dim = rows["key_cache"].shape[3]
        partial = self._partial((len(out), rows["num_heads"], num_parts), head_dim)
        self._run(specs.ATTENTION_PARTITION, context_lens=context_lens, part_size=PART_SIZE, paged=1, **rows, **partial)
        self._run(specs.MERGE_PARTITIONS, out=out, num_heads=rows["num_heads"], head_dim=head_dim, **partial)

    def _partial(self, shape: tuple[int, ...], head_dim: int) -> dict[str, Array]:
        """Float32 memory for partial results, which is used again from call to call, and grows."""
        shapes = {"partial_out": (*shape, head_dim), "partial_max": shape, "partial_sum": shape}
        for name, wanted in shapes.items():
            if name not in self._scratch or len(self._scratch[name]) < math.prod(wanted):
                self._scratch[name] = self._device.empty((math.prod(wanted),), np.float32)
        return {name: self._scratch[name][: math.prod(wanted)].reshape(wanted) for name, wanted in shapes.items()}

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
