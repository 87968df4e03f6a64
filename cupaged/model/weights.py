"""LlamaWeights: a checkpoint's tensors in the backend's layout, after a check of every name and shape.

Queries, keys and values are fused into one matrix, gate and up into another: two wide products instead of five.
Nothing is loaded before the whole list has been checked, so a wrong model fails at once and says all that is wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from cupaged.backends.base import Array, Backend, Embedding, Matrix
from cupaged.checkpoint.base import Checkpoint
from cupaged.checkpoint.stored_tensor import UnreadableTensor
from cupaged.config import ModelConfig
from cupaged.errors import CheckpointError
from cupaged.tensor_source import TensorSource

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"

# tensors that some checkpoints carry and no forward pass needs: tables and masks that are computed
_HARMLESS = re.compile(r"(.*\.)?(rotary_emb\.(inv_freq|cos_cached|sin_cached)|attn\.(bias|masked_bias)|attn_rot_embd\.weight)")

_NAMED = 4
"""Faults that an error names one by one; the rest is counted."""


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One decoder layer; shapes before packing, with E hidden, F intermediate, D head_dim, H and K heads.

    input_norm, post_norm [E]   qkv [(H + 2K) * D, E]   output [E, H * D]   gate_up [2F, E], gate first   down [E, F]
    q_norm, k_norm [D], or None where the model does not normalise its heads
    """

    input_norm: Array
    qkv: Matrix
    output: Matrix
    post_norm: Array
    gate_up: Matrix
    down: Matrix
    q_norm: Array | None
    k_norm: Array | None


@dataclass(frozen=True, eq=False)
class LlamaWeights:
    """A whole model. With tied embeddings `lm_head` is the very object `embedding`."""

    embedding: Embedding
    layers: tuple[LayerWeights, ...]
    final_norm: Array
    lm_head: Matrix


def load_weights(checkpoint: Checkpoint, backend: Backend, progress: Callable[[int, int], None] | None = None) -> LlamaWeights:
    """Check all tensors against the config, then hand them to the backend one by one.

    `progress(done, total)` is called after each, in stored values. A head stored beside tied embeddings is ignored, as
    transformers does. The checkpoint's files are closed afterwards. Raises CheckpointError naming missing and unknown tensors
    and those of a wrong shape or type.
    """
    config = checkpoint.config
    shapes = expected_shapes(config)
    _check(checkpoint, shapes)
    loader = _Loader(checkpoint, backend, progress, sum(math.prod(shape) for shape in shapes.values()))
    with closing(checkpoint):
        embedding = loader.embedding(tied=config.tie_word_embeddings)
        return LlamaWeights(
            embedding=embedding,
            layers=tuple(_load_layer(loader, config, f"model.layers.{i}.") for i in range(config.num_layers)),
            final_norm=loader.vector(FINAL_NORM),
            lm_head=embedding if config.tie_word_embeddings else loader.matrix([LM_HEAD]),
        )


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this config needs, by its Hugging Face name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = {
        "self_attn.q_proj": ((heads, hidden), config.qkv_bias),
        "self_attn.k_proj": ((kv_heads, hidden), config.qkv_bias),
        "self_attn.v_proj": ((kv_heads, hidden), config.qkv_bias),
        "self_attn.o_proj": ((hidden, heads), config.output_bias),
        "mlp.gate_proj": ((inner, hidden), config.mlp_bias),
        "mlp.up_proj": ((inner, hidden), config.mlp_bias),
        "mlp.down_proj": ((hidden, inner), config.mlp_bias),
    }
    vectors = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        vectors |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}.weight": (length,) for name, length in vectors.items()}
        shapes |= {f"{prefix}{name}.weight": shape for name, (shape, _) in matrices.items()}
        shapes |= {f"{prefix}{name}.bias": shape[:1] for name, (shape, bias) in matrices.items() if bias}
    return shapes


def _check(checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]]) -> None:
    tensors = checkpoint.tensors
    faults = [f"missing {name}" for name in shapes if name not in tensors]
    faults += [
        f"{name} is stored as {tensors[name].storage}, which is not supported"
        for name in shapes
        if isinstance(tensors.get(name), UnreadableTensor)
    ]
    faults += [
        f"{name} has shape {list(tensors[name].shape)}, not {list(shape)}"
        for name, shape in shapes.items()
        if name in tensors and tensors[name].shape != shape
    ]
    ignored = {LM_HEAD} if checkpoint.config.tie_word_embeddings else set()
    faults += [f"unknown {name}" for name in tensors if name not in shapes and name not in ignored and not _HARMLESS.fullmatch(name)]
    if faults:
        more = f" and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        raise CheckpointError(f"{checkpoint.path} does not fit its config: {'; '.join(faults[:_NAMED])}{more}")


def _load_layer(loader: _Loader, config: ModelConfig, prefix: str) -> LayerWeights:
    attention = prefix + "self_attn."
    mlp = prefix + "mlp."
    return LayerWeights(
        input_norm=loader.vector(f"{prefix}input_layernorm.weight"),
        qkv=loader.matrix([f"{attention}{part}_proj.weight" for part in "qkv"], bias=config.qkv_bias),
        output=loader.matrix([f"{attention}o_proj.weight"], bias=config.output_bias),
        post_norm=loader.vector(f"{prefix}post_attention_layernorm.weight"),
        gate_up=loader.gate_up(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight", bias=config.mlp_bias),
        down=loader.matrix([f"{mlp}down_proj.weight"], bias=config.mlp_bias),
        q_norm=loader.vector(f"{attention}q_norm.weight") if config.qk_norm else None,
        k_norm=loader.vector(f"{attention}k_norm.weight") if config.qk_norm else None,
    )


class _Loader:
    """Hands named tensors to the backend and counts the values that have passed."""

    def __init__(self, checkpoint: Checkpoint, backend: Backend, progress: Callable[[int, int], None] | None, total: int) -> None:
        self._tensors = checkpoint.tensors
        self._backend = backend
        self._progress = progress
        self._done = 0
        self._total = total

    def matrix(self, names: Sequence[str], bias: bool = False) -> Matrix:
        parts, biases = self._parts(names, bias)
        packed = self._backend.load_matrix(parts, biases)
        self._count(parts + (biases or []))
        return packed

    def gate_up(self, gate: str, up: str, bias: bool) -> Matrix:
        parts, biases = self._parts([gate, up], bias)
        packed = self._backend.load_gate_up(parts[0], parts[1], biases)
        self._count(parts + (biases or []))
        return packed

    def _parts(self, names: Sequence[str], bias: bool) -> tuple[list[TensorSource], list[TensorSource] | None]:
        """The matrices of these names, and the biases that belong to them."""
        biases = [self._tensors[name.removesuffix("weight") + "bias"] for name in names] if bias else None
        return [self._tensors[name] for name in names], biases

    def vector(self, name: str) -> Array:
        packed = self._backend.load_vector(self._tensors[name])
        self._count([self._tensors[name]])
        return packed

    def embedding(self, *, tied: bool) -> Embedding:
        packed = self._backend.load_embedding(self._tensors[EMBEDDING], tied=tied)
        self._count([self._tensors[EMBEDDING]])
        return packed

    def _count(self, sources: Sequence[TensorSource]) -> None:
        self._done += sum(math.prod(source.shape) for source in sources)
        if self._progress is not None:
            self._progress(self._done, self._total)
