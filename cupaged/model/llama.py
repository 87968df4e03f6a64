"""The forward pass of a Llama-family decoder (arXiv 2302.13971), over Backend operations on a fixed set of buffers.

    hidden = embedding(tokens)
    for every layer:
        hidden += output(attention(rope(qkv(rms_norm(hidden)))))
        hidden += down(silu(gate) * up)         of rms_norm(hidden)
    logits = head(rms_norm(hidden))             for the rows that are asked for, as is what follows the last attention

Nothing here allocates and nothing here knows a block: a backend records the calls once and replays them every step.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from cupaged.backends.base import Array, Backend, Batch
from cupaged.config import ModelConfig
from cupaged.model.kv_store import KVStore
from cupaged.model.weights import LayerWeights, LlamaWeights


@dataclass(frozen=True, slots=True)
class Buffers:
    """Activations of a step [rows, width], in the backend's type; allocated once for the largest step."""

    hidden: Array
    normed: Array
    qkv: Array
    attention: Array
    gate_up: Array
    activated: Array

    @classmethod
    def allocate(cls, backend: Backend, config: ModelConfig, rows: int) -> Buffers:
        heads = config.num_heads * config.head_dim
        widths = {
            "hidden": config.hidden_size,
            "normed": config.hidden_size,
            "qkv": heads + 2 * config.num_kv_heads * config.head_dim,
            "attention": heads,
            "gate_up": 2 * config.intermediate_size,
            "activated": config.intermediate_size,
        }
        return cls(**{name: backend.empty((rows, width), backend.activations) for name, width in widths.items()})

    def first(self, rows: int) -> Buffers:
        """The same memory, cut to a step's rows."""
        return Buffers(*(getattr(self, f.name)[:rows] for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Llama:
    """A loaded model: its shape, its weights, and the rotary tables (float32 [max_model_len, head_dim / 2])."""

    config: ModelConfig
    weights: LlamaWeights
    cos: Array
    sin: Array


def forward(ops: Backend, model: Llama, kv: KVStore, batch: Batch, b: Buffers) -> None:
    """Compute all rows of a step: b.hidden becomes the hidden states [T, E] behind the last layer. K and V go to `kv`."""
    attend(ops, model, kv, batch, b)
    finish(ops, model, b)


def attend(ops: Backend, model: Llama, kv: KVStore, batch: Batch, b: Buffers) -> None:
    """All rows of a step up to the last layer's attention, which b.attention holds. What follows it concerns no other row, so
    it is computed for the rows only whose logits are wanted (`finish`)."""
    config, weights = model.config, model.weights
    heads, eps, scale = config.num_heads, config.rms_norm_eps, config.head_dim**-0.5

    ops.embedding(weights.embedding, batch, out=b.hidden)
    for i, layer in enumerate(weights.layers):
        if i > 0:
            _behind_attention(ops, weights.layers[i - 1], eps, b)
        key, value = kv.layer(i)
        ops.norm_linear(b.hidden, layer.input_norm, eps, layer.qkv, normed=b.normed, out=b.qkv)
        if layer.q_norm is not None:
            ops.head_rms_norm(b.qkv, layer.q_norm, layer.k_norm, heads, config.num_kv_heads, eps)
        ops.rope_and_cache(b.qkv, model.cos, model.sin, batch, heads, key, value)
        ops.attention(b.qkv, key, value, batch, heads, scale, config.window(i), out=b.attention)


def finish(ops: Backend, model: Llama, b: Buffers) -> None:
    """What follows the last layer's attention: of any rows' b.hidden and b.attention."""
    _behind_attention(ops, model.weights.layers[-1], model.config.rms_norm_eps, b)


def _behind_attention(ops: Backend, layer: LayerWeights, eps: float, b: Buffers) -> None:
    ops.linear_add(b.attention, layer.output, out=b.hidden)
    ops.norm_linear_silu_mul(b.hidden, layer.post_norm, eps, layer.gate_up, normed=b.normed, work=b.gate_up, out=b.activated)
    ops.linear_add(b.activated, layer.down, out=b.hidden)


def head(ops: Backend, model: Llama, hidden: Array, normed: Array, logits: Array) -> None:
    """The logits [R, V] of rows of hidden states [R, E]; `normed` [R, E] is memory to use."""
    weights = model.weights
    ops.norm_linear(hidden, weights.final_norm, model.config.rms_norm_eps, weights.lm_head, normed=normed, out=logits)
