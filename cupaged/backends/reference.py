"""The plain NumPy definition of every operation: slow, exact, and it raises on anything out of bounds.

Other backends are correct when they agree with this one (tests/test_conformance.py). Nothing here is tuned. Loops run
over sequences where a batched form would hide the meaning, and every index is checked, because NumPy's negative
indices would otherwise turn a wrong block into a plausible one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.backends import sampling
from cupaged.backends.base import AttentionBatch, BatchLimits, SamplingBatch
from cupaged.backends.checks import check_batch, check_block_pairs, check_within, fill_tokens
from cupaged.backends.download import Arrived, put
from cupaged.errors import InvariantError
from cupaged.tensor_source import TensorSource

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


@dataclass
class ReferenceBatch:
    """The last step that was set; `chosen`: see Backend.new_batch."""

    limits: BatchLimits
    token_ids: I32
    attention: AttentionBatch | None = None
    chosen: I32 | None = None


@dataclass(frozen=True)
class DenseMatrix:
    """[out, in] float32 and an optional bias [out]."""

    weight: F32
    bias: F32 | None = None


class ReferenceBackend:
    """Implements backends.base.Backend on NumPy arrays."""

    name = "reference"
    activations = np.dtype(np.float32)
    batch_invariant = False  # BLAS sums a row in an order that depends on how many there are
    asynchronous = False

    def __init__(self) -> None:
        self._counts = sampling.TokenCounts()

    # ---- memory

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        array = np.empty(shape, dtype)
        if array.dtype.kind == "f":
            array.fill(np.nan)  # an operation that reads what nobody wrote shows at once
        return array

    def upload(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array

    def download(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array

    def download_later(self, array: npt.NDArray[Any]) -> Arrived:
        return Arrived(array)

    def memory(self) -> None:
        return None

    # ---- steps

    def new_batch(self, limits: BatchLimits, chosen: I32 | None = None) -> ReferenceBatch:
        return ReferenceBatch(limits, np.empty(0, np.int32), chosen=chosen)

    def set_batch(self, batch: ReferenceBatch, token_ids: I32, attention: AttentionBatch, sources: I32 | None = None) -> None:
        token_ids = fill_tokens(token_ids, sources, batch.chosen)
        check_batch(batch.limits, token_ids, attention)
        batch.token_ids, batch.attention = token_ids, attention

    def record(self, build: Callable[[int], None], rows: int) -> Callable[[int], None]:
        return build

    # ---- weights

    def load_matrix(self, parts: Sequence[TensorSource], bias: Sequence[TensorSource] | None = None) -> DenseMatrix:
        weight = np.concatenate([part.read() for part in parts])
        return DenseMatrix(weight, None if bias is None else np.concatenate([part.read() for part in bias]))

    def load_gate_up(self, gate: TensorSource, up: TensorSource, bias: Sequence[TensorSource] | None = None) -> DenseMatrix:
        return self.load_matrix([gate, up], bias)

    def load_vector(self, source: TensorSource) -> F32:
        return source.read()

    def load_embedding(self, source: TensorSource, *, tied: bool) -> DenseMatrix:
        return DenseMatrix(source.read())

    def new_kv_cache(self, num_layers: int, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> tuple[F32, F32]:
        shape = (num_layers, num_blocks, num_kv_heads, block_size, head_dim)
        return self.empty(shape, np.float32), self.empty(shape, np.float32)

    def new_swap_space(self, num_layers: int, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> tuple[F32, F32]:
        return self.new_kv_cache(num_layers, num_blocks, num_kv_heads, block_size, head_dim)

    # ---- the forward pass

    def embedding(self, table: DenseMatrix, batch: ReferenceBatch, out: F32) -> None:
        out[:] = table.weight[batch.token_ids]

    def linear(self, x: F32, matrix: DenseMatrix, out: F32) -> None:
        out[:] = x @ matrix.weight.T
        if matrix.bias is not None:
            out += matrix.bias

    def linear_add(self, x: F32, matrix: DenseMatrix, out: F32) -> None:
        product = np.empty_like(out)
        self.linear(x, matrix, product)
        out += product

    def linear_silu_mul(self, x: F32, matrix: DenseMatrix, work: F32, out: F32) -> None:
        self.linear(x, matrix, work)
        gate, up = work[:, : out.shape[1]], work[:, out.shape[1] :]
        # exp(-|x|) never overflows
        e = np.exp(-np.abs(gate))
        sigmoid = np.where(gate >= 0, np.float32(1), e) / (1 + e)
        out[:] = gate * sigmoid * up

    def rms_norm(self, x: F32, weight: F32, eps: float, out: F32) -> None:
        out[:] = _rms_norm(x, weight, eps)

    def norm_linear(self, x: F32, norm: F32, eps: float, matrix: DenseMatrix, normed: F32, out: F32) -> None:
        self.rms_norm(x, norm, eps, normed)
        self.linear(normed, matrix, out)

    def norm_linear_silu_mul(self, x: F32, norm: F32, eps: float, matrix: DenseMatrix, normed: F32, work: F32, out: F32) -> None:
        self.rms_norm(x, norm, eps, normed)
        self.linear_silu_mul(normed, matrix, work, out)

    def head_rms_norm(self, qkv: F32, q_weight: F32, k_weight: F32, num_heads: int, num_kv_heads: int, eps: float) -> None:
        heads = qkv.reshape(len(qkv), -1, len(q_weight))
        query, key = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
        query[:] = _rms_norm(query, q_weight, eps)
        key[:] = _rms_norm(key, k_weight, eps)

    def rope_and_cache(
        self, qkv: F32, cos: F32, sin: F32, batch: ReferenceBatch, num_heads: int, key_cache: F32, value_cache: F32
    ) -> None:
        num_kv_heads, block_size, head_dim = key_cache.shape[1:]
        rows = _rows(batch)
        heads = qkv.reshape(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
        rotated = heads[:, : num_heads + num_kv_heads]
        c, s = cos[rows.positions][:, None], sin[rows.positions][:, None]
        low, high = rotated[..., : head_dim // 2].copy(), rotated[..., head_dim // 2 :].copy()
        rotated[..., : head_dim // 2] = low * c - high * s
        rotated[..., head_dim // 2 :] = high * c + low * s

        live = np.flatnonzero(rows.slots >= 0)
        slots = rows.slots[live]
        block, offset = slots // block_size, slots % block_size
        key_cache[block, :, offset] = heads[live, num_heads : num_heads + num_kv_heads]
        value_cache[block, :, offset] = heads[live, num_heads + num_kv_heads :]

    def attention(
        self, qkv: F32, key_cache: F32, value_cache: F32, batch: ReferenceBatch, num_heads: int, scale: float, window: int, out: F32
    ) -> None:
        num_kv_heads, block_size, head_dim = key_cache.shape[1:]
        rows = _rows(batch)
        query = qkv.reshape(len(qkv), -1, head_dim)[:, :num_heads]
        result = out.reshape(len(out), num_heads, head_dim)
        result[:] = 0
        for s, context in enumerate(rows.context_lens):
            first, last = rows.query_start[s], rows.query_start[s + 1]
            if context == 0:
                continue
            # blocks that no row looks at may be gone: a sequence gives back what its window has left behind
            skipped = max(0, rows.positions[first] - window + 1) // block_size if window else 0
            blocks = rows.block_tables[s, skipped : -(-context // block_size)]
            # [blocks, K, P, D] -> [K, slots, D]
            key = key_cache[blocks].swapaxes(0, 1).reshape(num_kv_heads, -1, head_dim)
            value = value_cache[blocks].swapaxes(0, 1).reshape(num_kv_heads, -1, head_dim)
            for row in range(first, last):
                position = rows.positions[row] - skipped * block_size
                oldest = max(0, position - window + 1) if window else 0
                k, v = key[:, oldest : position + 1], value[:, oldest : position + 1]
                q = query[row].reshape(num_kv_heads, -1, head_dim)
                scores = np.einsum("kgd,ktd->kgt", q, k) * np.float32(scale)
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                weights /= weights.sum(-1, keepdims=True)
                result[row] = np.einsum("kgt,ktd->kgd", weights, v).reshape(num_heads, head_dim)

    def gather_rows(self, x: F32, rows: I32, out: F32) -> None:
        check_within("row", rows, 0, len(x))
        out[:] = x[rows]

    # ---- sampling

    def set_history(self, row_id: int, prompt_ids: I32, output_ids: I32) -> None:
        self._counts.set_history(row_id, prompt_ids, output_ids)

    def sample(self, logits: F32, batch: SamplingBatch, out: I32 | None = None) -> I32:
        return put(sampling.sample(logits, batch, self._counts), out)

    def likeliest(self, logits: F32, out: I32) -> None:
        for r, row in enumerate(logits):
            sampling.check_row(r, row)
        out[:] = logits.argmax(axis=1)

    def token_logprobs(self, logits: F32, token_ids: I32, k: int) -> tuple[F32, I32, I32, F32]:
        return sampling.token_logprobs(logits, token_ids, k)

    def beam_candidates(self, logits: F32, k: int) -> tuple[I32, F32]:
        return sampling.beam_candidates(logits, k)

    # ---- cache maintenance

    def copy_blocks(self, key_cache: F32, value_cache: F32, pairs: I32) -> None:
        check_block_pairs(pairs, key_cache.shape[1], key_cache.shape[1], within_one_pool=True)
        source, destination = pairs[:, 0], pairs[:, 1]
        key_cache[:, destination] = key_cache[:, source]
        value_cache[:, destination] = value_cache[:, source]

    def swap_blocks(self, source: tuple[F32, F32], target: tuple[F32, F32], pairs: I32) -> None:
        check_block_pairs(pairs, source[0].shape[1], target[0].shape[1], within_one_pool=False)
        for source_array, target_array in zip(source, target, strict=True):
            target_array[:, pairs[:, 1]] = source_array[:, pairs[:, 0]]


def _rows(batch: ReferenceBatch) -> AttentionBatch:
    if batch.attention is None:
        raise InvariantError("a batch is used before it was set")
    return batch.attention


def _rms_norm(x: F32, weight: F32, eps: float) -> F32:
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    scaled: F32 = x / np.sqrt(mean_square + np.float32(eps)) * weight
    return scaled
