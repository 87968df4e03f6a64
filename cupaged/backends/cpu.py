"""The fast CPU: BLAS for the matrices, Numba kernels for everything else, over NumPy float32 arrays.

Weights stay as they are stored, [out, in]: one token is a matrix-vector product, a few tokens are W @ x.T (transposed
back by a kernel; OpenBLAS splits the long side over its threads), many are x @ W.T. So a tied embedding is one array,
and loading is a copy. scripts/bench_kernels.py times the alternatives.

Threads: kernels run in a Team of our own; BLAS has its own threads, whose number is set for the whole process when a
backend is made, and to one while the Team itself multiplies (see cupaged/_blas.py for the rest of that policy). One backend may be used by one thread at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import threadpoolctl

from cupaged import _blas
from cupaged.backends import cpu_attention, cpu_kernels, cpu_sampling, sampling
from cupaged.backends.base import AttentionBatch, SamplingBatch
from cupaged.backends.cpu_kernels import F32, I32
from cupaged.backends.cpu_threads import Team
from cupaged.errors import InvariantError
from cupaged.tensor_source import TensorSource

CHUNK_BYTES = 4 << 20
"""How much of a tensor is read at once while loading."""

SKINNY_ROWS = 128
"""Up to this many rows a product is faster as W @ x.T."""

TEAM_WORK = 100_000
"""Numbers touched (about 50 us of work) from which a kernel is worth handing to the team."""

_NO_BIAS = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """weight float32 [out, in]; bias float32 [out], or [0] for none."""

    weight: F32
    bias: F32


class CpuBackend:
    """Implements backends.base.Backend on NumPy arrays. `threads`: default, the cores this process may use."""

    name = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or _blas.usable_cores()
        self._team = Team(self.threads)
        self._counts = sampling.TokenCounts()
        self._blas_libraries = _controllable_blas()
        self._set_blas_threads(self.threads)
        if self.threads > 1 and not _blas.policy_applies() and any(library.internal_api == "openblas" for library in self._blas_libraries):
            _warn_late()

    def _run(self, work: int, kernel: Callable[..., Any], *arguments: Any) -> None:
        if work < TEAM_WORK or self.threads == 1:
            kernel(0, 1, *arguments)
        else:
            self._team.run(kernel, *arguments)

    def _set_blas_threads(self, threads: int) -> None:
        for library in self._blas_libraries:
            library.set_num_threads(threads)

    @contextmanager
    def _one_blas_thread(self) -> Iterator[None]:
        """Products inside run on the thread that asks: the members of the team multiply side by side."""
        self._set_blas_threads(1)
        try:
            yield
        finally:
            self._set_blas_threads(self.threads)

    # ---- memory

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.empty(shape, dtype)

    def upload(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array

    def download(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array

    # ---- weights

    def load_matrix(self, parts: Sequence[TensorSource], bias: Sequence[TensorSource] | None = None) -> PackedMatrix:
        return PackedMatrix(_stack(parts), _NO_BIAS if bias is None else _stack(bias))

    def load_vector(self, source: TensorSource) -> F32:
        return _stack([source])

    def load_embedding(self, source: TensorSource, *, tied: bool) -> PackedMatrix:
        return PackedMatrix(_stack([source]), _NO_BIAS)

    def new_kv_cache(self, num_layers: int, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> tuple[F32, F32]:
        shape = (num_layers, num_blocks, num_kv_heads, block_size, head_dim)
        return np.empty(shape, np.float32), np.empty(shape, np.float32)

    def new_swap_space(self, num_layers: int, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> tuple[F32, F32]:
        return self.new_kv_cache(num_layers, num_blocks, num_kv_heads, block_size, head_dim)

    # ---- the forward pass

    def embedding(self, table: PackedMatrix, token_ids: I32, out: F32) -> None:
        _check_within("token id", token_ids, 0, len(table.weight))
        self._run(out.size, cpu_kernels.gather_rows, table.weight, token_ids, out)

    def linear(self, x: F32, matrix: PackedMatrix, out: F32) -> None:
        rows = len(x)
        if 1 < rows <= SKINNY_ROWS:
            product = np.matmul(matrix.weight, x.T)
            self._run(out.size, cpu_kernels.transpose_add, product, matrix.bias, out)
            return
        if rows == 1:
            np.matmul(matrix.weight, x[0], out=out[0])
        else:
            np.matmul(x, matrix.weight.T, out=out)
        if matrix.bias.size:
            out += matrix.bias

    def rms_norm(self, x: F32, weight: F32, eps: float, out: F32) -> None:
        self._run(x.size, cpu_kernels.rms_norm, x, weight, eps, out)

    def add_rms_norm(self, x: F32, delta: F32, weight: F32, eps: float, out: F32) -> None:
        self._run(x.size, cpu_kernels.add_rms_norm, x, delta, weight, eps, out)

    def head_rms_norm(self, qkv: F32, q_weight: F32, k_weight: F32, num_heads: int, num_kv_heads: int, eps: float) -> None:
        self._run(qkv.size, cpu_kernels.head_rms_norm, qkv, q_weight, k_weight, num_heads, num_kv_heads, eps)

    def rope_and_cache(
        self, qkv: F32, cos: F32, sin: F32, batch: AttentionBatch, num_heads: int, key_cache: F32, value_cache: F32
    ) -> None:
        _check_within("position", batch.positions, 0, len(cos))
        _check_within("slot", batch.slots, -1, key_cache.shape[0] * key_cache.shape[2])
        self._run(
            qkv.size, cpu_kernels.rope_and_cache, qkv, cos, sin, batch.positions, batch.slots, num_heads, key_cache, value_cache
        )

    def attention(
        self, qkv: F32, key_cache: F32, value_cache: F32, batch: AttentionBatch, num_heads: int, scale: float, window: int, out: F32
    ) -> None:
        num_blocks, num_kv_heads, block_size, head_dim = key_cache.shape
        rows = len(qkv)
        bad = cpu_attention.first_unsound(
            batch.positions, batch.block_tables, batch.query_start, batch.context_lens, batch.num_decode, batch.max_context, window,
            num_blocks, block_size,
        )  # fmt: skip
        if bad >= 0:
            raise InvariantError(f"sequence {bad} of the step: block, position or context out of bounds")
        short, tiles = cpu_attention.share_out(batch, num_kv_heads, num_heads // num_kv_heads)
        with self._one_blas_thread() if tiles else nullcontext():
            self._run(
                rows * batch.max_context * num_heads * head_dim // 4,
                cpu_attention.attention,
                qkv.reshape(rows, num_heads + 2 * num_kv_heads, head_dim), key_cache, value_cache, batch, short, tiles,
                scale, window, out.reshape(rows, num_heads, head_dim),
            )  # fmt: skip
        out[batch.query_start[-1] :] = 0

    def silu_mul(self, gate_up: F32, out: F32) -> None:
        self._run(gate_up.size, cpu_kernels.silu_mul, gate_up, out)

    def gather_rows(self, x: F32, rows: I32, out: F32) -> None:
        _check_within("row", rows, 0, len(x))
        self._run(out.size, cpu_kernels.gather_rows, x, rows, out)

    # ---- sampling

    def set_history(self, row_id: int, prompt_ids: I32, output_ids: I32) -> None:
        self._counts.set_history(row_id, prompt_ids, output_ids)

    def sample(self, logits: F32, batch: SamplingBatch) -> I32:
        return cpu_sampling.sample(logits, batch, self._counts, self._team)

    def token_logprobs(self, logits: F32, token_ids: I32, k: int) -> tuple[F32, I32, I32, F32]:
        return cpu_sampling.token_logprobs(logits, token_ids, k, self._team)

    # ---- cache maintenance

    def copy_blocks(self, key_cache: F32, value_cache: F32, pairs: I32) -> None:
        layers, blocks = key_cache.shape[0], key_cache.shape[1]
        _check_within("block", pairs.ravel(), 0, blocks)
        keys, values = key_cache.reshape(layers, blocks, -1), value_cache.reshape(layers, blocks, -1)
        self._run(len(pairs) * layers * keys.shape[2], cpu_kernels.copy_blocks, keys, values, pairs)

    def swap_blocks(self, source: tuple[F32, F32], target: tuple[F32, F32], pairs: I32) -> None:
        _check_within("block", np.ascontiguousarray(pairs[:, 0]), 0, source[0].shape[1])
        _check_within("block", np.ascontiguousarray(pairs[:, 1]), 0, target[0].shape[1])
        for source_array, target_array in zip(source, target, strict=True):
            for layer in range(len(source_array)):  # a layer's blocks are contiguous runs: NumPy copies them as such
                target_array[layer, pairs[:, 1]] = source_array[layer, pairs[:, 0]]


def _stack(sources: Sequence[TensorSource]) -> F32:
    """The tensors one after the other along their first axis, read a few MB at a time."""
    whole = np.empty((sum(s.shape[0] for s in sources), *sources[0].shape[1:]), np.float32)
    row_bytes = whole.itemsize * max(1, int(np.prod(whole.shape[1:])))
    step = max(1, CHUNK_BYTES // row_bytes)
    end = 0
    for source in sources:
        begin, end = end, end + source.shape[0]
        for start in range(0, source.shape[0], step):
            stop = min(start + step, source.shape[0])
            whole[begin + start : begin + stop] = source.read(start, stop)
    return whole


def _check_within(what: str, indices: npt.NDArray[Any], low: int, high: int) -> None:
    at = cpu_kernels.first_outside(indices, low, high)
    if at >= 0:
        raise InvariantError(f"{what} out of bounds: {indices[at]} is not within {low} .. {high - 1}")


def _controllable_blas() -> list[threadpoolctl.LibController]:
    """The BLAS libraries whose threads can be told: all but, for one, Apple's Accelerate."""
    _blas.remove_policy()
    return list(threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers)


@cache
def _warn_late() -> None:
    logging.getLogger("cupaged").warning(
        "NumPy was imported before cupaged, so its BLAS threads could not be tuned and some speed is lost: import cupaged first"
    )
