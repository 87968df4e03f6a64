"""The fast CPU: packed weights, a paged cache and the kernels over both, compiled for this processor.

Every operation is a row of numbers for cpu_program. Called by itself it runs at once; while a forward pass is being
recorded it is only noted, and the whole table is later run by all threads in one call. Nothing here uses BLAS.

Whatever a kernel reads is checked before: shapes when an operation is called or recorded, the numbers of a step when
they are set (cpu_batch). One backend may be used by one thread at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.backends import (
    cpu_cache,
    cpu_code,
    cpu_gemm,
    cpu_matrix,
    cpu_noted,
    cpu_paged_attention,
    cpu_rows,
    cpu_sampling,
    sampling,
)
from cupaged.backends.base import AttentionBatch, BatchLimits, SamplingBatch
from cupaged.backends.checks import check_block_pairs, check_within, fill_tokens
from cupaged.backends.cpu_batch import CpuBatch
from cupaged.backends.cpu_code import address
from cupaged.backends.cpu_cores import usable_cores
from cupaged.backends.cpu_formats import Format
from cupaged.backends.cpu_kv_numbers import KvKind, kind_of
from cupaged.backends.cpu_matrix import PackedMatrix
from cupaged.backends.cpu_program import KERNEL, LINE, Words, aligned, float_word, numbers, operation
from cupaged.backends.cpu_threads import Crew
from cupaged.backends.download import Arrived, put
from cupaged.errors import InvariantError
from cupaged.tensor_source import TensorSource

CREW_WORK = 30_000
"""Numbers touched (about 15 us of work) from which an operation by itself is worth handing to the crew."""

_PAGE = 4096
"""Bytes between addresses that share a place in a first-level cache."""

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]


@dataclass
class _Record:
    """The operations of a program while it is built, and its number of rows when it runs."""

    rows: Words = field(default_factory=lambda: np.zeros(1, np.int64))
    operations: list[Words] = field(default_factory=list)
    arrays: list[Any] = field(default_factory=list)
    """Everything whose address is in the table."""
    batches: list[CpuBatch] = field(default_factory=list)


def kernels_of(kv_kind: KvKind) -> list[str]:
    """The operations that every model needs; those that read weights are compiled for the formats that a model has."""
    plain = [name for name in cpu_code.OPERATIONS if name not in ("embedding", "gemm", "rope_and_cache")]
    return [*plain, f"rope_and_cache-{kv_kind.index}"]


def kernels_over(kind: Format) -> list[str]:
    """The operations that read weights of a format."""
    return [f"gemm-{kind.index}", f"embedding-{kind.index}"]


class CpuBackend:
    """Implements backends.base.Backend on NumPy arrays.

    threads    default: the cores this process may use
    dtype      how weights are kept: auto, float32, float16, bfloat16 or int8 (see cpu_formats.choose)
    kv_dtype   how keys and values are kept: auto (float32), float32, float16, bfloat16 or int8
    pin        each thread computes on a core of its own
    """

    name = "cpu"
    activations = np.dtype(np.float32)
    batch_invariant = True
    asynchronous = False

    def __init__(self, threads: int | None = None, dtype: str = "auto", kv_dtype: str = "auto", *, pin: bool = False) -> None:
        self.threads = threads or usable_cores()
        self.dtype = dtype
        self._kv_kind = kind_of(kv_dtype)
        cpu_code.prepare(kernels_of(self._kv_kind))
        self._crew = Crew(self.threads, pin=pin)
        self._crew.reserve(max(cpu_gemm.SCRATCH_BYTES, cpu_rows.SCRATCH_BYTES))
        self._counts = sampling.TokenCounts()
        self._sampler = cpu_sampling.Sampler(self._crew, self._counts)
        self._record: _Record | None = None
        self._room = aligned((0,), np.float32)

    # ---- memory

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Rows do not all begin at the same place of a page: the processor's caches would hold only a few such lines at a time."""
        row = math.prod(shape[1:]) * np.dtype(dtype).itemsize
        if len(shape) != 2 or row % _PAGE:
            return aligned(shape, dtype)
        return aligned((shape[0], shape[1] + LINE // np.dtype(dtype).itemsize), dtype)[:, : shape[1]]

    def upload(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array

    def download(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array

    def download_later(self, array: npt.NDArray[Any]) -> Arrived:
        return Arrived(array)

    def memory(self) -> None:
        return None

    # ---- steps

    def new_batch(self, limits: BatchLimits, chosen: I32 | None = None) -> CpuBatch:
        return CpuBatch(limits, self.threads, chosen)

    def set_batch(self, batch: CpuBatch, token_ids: I32, attention: AttentionBatch, sources: I32 | None = None) -> None:
        batch.set(fill_tokens(token_ids, sources, batch.chosen), attention)

    def record(self, build: Callable[[int], None], rows: int) -> Callable[[int], None]:
        record = _Record()
        self._record = record
        try:
            build(rows)
        finally:
            self._record = None
        table = np.stack(record.operations)
        _look_ahead(table)
        record.arrays += cpu_noted.connect(table, rows, self.threads)
        record.batches = list(dict.fromkeys(record.batches))

        def run(rows_now: int) -> None:
            if not 1 <= rows_now <= rows:
                raise InvariantError(f"a program recorded for up to {rows} rows is run for {rows_now}")
            for batch in record.batches:
                _expect_rows(rows_now, batch.rows)
            record.rows[0] = rows_now
            self._crew.run(table)

        return run

    def _do(self, function: int, rows: int, words: Sequence[Any], work: int) -> None:
        """Run or note one operation. Arrays among its words stand for their addresses."""
        record = self._record or _Record()
        table = operation(function, record.rows, numbers(words))
        if self._record is not None:
            record.operations.append(table)
            record.arrays += [word for word in words if isinstance(word, np.ndarray)]
            return
        record.rows[0] = rows
        self._crew.run(table[None], alone=work < CREW_WORK)

    def _join(self, batch: CpuBatch, rows: int) -> None:
        """An operation of `rows` rows reads a batch, which must have as many: now, or whenever the program runs."""
        if self._record is None:
            _expect_rows(rows, batch.rows)
        elif rows > batch.limits.rows:
            raise InvariantError(f"an operation of {rows} rows is recorded over a batch of at most {batch.limits.rows}")
        else:
            self._record.batches.append(batch)

    # ---- weights

    def load_matrix(self, parts: Sequence[TensorSource], bias: Sequence[TensorSource] | None = None) -> PackedMatrix:
        return _ready(cpu_matrix.stacked(self.dtype, parts, bias))

    def load_gate_up(self, gate: TensorSource, up: TensorSource, bias: Sequence[TensorSource] | None = None) -> PackedMatrix:
        return _ready(cpu_matrix.gate_up(self.dtype, gate, up, bias))

    def load_vector(self, source: TensorSource) -> F32:
        return cpu_matrix.vector([source])

    def load_embedding(self, source: TensorSource, *, tied: bool) -> PackedMatrix:
        return _ready(cpu_matrix.stacked(self.dtype, [source]))

    def new_kv_cache(self, num_layers: int, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> Any:
        return cpu_cache.new(self._kv_kind, num_layers, num_blocks, num_kv_heads, block_size, head_dim)

    def new_swap_space(self, num_layers: int, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> Any:
        return self.new_kv_cache(num_layers, num_blocks, num_kv_heads, block_size, head_dim)

    # ---- the forward pass

    def embedding(self, table: PackedMatrix, batch: CpuBatch, out: F32) -> None:
        (part,) = table.parts
        self._join(batch, len(out))
        _expect(out.shape[1] == table.inputs and table.columns >= batch.limits.vocab_size, "embedding", out)
        words = part.weight, part.weight.strides[0], table.inputs, batch.token_ids, out, _stride(out)
        self._do(address("embedding", part.kind.index), len(out), words, out.size)

    def linear(self, x: F32, matrix: PackedMatrix, out: F32) -> None:
        self._products(x, matrix, out, cpu_gemm.PLAIN)

    def linear_add(self, x: F32, matrix: PackedMatrix, out: F32) -> None:
        self._products(x, matrix, out, cpu_gemm.ADD)

    def linear_silu_mul(self, x: F32, matrix: PackedMatrix, work: F32, out: F32) -> None:
        self._products(x, matrix, out, cpu_gemm.SILU)

    def _products(self, x: F32, matrix: PackedMatrix, out: F32, epilogue: int) -> None:
        _expect(x.shape == (len(out), matrix.inputs) and out.shape[1] == matrix.columns, "linear", x)
        for part in matrix.parts:
            first = slice(part.first, None)
            bias = 0 if matrix.bias is None else matrix.bias[first]
            words = (
                *(x, _stride(x), matrix.inputs, part.weight, part.weight.strides[0], part.columns),
                *(out[:, first], _stride(out), bias, epilogue),
                *(0, 0, 0, 0, 0 if part.kind.is_float else self._room_for(x)),
            )
            self._do(address("gemm", part.kind.index), len(out), words, len(x) * part.weight.size)

    def _room_for(self, x: F32) -> F32:
        """Memory for x in digits, until the operation ends."""
        size = cpu_gemm.record_numbers(len(x), x.shape[1], self.threads)
        if self._room.size < size:
            self._room = aligned((size,), np.float32)
        return self._room

    def rms_norm(self, x: F32, weight: F32, eps: float, out: F32) -> None:
        _expect(x.shape == out.shape and len(weight) == x.shape[1], "rms_norm", x)
        words = x, _stride(x), weight, float_word(eps), x.shape[1], out, _stride(out)
        self._do(address("rms_norm"), len(out), words, out.size)

    def norm_linear(self, x: F32, norm: F32, eps: float, matrix: PackedMatrix, normed: F32, out: F32) -> None:
        self.rms_norm(x, norm, eps, normed)
        self.linear(normed, matrix, out)

    def norm_linear_silu_mul(self, x: F32, norm: F32, eps: float, matrix: PackedMatrix, normed: F32, work: F32, out: F32) -> None:
        self.rms_norm(x, norm, eps, normed)
        self.linear_silu_mul(normed, matrix, work, out)

    def head_rms_norm(self, qkv: F32, q_weight: F32, k_weight: F32, num_heads: int, num_kv_heads: int, eps: float) -> None:
        _expect(qkv.shape[1] == (num_heads + 2 * num_kv_heads) * len(q_weight) and len(k_weight) == len(q_weight), "head_rms_norm", qkv)
        words = qkv, _stride(qkv), q_weight, k_weight, float_word(eps), len(q_weight), num_heads, num_kv_heads
        self._do(address("head_rms_norm"), len(qkv), words, qkv.size)

    def rope_and_cache(
        self, qkv: F32, cos: F32, sin: F32, batch: CpuBatch, num_heads: int, key_cache: U8, value_cache: U8
    ) -> None:
        kv_heads, head_dim = key_cache.shape[1], 2 * cos.shape[1]
        self._join(batch, len(qkv))
        self._expect_cache(key_cache, value_cache, batch, head_dim)
        _expect(qkv.shape[1] == (num_heads + 2 * kv_heads) * head_dim and min(len(cos), len(sin)) >= batch.limits.positions, "rope_and_cache", qkv)
        _stride(qkv)
        words = cpu_cache.rope_and_cache_words(qkv, cos, sin, batch, num_heads, key_cache, value_cache)
        self._do(address("rope_and_cache", self._kv_kind.index), len(qkv), words, qkv.size)

    def attention(
        self, qkv: F32, key_cache: U8, value_cache: U8, batch: CpuBatch, num_heads: int, scale: float, window: int, out: F32
    ) -> None:
        kv_heads, head_dim, limits = key_cache.shape[1], out.shape[1] // num_heads, batch.limits
        self._join(batch, len(out))
        self._expect_cache(key_cache, value_cache, batch, head_dim)
        _expect(qkv.shape == (len(out), (num_heads + 2 * kv_heads) * head_dim) and num_heads % kv_heads == 0, "attention", qkv)
        if limits.window and not 1 <= window <= limits.window:
            raise InvariantError(f"attention over a window of {window} would look behind the batch's {limits.window}")
        self._crew.reserve(cpu_paged_attention.scratch_bytes(num_heads // kv_heads, head_dim))
        _stride(qkv), _stride(out)
        words = cpu_paged_attention.words(self._kv_kind, qkv, key_cache, value_cache, batch, num_heads, scale, window, out)
        self._do(address("attention"), len(out), words, len(out) * 1000)

    def _expect_cache(self, key_cache: U8, value_cache: U8, batch: CpuBatch, head_dim: int) -> None:
        size = cpu_cache.block_bytes(self._kv_kind, batch.limits.block_size, head_dim)
        shape = key_cache.shape
        fits = shape == value_cache.shape and shape[0] >= batch.limits.num_blocks and shape[2] == size
        _expect(fits and key_cache.flags.c_contiguous and value_cache.flags.c_contiguous, "the cache", key_cache)

    def gather_rows(self, x: F32, rows: I32, out: F32) -> None:
        check_within("row", rows, 0, len(x))
        _expect(out.shape == (len(rows), x.shape[1]), "gather_rows", x)
        self._do(address("gather_rows"), len(rows), (x, _stride(x), rows, x.shape[1], out, _stride(out)), out.size)

    # ---- sampling

    def set_history(self, row_id: int, prompt_ids: I32, output_ids: I32) -> None:
        self._counts.set_history(row_id, prompt_ids, output_ids)

    def sample(self, logits: F32, batch: SamplingBatch, out: I32 | None = None) -> I32:
        return put(self._sampler.sample(logits, batch), out)

    def likeliest(self, logits: F32, out: I32) -> None:
        _expect(out.shape == logits.shape[:1] and out.flags.c_contiguous, "likeliest", logits)
        self._do(address("greedy_rows"), len(logits), (logits, _stride(logits), logits.shape[1], out), logits.size)
        if self._record is None:
            cpu_sampling.raise_for_refused_rows(logits, out)

    def token_logprobs(self, logits: F32, token_ids: I32, k: int) -> tuple[F32, I32, I32, F32]:
        return cpu_sampling.token_logprobs(logits, token_ids, k, self._crew)

    def beam_candidates(self, logits: F32, k: int) -> tuple[I32, F32]:
        return cpu_sampling.beam_candidates(logits, k, self._crew)

    # ---- cache maintenance

    def copy_blocks(self, key_cache: U8, value_cache: U8, pairs: I32) -> None:
        check_block_pairs(pairs, key_cache.shape[1], key_cache.shape[1], within_one_pool=True)
        for stored in (key_cache, value_cache):
            cpu_cache.copy_blocks(stored, stored, pairs)

    def swap_blocks(self, source: tuple[U8, U8], target: tuple[U8, U8], pairs: I32) -> None:
        check_block_pairs(pairs, source[0].shape[1], target[0].shape[1], within_one_pool=False)
        for source_cache, target_cache in zip(source, target, strict=True):
            cpu_cache.copy_blocks(source_cache, target_cache, pairs)


def _ready(matrix: PackedMatrix) -> PackedMatrix:
    """Its kernels are on their way, too, while other matrices are loaded."""
    for part in matrix.parts:
        cpu_code.prepare(kernels_over(part.kind))
    return matrix


def _look_ahead(table: Words) -> None:
    """Tell every product what the attention after it, if there is one, will read."""
    products = cpu_code.loaded("gemm")
    ahead = None
    for row in table[::-1]:
        if row[KERNEL] == address("attention"):
            ahead = cpu_paged_attention.ahead(row)
        elif ahead is not None and row[KERNEL] in products:
            row[cpu_gemm.AHEAD : cpu_gemm.AHEAD + len(ahead)] = ahead


def _stride(array: npt.NDArray[Any]) -> int:
    """Bytes from one row to the next. Raises InvariantError where the numbers of a row do not lie side by side."""
    _expect((array.ndim == 2 and array.strides[1] == array.itemsize) or array.shape[1] == 1, "an operation", array)
    return array.strides[0]


def _expect_rows(rows: int, of_batch: int) -> None:
    if rows != of_batch:
        raise InvariantError(f"an operation of {rows} rows reads a batch that holds {of_batch} rows")


def _expect(holds: bool, name: str, array: npt.NDArray[Any]) -> None:
    if not holds:
        raise InvariantError(f"{name}: an array of shape {array.shape} does not fit the others")
