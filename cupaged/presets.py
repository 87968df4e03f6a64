"""What well-known models and machines are like: the numbers that a plan and a simulation start from.

A ModelShape is what a model costs: its matrices are read and multiplied, its keys and values are kept. It also describes
models that this engine does not compute (OPT), because the papers measured them. A Device is what a data sheet says;
the two cores of `cpu` were measured.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from cupaged.config import ModelConfig
from cupaged.errors import ConfigError, shown

GiB = 1 << 30

BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "fp8": 1.0, "int8": 1.125}
"""Bytes of a stored weight; int8 has a float32 scale for every 32 weights."""

KV_TYPES = ("float32", "float16", "bfloat16", "fp8", "int8")


@dataclass(frozen=True)
class ModelShape:
    """A decoder as its cost is counted.

    mlp_matrices   2: up and down; 3: with a gate
    positions      learned position embeddings (0: rotary, which has no weights)
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    mlp_matrices: int = 3
    positions: int = 0
    tied: bool = False

    @classmethod
    def of(cls, name: str, config: ModelConfig) -> ModelShape:
        """The shape of a model that this engine computes."""
        return cls(
            name, config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers, config.num_heads,
            config.num_kv_heads, config.head_dim, config.longest, tied=config.tie_word_embeddings,
        )  # fmt: skip

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's matrices."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return attention + self.mlp_matrices * self.hidden_size * self.intermediate_size

    @property
    def head_weights(self) -> int:
        """Weights of the product that gives the logits."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights but norms and biases, which are a few in ten thousand."""
        embeddings = (1 if self.tied else 2) * self.head_weights + self.positions * self.hidden_size
        return self.num_layers * self.layer_weights + embeddings

    def flops(self, tokens: int, sampled: int, context: float) -> float:
        """Operations (a multiplication and an addition are two) to compute `tokens` tokens and the logits of `sampled`.

        context: tokens that they look at, summed over the tokens.
        """
        products = 2.0 * (tokens * self.num_layers * self.layer_weights + sampled * self.head_weights)
        return products + 4.0 * self.num_layers * self.num_heads * self.head_dim * context

    def kv_bytes_per_token(self, kv_cache_dtype: str) -> int:
        """2 (key and value) x layers x KV heads x head_dim x bytes of a number; int8 has a float32 scale for each head."""
        head = self.head_dim + 4 if kv_cache_dtype == "int8" else int(self.head_dim * BYTES[kv_cache_dtype])
        return 2 * self.num_layers * self.num_kv_heads * head


@dataclass(frozen=True)
class Device:
    """A machine.

    memory      bytes; None: what this computer has free
    bandwidth   bytes a second from its memory
    flops       operations a second of a large product in `dtype`, the type that it computes in (dense, not sparse)
    """

    name: str
    memory: int | None
    bandwidth: float
    flops: float
    dtype: str


# Configurations as published with the models; OPT: arXiv 2205.01068, table 1 (its learned positions start at 2).
MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("smollm2-135m", 49152, 576, 1536, 30, 9, 3, 64, 8192, tied=True),
        ModelShape("llama-3-8b", 128256, 4096, 14336, 32, 32, 8, 128, 8192),
        ModelShape("llama-3-70b", 128256, 8192, 28672, 80, 64, 8, 128, 8192),
        ModelShape("opt-13b", 50272, 5120, 20480, 40, 40, 40, 128, 2048, mlp_matrices=2, positions=2050, tied=True),
    )
}

# Vendors' data sheets: memory, its bandwidth, dense 16-bit tensor operations. What is sold as 24, 40 or 80 GB are GiB; the
# H200's 141 GB are taken at their word. `cpu`: two cores of an AMD Zen 3 with AVX2, measured (reads of 13 to 19 GB/s; a
# float32 product of 512 rows).
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("a100-40gb", 40 * GiB, 1.555e12, 312e12, "bfloat16"),
        Device("a100-80gb", 80 * GiB, 2.039e12, 312e12, "bfloat16"),
        Device("h100", 80 * GiB, 3.35e12, 989e12, "bfloat16"),
        Device("h200", 141_000_000_000, 4.8e12, 989e12, "bfloat16"),
        Device("rtx-4090", 24 * GiB, 1.008e12, 165e12, "bfloat16"),
        Device("cpu", None, 16e9, 122e9, "float32"),
    )
}

Value = TypeVar("Value")


def preset(kind: str, name: str, table: Mapping[str, Value]) -> Value:
    """A preset by name. Raises ConfigError naming those that there are."""
    if name in table:
        return table[name]
    close = difflib.get_close_matches(name.lower(), table, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(f"no {kind} preset {shown(name)}; {hint}there are {', '.join(table)}")
