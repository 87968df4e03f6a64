"""The operations a backend offers and their shape contracts. `reference.py` is their definition.

The forward pass (model/llama.py) calls these on buffers that it got from `empty`, always through `out`. It is recorded
once (`record`) and replayed every step; what changes from step to step is the number of rows and the content of a
`Batch`. `Array` is whatever the backend computes on (NumPy here, a device array elsewhere); only `upload`, `set_batch`
and `download` cross over.

Names used in shapes: T tokens of the step (rows), S sequences, R rows whose logits are wanted, V vocabulary,
H query heads, K key/value heads, D head_dim, E hidden size, F intermediate size, B blocks in the pool, P block_size.
Activations are of the backend's own type (`Backend.activations`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cupaged.backends.download import Download
from cupaged.tensor_source import TensorSource

Array = Any
Matrix = Any
"""A packed weight matrix [out, in] with its optional bias; only the backend that made it knows the layout."""
Embedding = Any
"""A packed token table [V, E]; where a model ties its head, the same object also serves `linear`."""
Cache = Any
"""Keys or values of one layer (or of all: indexed by layer) for every slot of the pool. Only the backend knows the layout;
blocks are contiguous and keep their number."""
Batch = Any
"""A step's token ids and AttentionBatch where the backend's operations read them, made by `new_batch`."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """Where each row of a step reads and writes the paged cache; NumPy arrays.

    Rows are sorted: the first `num_decode` sequences have one row each, the others one or more.

    positions      int32 [T]       position of each row in its sequence
    slots          int64 [T]       block * block_size + offset where the row's K and V go; -1: a padded lane, written nowhere
    block_tables   int32 [S, max_blocks]   unused entries -1
    query_start    int32 [S + 1]   rows of sequence s are query_start[s] .. query_start[s + 1]
    context_lens   int32 [S]       tokens of context including this step's; 0: a padded lane, its output rows are zeros
    num_decode     sequences with exactly one row, all before the others
    max_context    the largest of context_lens
    """

    positions: Array
    slots: Array
    block_tables: Array
    query_start: Array
    context_lens: Array
    num_decode: int
    max_context: int


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The largest step that a Batch holds, and the bounds of everything its numbers point into.

    rows, sequences, table_width    of the arrays of an AttentionBatch
    vocab_size, positions           token ids and positions are below these
    num_blocks, block_size, num_kv_heads, head_dim    of the pool
    window                          blocks that lie wholly further back from their first row may be missing (-1); 0: none
    """

    rows: int
    sequences: int
    table_width: int
    vocab_size: int
    positions: int
    num_blocks: int
    block_size: int
    num_kv_heads: int = 1
    head_dim: int = 64
    window: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """Sampling parameters of R rows as NumPy arrays (the backend uploads what it needs). A value: a backend knows an array again,
    and nobody writes to one.

    temperature, top_p, min_p   float32 [R]; temperature 0 is greedy
    top_k                       int32 [R]; 0: all
    repetition, presence, frequency  float32 [R]; neutral at 1, 0, 0
    seeds                       uint64 [R]
    positions, indices          int32 [R]: absolute position of the token to choose, index within the request
    row_ids                     int32 [R]: the row of the penalty counts
    bias_start                  int32 [R + 1]; entries bias_start[r] .. bias_start[r + 1] of
    bias_ids, bias_values       int32, float32 [N]: numbers added to row r's logits; -inf bans the token
    penalised                   bool [R]: whether the row has penalties (its counts are kept up)
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    repetition: npt.NDArray[np.float32]
    presence: npt.NDArray[np.float32]
    frequency: npt.NDArray[np.float32]
    seeds: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.int32]
    indices: npt.NDArray[np.int32]
    row_ids: npt.NDArray[np.int32]
    bias_start: npt.NDArray[np.int32]
    bias_ids: npt.NDArray[np.int32]
    bias_values: npt.NDArray[np.float32]
    penalised: npt.NDArray[np.bool_]

    @property
    def num_rows(self) -> int:
        return len(self.temperature)


class Backend(Protocol):
    """A device that holds weights and KV blocks and computes the operations of a step.

    Operations read their inputs and write `out` in full (all of it, and nothing else); `out` never overlaps an input
    unless the operation says "in place". None of them allocates memory that outlives the call, apart from the ones
    that load or create, and what sampling keeps to use again. The penalty counts are the only state that operations keep between calls.
    """

    name: str
    activations: np.dtype[Any]
    """The type of the forward pass's arrays; logits are float32."""
    asynchronous: bool
    """Whether it computes while the host goes on."""

    batch_invariant: bool
    """Whether a row's results are the same bits in any company, chunks and number of threads, always and without a price."""

    # ---- memory

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An uninitialised array."""
        ...

    def upload(self, array: npt.NDArray[Any]) -> Array:
        """A device array with the content of a host array (which must not be changed until the step has run)."""
        ...

    def download(self, array: Array) -> npt.NDArray[Any]:
        """A host array with the content of a device array; waits for the operations that write it."""
        ...

    def download_later(self, array: Array) -> Download:
        """The same without waiting; operations that are asked for later may overwrite the array."""
        ...

    def memory(self) -> tuple[int, int] | None:
        """(free, total) bytes of the device's own memory; None where it computes in the host's."""
        ...

    # ---- steps

    def new_batch(self, limits: BatchLimits, chosen: Array | None = None) -> Batch:
        """Memory for the rows of one step, at fixed addresses. `chosen` int32 [any]: where steps may find tokens."""
        ...

    def set_batch(
        self, batch: Batch, token_ids: npt.NDArray[np.int32], attention: AttentionBatch, sources: npt.NDArray[np.int32] | None = None
    ) -> None:
        """Give a batch the rows of the next step; token_ids int32 [T]. Where sources[t] (int32 [T]) is not negative, row t's
        token is what chosen[sources[t]] will hold when the step runs.

        Everything is checked here, so that no operation has to: raises InvariantError, and leaves the batch as it was,
        for a number outside the limits, or a context that its block table does not cover.
        """
        ...

    def record(self, build: Callable[[int], None], rows: int) -> Callable[[int], None]:
        """The operations that `build(rows)` calls, as a function that runs them for any number of rows from 1 to `rows`.

        `build` may be called at once, later, or both; it must do the same every time. Every operation in it has that
        number of rows. The arrays that it uses belong to the record: they keep their place for as long as it lives.
        """
        ...

    # ---- weights: the backend owns their layout

    def load_matrix(self, parts: Sequence[TensorSource], bias: Sequence[TensorSource] | None = None) -> Matrix:
        """Pack [out_i, in] tensors, stacked along `out`, with an optional bias stacked likewise ([out_i] each)."""
        ...

    def load_gate_up(self, gate: TensorSource, up: TensorSource, bias: Sequence[TensorSource] | None = None) -> Matrix:
        """Pack the two matrices of `linear_silu_mul`, each [F, in], with their optional biases ([F] each)."""
        ...

    def load_vector(self, source: TensorSource) -> Array:
        """A 1-d tensor (a norm's weight) as float32."""
        ...

    def load_embedding(self, source: TensorSource, *, tied: bool) -> Embedding:
        """The token table [V, E]. `tied`: it will also be used as the matrix of `linear`."""
        ...

    def new_kv_cache(self, num_layers: int, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> tuple[Cache, Cache]:
        """Key and value pools of all layers, uninitialised (possibly NaN); pool[i] is the cache of layer i."""
        ...

    def new_swap_space(self, num_layers: int, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> tuple[Cache, Cache]:
        """The same in host memory, for the blocks of preempted requests."""
        ...

    # ---- the forward pass

    def embedding(self, table: Embedding, batch: Batch, out: Array) -> None:
        """out[t] = table[the batch's token t]; out [T, E]."""
        ...

    def linear(self, x: Array, matrix: Matrix, out: Array) -> None:
        """out = x @ W.T + bias; x [T, in], out [T, out]."""
        ...

    def linear_add(self, x: Array, matrix: Matrix, out: Array) -> None:
        """out += x @ W.T + bias, in place: a product and the residual connection around it."""
        ...

    def linear_silu_mul(self, x: Array, matrix: Matrix, work: Array, out: Array) -> None:
        """out = silu(x @ gate.T + its bias) * (x @ up.T + its bias); x [T, in], out [T, F].

        `matrix` is from `load_gate_up`; `work` [T, 2F] is memory that the operation may use.
        """
        ...

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        """out = x / sqrt(mean(x^2) + eps) * weight over the last axis; x, out [T, E] (arXiv 1910.07467)."""
        ...

    def norm_linear(self, x: Array, norm: Array, eps: float, matrix: Matrix, normed: Array, out: Array) -> None:
        """`linear` of `rms_norm` of x: x [T, in], norm float32 [in], out [T, out].

        `normed` [T, in] is memory that the operation may use.
        """
        ...

    def norm_linear_silu_mul(self, x: Array, norm: Array, eps: float, matrix: Matrix, normed: Array, work: Array, out: Array) -> None:
        """`linear_silu_mul` of `rms_norm` of x; x and `normed` as in `norm_linear`, the rest as in `linear_silu_mul`."""
        ...

    def head_rms_norm(self, qkv: Array, q_weight: Array, k_weight: Array, num_heads: int, num_kv_heads: int, eps: float) -> None:
        """Normalise each query and key head in place (Qwen3); qkv [T, (H + 2K) * D], weights [D]."""
        ...

    def rope_and_cache(
        self, qkv: Array, cos: Array, sin: Array, batch: Batch, num_heads: int, key_cache: Cache, value_cache: Cache
    ) -> None:
        """Rotate queries and keys in place, then write keys and values to their slots.

        qkv [T, (H + 2K) * D]; cos, sin float32 [max_model_len, D / 2], gathered by position. Pairs are (i, i + D/2).
        key_cache, value_cache: one layer of the pool. A row with slot -1 writes nothing.
        """
        ...

    def attention(
        self, qkv: Array, key_cache: Cache, value_cache: Cache, batch: Batch, num_heads: int, scale: float, window: int, out: Array
    ) -> None:
        """Causal attention of every row over its sequence's blocks; out [T, H * D].

        The row at position p of a sequence sees positions max(0, p - window + 1) .. p (window 0: from 0). Query head
        h reads key/value head h // (H / K). Slots past the context are never used, whatever they hold. Rows of no sequence
        are zeros.
        """
        ...

    def gather_rows(self, x: Array, rows: Array, out: Array) -> None:
        """out[r] = x[rows[r]]; rows int32 [R]."""
        ...

    # ---- sampling: the model's last operation

    def set_history(self, row_id: int, prompt_ids: npt.NDArray[np.int32], output_ids: npt.NDArray[np.int32]) -> None:
        """Rebuild the penalty counts of a row."""
        ...

    def sample(self, logits: Array, batch: SamplingBatch, out: Array | None = None) -> Array:
        """Choose one token a row; logits [R, V] are destroyed; returns int32 [R] on the device: `out`, if given.

        In this order: bias (logit_bias, bans), penalties, temperature, min_p, top_k, top_p, then the inverse CDF over
        the kept tokens in token-id order with one uniform number from Philox4x32-10 (key = seed,
        counter = (position, index, 0, 0), u = ((x0 >> 8) + 0.5) * 2^-24). Rows with penalties count the chosen token.
        """
        ...

    def likeliest(self, logits: Array, out: Array) -> None:
        """The token that `sample` chooses at temperature 0 and without any bias or penalty, of every row: the lowest id of the
        largest logit, int32 [R]. Does not change the logits. May be recorded; then a row that nothing may be chosen from is
        marked (see checks.check_chosen) or refused."""
        ...

    def token_logprobs(self, logits: Array, token_ids: Array, k: int) -> tuple[Array, Array, Array, Array]:
        """log_softmax(logits) of the chosen tokens and of the k likeliest: (logprobs float32 [R], ranks int32 [R],
        top_ids int32 [R, k], top_logprobs float32 [R, k]). Does not change the logits. Equal logits: lower id first;
        a token's rank is 1 + the number of strictly larger logits."""
        ...

    def beam_candidates(self, logits: Array, k: int) -> tuple[Array, Array]:
        """The k likeliest next tokens of every row with their log_softmax, in the order of `token_logprobs`:
        (ids int32 [R, k], logprobs float32 [R, k]). Does not change the logits. A search of W beams wants k = 2W, so
        that W go on however many of them end (beams of a group are merged by the caller)."""
        ...

    # ---- cache maintenance

    def copy_blocks(self, key_cache: Cache, value_cache: Cache, pairs: npt.NDArray[np.int32]) -> None:
        """Copy whole blocks over all layers; pairs int32 [n, 2] (source, destination), destinations disjoint from sources."""
        ...

    def swap_blocks(
        self, source: tuple[Cache, Cache], target: tuple[Cache, Cache], pairs: npt.NDArray[np.int32]
    ) -> None:
        """Copy whole blocks over all layers between two (key, value) stores, the pool and the swap space, either way;
        pairs int32 [n, 2] (block of `source`, block of `target`), targets distinct.

        It may be done beside other work, but not so that a step whose `set_batch` comes after it, a copy or a download could
        tell."""
        ...
