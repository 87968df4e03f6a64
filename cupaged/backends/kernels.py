"""KernelBackend: every operation of backends/base.py as CUDA C kernels, over a Device.

An operation is a line or two: it checks what the host can see, binds its KernelSpec and launches. Nothing here knows
which device it is; what the emulator runs in CI is what a GPU runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  # gives NumPy bfloat16 and float8_e4m3fn
import numpy as np
import numpy.typing as npt

from cupaged.backends import kernel_specs as specs
from cupaged.backends.base import Array, AttentionBatch, BatchLimits, SamplingBatch
from cupaged.backends.checks import check_block_pairs, check_within
from cupaged.backends.device import Device
from cupaged.backends.download import Download
from cupaged.backends.few_rows import FewRows
from cupaged.backends.kernel_attention import KernelAttention
from cupaged.backends.kernel_batch import DeviceBatch
from cupaged.backends.kernel_graphs import ForwardGraphs
from cupaged.backends.kernel_sampling import KernelSampler
from cupaged.backends.kernel_swaps import KernelSwaps
from cupaged.backends.launch import KernelSpec
from cupaged.tensor_source import TensorSource

CHUNK_BYTES = 4 << 20
"""How much of a tensor is read at once while loading."""

STORED_AS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""What a checkpoint calls the types of weights."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMatrix:
    """weight [out, in] in the type of the weights; bias float32 [out], or [0] for none."""

    weight: Array
    bias: Array


class KernelBackend:
    """Implements backends.base.Backend.

    dtype      of weights and activations: float32, float16 or bfloat16
    kv_dtype   of keys and values: these, or float8_e4m3fn (without scales); default: as the weights
    graphs     whether steps of decode rows only are captured and replayed
    """

    batch_invariant = False  # the kernel that attends to a row depends on its chunk

    def __init__(
        self, device: Device, dtype: npt.DTypeLike = np.float32, kv_dtype: npt.DTypeLike | None = None, *, graphs: bool = True
    ) -> None:
        self.name, self.asynchronous = device.name, device.asynchronous
        self._device = device
        self.activations = self._dtype = np.dtype(dtype)
        self._kv_dtype = self._dtype if kv_dtype is None else np.dtype(kv_dtype)
        self._no_numbers = device.empty((0,), np.float32)
        self._attention = KernelAttention(device, self._kv_dtype)
        self._sampler = KernelSampler(device)
        self._swaps = KernelSwaps(device)
        self._graphs = graphs
        self._few = FewRows(device, self._dtype, graphs=graphs)
        self._batch: DeviceBatch | None = None  # that was set last

    def _run(self, spec: KernelSpec, **arguments: Any) -> None:
        self._device.launch(spec.bind(**arguments))

    # ---- memory

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        return self._device.empty(shape, dtype)

    def upload(self, array: npt.NDArray[Any]) -> Array:
        return self._device.upload(array)

    def download(self, array: Array) -> npt.NDArray[Any]:
        self._swaps.settle()
        return self._device.download(array)

    def download_later(self, array: Array) -> Download:
        return self._device.download_later(array)

    def memory(self) -> tuple[int, int] | None:
        return self._device.memory()

    # ---- steps

    def new_batch(self, limits: BatchLimits, chosen: Array | None = None) -> DeviceBatch:
        return DeviceBatch(self._device, limits, self._attention.num_shares(limits), self._graphs, chosen)

    def set_batch(
        self, batch: DeviceBatch, token_ids: npt.NDArray[np.int32], attention: AttentionBatch, sources: npt.NDArray[np.int32] | None = None
    ) -> None:
        batch.set(token_ids, attention, sources)
        self._swaps.before_step(attention, batch.limits.block_size)
        self._batch = batch

    def record(self, build: Callable[[int], None], rows: int) -> Callable[[int], None]:
        self._few.settle(self)  # the model is there, and no graph yet
        return ForwardGraphs(self._device, build, lambda: self._batch.lanes if self._batch else None)

    # ---- weights

    def load_matrix(self, parts: Sequence[TensorSource], bias: Sequence[TensorSource] | None = None) -> DeviceMatrix:
        return self._load_matrix(parts, bias, "norm" if len(parts) > 1 else "plain")  # queries, keys and values together

    def load_gate_up(self, gate: TensorSource, up: TensorSource, bias: Sequence[TensorSource] | None = None) -> DeviceMatrix:
        return self._load_matrix([gate, up], bias, "gate")

    def load_vector(self, source: TensorSource) -> Array:
        return self._load([source], np.dtype(np.float32))

    def load_embedding(self, source: TensorSource, *, tied: bool) -> DeviceMatrix:
        if tied:
            return self._load_matrix([source], None, "norm")
        return DeviceMatrix(self._load([source], self._dtype), self._no_numbers)

    def _load_matrix(self, parts: Sequence[TensorSource], bias: Sequence[TensorSource] | None, role: str) -> DeviceMatrix:
        """`role`: see few_rows.Product."""
        weight = self._load(parts, self._dtype)
        matrix = DeviceMatrix(weight, self._no_numbers if bias is None else self._load(bias, np.dtype(np.float32)))
        self._few.loaded(matrix, weight.shape, role)
        return matrix

    def _load(self, sources: Sequence[TensorSource], dtype: np.dtype[Any]) -> Array:
        """The tensors one after the other along their first axis, read a few MB at a time."""
        width = sources[0].shape[1:]
        whole = self._device.empty((sum(s.shape[0] for s in sources), *width), dtype)
        step = max(1, CHUNK_BYTES // (4 * max(1, math.prod(width))))
        at = 0
        for source in sources:
            for start in range(0, source.shape[0], step):
                piece = self._read(source, start, min(start + step, source.shape[0]), dtype)
                self._device.fill(whole[at : at + len(piece)], piece)
                at += len(piece)
        return whole

    @staticmethod
    def _read(source: TensorSource, start: int, stop: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Rows of a tensor in this type; a matrix that is stored in it as it lies: converting costs more than reading."""
        if len(source.shape) == 2 and source.storage == STORED_AS[dtype.name]:
            return source.read_blocks(start, stop).view(dtype)
        return source.read(start, stop).astype(dtype, copy=False)

    def new_kv_cache(self, num_layers: int, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> tuple[Array, Array]:
        shape = (num_layers, num_blocks, num_kv_heads, block_size, head_dim)
        return self._device.empty(shape, self._kv_dtype), self._device.empty(shape, self._kv_dtype)

    def new_swap_space(self, num_layers: int, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> tuple[Array, Array]:
        shape = (num_layers, num_blocks, num_kv_heads, block_size, head_dim)
        return self._swaps.new_space(shape, self._kv_dtype), self._swaps.new_space(shape, self._kv_dtype)

    # ---- the forward pass

    def embedding(self, table: DeviceMatrix, batch: DeviceBatch, out: Array) -> None:
        rows = batch.rows
        if batch.chosen is not None:
            self._run(specs.FILL_TOKENS, sources=rows.sources, chosen=batch.chosen, token_ids=rows.token_ids)
        self._run(specs.GATHER_ROWS, table=table.weight, rows=rows.token_ids, out=out)

    def linear(self, x: Array, matrix: DeviceMatrix, out: Array) -> None:
        self._product(x, matrix, out, add=False)

    def linear_add(self, x: Array, matrix: DeviceMatrix, out: Array) -> None:
        self._product(x, matrix, out, add=True)

    def linear_silu_mul(self, x: Array, matrix: DeviceMatrix, work: Array, out: Array) -> None:
        self._product(x, matrix, work, add=False)
        self._run(specs.SILU_MUL, gate_up=work, out=out)

    def norm_linear(self, x: Array, norm: Array, eps: float, matrix: DeviceMatrix, normed: Array, out: Array) -> None:
        if self._is_skinny(x):
            self._run(specs.SKINNY_MATMUL, x=x, norm=norm, eps=eps, weight=matrix.weight, bias=matrix.bias, out=out, add=False, normed=1)
            return
        self.rms_norm(x, norm, eps, normed)
        self.linear(normed, matrix, out)

    def norm_linear_silu_mul(self, x: Array, norm: Array, eps: float, matrix: DeviceMatrix, normed: Array, work: Array, out: Array) -> None:
        if self._is_skinny(x):
            self._run(specs.SKINNY_GATE_UP, x=x, norm=norm, eps=eps, weight=matrix.weight, bias=matrix.bias, out=out)
            return
        self.rms_norm(x, norm, eps, normed)
        self.linear_silu_mul(normed, matrix, work, out)

    def _product(self, x: Array, matrix: DeviceMatrix, out: Array, *, add: bool) -> None:
        if self._is_skinny(x):
            self._run(specs.SKINNY_MATMUL, x=x, norm=self._no_numbers, eps=0.0, weight=matrix.weight, bias=matrix.bias, out=out, add=add, normed=0)
            return
        self._device.gemm(x, matrix.weight, out, add=add)
        if len(matrix.bias):
            self._run(specs.ADD_BIAS, out=out, bias=matrix.bias)

    def _is_skinny(self, x: Array) -> bool:
        """Whether a product of x is our own kernel's."""
        return len(x) <= self._few.most and x.shape[1] % 8 == 0

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        self._run(specs.RMS_NORM, x=x, weight=weight, eps=eps, out=out)

    def head_rms_norm(self, qkv: Array, q_weight: Array, k_weight: Array, num_heads: int, num_kv_heads: int, eps: float) -> None:
        self._run(
            specs.HEAD_RMS_NORM, qkv=qkv, q_weight=q_weight, k_weight=k_weight, num_heads=num_heads, num_kv_heads=num_kv_heads, eps=eps
        )

    def rope_and_cache(
        self, qkv: Array, cos: Array, sin: Array, batch: DeviceBatch, num_heads: int, key_cache: Array, value_cache: Array
    ) -> None:
        rows = batch.rows.attention
        self._run(
            specs.ROPE_AND_CACHE,
            qkv=qkv, cos=cos, sin=sin, positions=rows.positions, slots=rows.slots,
            key_cache=key_cache, value_cache=value_cache, num_heads=num_heads,
        )  # fmt: skip

    def attention(
        self, qkv: Array, key_cache: Array, value_cache: Array, batch: DeviceBatch, num_heads: int, scale: float, window: int, out: Array
    ) -> None:
        self._attention(qkv, key_cache, value_cache, batch, num_heads, scale, window, out)

    def gather_rows(self, x: Array, rows: Array, out: Array) -> None:
        chosen = self._device.peek(rows)
        if chosen is not None:
            check_within("row", chosen, 0, len(x))
        self._run(specs.GATHER_ROWS, table=x, rows=rows, out=out)

    # ---- sampling

    def set_history(self, row_id: int, prompt_ids: npt.NDArray[np.int32], output_ids: npt.NDArray[np.int32]) -> None:
        self._sampler.set_history(row_id, prompt_ids, output_ids)

    def sample(self, logits: Array, batch: SamplingBatch, out: Array | None = None) -> Array:
        return self._sampler.sample(logits, batch, out)

    def likeliest(self, logits: Array, out: Array) -> None:
        self._sampler.likeliest(logits, out)

    def token_logprobs(self, logits: Array, token_ids: Array, k: int) -> tuple[Array, Array, Array, Array]:
        return self._sampler.token_logprobs(logits, token_ids, k)

    def beam_candidates(self, logits: Array, k: int) -> tuple[Array, Array]:
        return self._sampler.beam_candidates(logits, k)

    # ---- cache maintenance

    def swap_blocks(self, source: tuple[Array, Array], target: tuple[Array, Array], pairs: npt.NDArray[np.int32]) -> None:
        check_block_pairs(pairs, source[0].shape[1], target[0].shape[1], within_one_pool=False)
        self._swaps.swap(source, target, pairs)

    def copy_blocks(self, key_cache: Array, value_cache: Array, pairs: npt.NDArray[np.int32]) -> None:
        check_block_pairs(pairs, key_cache.shape[1], key_cache.shape[1], within_one_pool=True)
        if len(pairs):
            self._swaps.before_copies(pairs)
            source_key, source_value = target_key, target_value = [cache.reshape(*cache.shape[:2], -1) for cache in (key_cache, value_cache)]
            self._run(
                specs.COPY_BLOCKS,
                source_key=source_key, source_value=source_value, target_key=target_key, target_value=target_value,
                pairs=self._device.upload(np.ascontiguousarray(pairs)),
            )  # fmt: skip
