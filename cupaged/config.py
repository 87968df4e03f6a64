"""Frozen configuration values: what a model is (ModelConfig) and how the engine runs it (EngineConfig).

Values only: nothing here reads a file or looks at the machine. Checkpoint readers fill ModelConfig in; the command
line, the environment and Python callers fill EngineConfig in. `None` in an EngineConfig means "decide from the model
and the machine", which `engine.py` does once, at start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from cupaged.errors import ConfigError, UnsupportedModelError, shown

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
MAX_LAYERS = 10_000
"""More than any model has; a damaged number above it is refused before anything is sized by it."""

LARGEST_INT = 2**31 - 1
"""Blocks, rows and positions are int32 in a batch."""

_MOST_THREADS = 1024

ROPE_SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, arXiv 2104.09864) and the scaling of its frequencies.

    `scaling` is one of ROPE_SCALINGS; the fields below it mean what the Hugging Face field of the same name means.
    `freq_factors` (GGUF `rope_freqs.weight`), one per pair of dimensions, divide the default frequencies and exclude
    any other scaling.
    """

    theta: float = 10000.0
    scaling: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    freq_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.scaling not in ROPE_SCALINGS:
            raise UnsupportedModelError(f"RoPE scaling {self.scaling!r} is not supported; one of {', '.join(ROPE_SCALINGS)} is")
        if not (self.theta > 0 and math.isfinite(self.theta)):
            raise UnsupportedModelError(f"rope theta must be a positive number, not {self.theta}")
        for name in ("factor", "beta_fast", "beta_slow"):
            if not 1 / LARGEST_INT <= getattr(self, name) <= LARGEST_INT:
                raise UnsupportedModelError(f"RoPE scaling's {name} must be a positive number below 2**31, not {getattr(self, name)}")
        if self.original_max_position is not None and self.original_max_position < 1:
            raise UnsupportedModelError(f"RoPE's original context must be at least 1 token, not {self.original_max_position}")
        if not all(0 < f < math.inf for f in self.freq_factors or ()):
            raise UnsupportedModelError("RoPE frequency factors must be positive numbers")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama-family decoder.

    `layer_windows[i]` is the sliding window of layer i in tokens, 0 for full attention; an empty tuple means full
    attention everywhere. A query at position p sees keys at positions p - window + 1 .. p.
    `eos_token_ids` may be empty (a base model that never stops by itself).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[int, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"architecture {self.architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
            )
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_position"):
            if getattr(self, name) < 1:
                raise UnsupportedModelError(f"the model's {name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.rms_norm_eps < math.inf:
            raise UnsupportedModelError(f"the model's rms_norm_eps must be a small positive number, not {self.rms_norm_eps}")
        if self.num_layers > MAX_LAYERS:
            raise UnsupportedModelError(f"{self.num_layers} layers: a model has at most {MAX_LAYERS}")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads: not a multiple"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim must be even for rotary embeddings, not {self.head_dim}")
        if self.layer_windows and len(self.layer_windows) != self.num_layers:
            raise UnsupportedModelError(f"{len(self.layer_windows)} layer windows for {self.num_layers} layers")
        for window in self.layer_windows:
            if not 0 <= window <= LARGEST_INT:
                raise UnsupportedModelError(f"a sliding window of {shown(window)} tokens: it must be 1 to {LARGEST_INT}, or 0 for none")

    @property
    def longest(self) -> int:
        """Most tokens the position encoding can be asked for: max_position, which dynamic NTK stretches by its factor."""
        return int(self.max_position * self.rope.factor) if self.rope.scaling == "dynamic" else self.max_position

    @property
    def window_of_all(self) -> int:
        """What no layer looks beyond: the largest window, or 0 where some layer has full attention."""
        return 0 if not self.layer_windows or min(self.layer_windows) == 0 else max(self.layer_windows)

    def window(self, layer: int) -> int:
        """Sliding window of a layer in tokens; 0 is full attention."""
        return self.layer_windows[layer] if self.layer_windows else 0

    def kv_bytes_per_token(self, kv_cache_dtype: str = "float32") -> int:
        """Bytes that one token's keys and values take: 2 x layers x KV heads x head_dim x bytes of one number (auto: 4).

        In int8 every head's key and value has a float32 scale beside it.
        """
        if kv_cache_dtype == "int8":
            head = self.head_dim + 4
        else:
            head = self.head_dim * {"float16": 2, "bfloat16": 2, "fp8": 1}.get(kv_cache_dtype, 4)
        return 2 * self.num_layers * self.num_kv_heads * head


# Every value of an option.
_CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": ("auto", "float32", "float16", "bfloat16", "int8"),
    "kv_cache_dtype": ("auto", "float32", "float16", "bfloat16", "int8", "fp8"),
    "queue": ("fcfs", "lpm", "dfs"),
    "eviction": ("lru", "fifo", "lfu", "weighted"),
    "preemption": ("recompute", "swap", "auto"),
}

# What a device computes with, where that is not everything: (dtype, kv_cache_dtype).
_CPU_TYPES = (("auto", "float32", "float16", "bfloat16", "int8"), ("auto", "float32", "float16", "bfloat16", "int8"))
_KERNEL_TYPES = (("auto", "float32", "float16", "bfloat16"), ("auto", "float32", "float16", "bfloat16", "fp8"))
_DEVICE_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "auto": (_CPU_TYPES[0], (*_CPU_TYPES[1], "fp8")),
    "cpu": _CPU_TYPES,
    "reference": (("auto", "float32"), ("auto", "float32")),
    "emu": _KERNEL_TYPES,
    "cuda": _KERNEL_TYPES,
}

_STEP_SIZES = ((512, 64), (2048, 256))
"""Tokens and sequences of a step by default: on a CPU a step is the time a user waits for, a GPU wants more to be busy."""


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs. None: decided from the model and the machine.

    device                  cuda or cuda:1 (an NVIDIA GPU), cpu, reference (the plain NumPy definition of every operation:
                            slow, exact), emu (the CUDA kernels on the CPU, through an emulator: very slow, for small models), or
                            auto: a GPU if one is there and a kernel ran on it, else the CPU
    dtype                   storage of the weights. auto: as in the checkpoint (emu: float32; cuda: bfloat16 for quantised blocks);
                            int8: quantised while loading (a scale per 32 weights), but blocks that are quantised already stay.
                            On emu and cuda the activations', too
    kv_cache_dtype          storage of keys and values; auto: as the activations, float32 on a CPU. int8 on a CPU only, fp8
                            (e4m3) on emu and cuda only
    block_size              tokens per KV block, 1..256
    num_blocks              KV blocks in the pool; else from kv_cache_memory; else from the machine's free memory
    kv_cache_memory         bytes for the pool
    max_model_len           longest sequence, prompt and output together; default the model's
    max_num_batched_tokens  tokens computed in one step, over all sequences (default 2048 on a GPU, else 512)
    max_num_seqs            sequences computed in one step (default 256 on a GPU, else 64). Where only one of these two is given,
                            the other is never in its way
    prefix_cache            keep computed blocks until the pool needs them, and reuse equal prefixes
    queue                   who is served next: fcfs (first come), lpm (longest cached prefix), dfs (depth first in the
                            prefix tree); nobody is passed over for ever
    eviction                which cached block goes first: lru, fifo, lfu, or weighted (deep and seldom used first)
    preemption              what happens to a request that gives its blocks up: recompute its KV later, swap it to host
                            memory, or auto (swap where recomputing would take more than one step)
    swap_space              bytes of host memory for swapping (default 1 GiB where preemption is not recompute)
    threads                 CPU threads; default the cores this process may use
    pin_threads             keep each of them on a core of its own while it computes, where the system moves them about
    gpu_memory_utilization  share of the GPU's memory that the engine may take, weights and pool together (default 0.9)
    overlap                 plan the next step while the device computes, before the tokens of the one in flight are known: the same
                            tokens, sooner. Default: where the device works by itself (cuda); for emu it is a test
    enforce_eager           emu and cuda: launch the kernels of a decode step one by one, where otherwise a captured graph is replayed
    batch_invariant         refuse a device whose logits are not the same bits in any batch, chunks and number of threads
    """

    device: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    prefix_cache: bool = True
    queue: str = "fcfs"
    eviction: str = "lru"
    preemption: str = "recompute"
    swap_space: int | None = None
    threads: int | None = None
    pin_threads: bool = False
    gpu_memory_utilization: float = 0.9
    overlap: bool | None = None
    enforce_eager: bool = False
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, not {shown(getattr(self, name))}")
        kind = _device_kind(self.device)
        for name, known in zip(("dtype", "kv_cache_dtype"), _DEVICE_TYPES[kind], strict=True):
            if getattr(self, name) not in known:
                raise ConfigError(f"device {self.device} has no {name} {getattr(self, name)}; it has {', '.join(known)}")
        for name in ("prefix_cache", "pin_threads", "enforce_eager", "batch_invariant", "overlap"):
            if not isinstance(getattr(self, name), bool) and (name, self.overlap) != ("overlap", None):
                raise ConfigError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if self.overlap and kind in ("cpu", "reference"):
            raise ConfigError(f"device {self.device} computes in the host's own time, so nothing can overlap with it: leave overlap out, or take cuda")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, not {shown(share)}")
        _check_range("block_size", self.block_size, 1, 256)
        for name, most in (
            *(("num_blocks", LARGEST_INT), ("kv_cache_memory", None), ("max_model_len", LARGEST_INT), ("threads", _MOST_THREADS)),
            *(("max_num_batched_tokens", LARGEST_INT), ("max_num_seqs", LARGEST_INT)),
        ):
            if getattr(self, name) is not None:
                _check_range(name, getattr(self, name), 1, most)
        if self.swap_space is not None:
            _check_range("swap_space", self.swap_space, 0, None)
        if self.step_tokens < self.step_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.step_tokens}) must be at least max_num_seqs"
                f" ({self.step_seqs}), so that every running sequence gets a token in every step"
            )

    @property
    def device_kind(self) -> str:
        """The device, whichever GPU it is."""
        return _device_kind(self.device)

    @property
    def step_tokens(self) -> int:
        """max_num_batched_tokens, or the device's default; auto has the CPU's."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(_STEP_SIZES[self.device_kind == "cuda"][0], self.max_num_seqs or 0)

    @property
    def step_seqs(self) -> int:
        """max_num_seqs, or the device's default; auto has the CPU's."""
        return min(_STEP_SIZES[self.device_kind == "cuda"][1], self.step_tokens) if self.max_num_seqs is None else self.max_num_seqs

    @property
    def stored_kv(self) -> str:
        """The type of keys and values in the pool, with `auto` resolved: it is the activations'."""
        of_kernels = self.dtype if self.device_kind in ("emu", "cuda") and self.dtype != "auto" else "float32"
        return of_kernels if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Build from keyword options, naming an unknown one and those that exist. Raises ConfigError."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError(f"unknown engine option {name!r}; the options are {', '.join(known)}")
        return cls(**options)


def _device_kind(device: object) -> str:
    """The device without its number. Raises ConfigError for one that there is not."""
    kind, _, number = device.partition(":") if isinstance(device, str) else ("", "", "")
    if kind not in _DEVICE_TYPES or (number and not (kind == "cuda" and number.isdecimal() and len(number) < 4)) or device != f"{kind}:{number}".rstrip(":"):
        raise ConfigError(f"device must be one of {', '.join(_DEVICE_TYPES)} or cuda:1 for the second GPU, not {shown(device)}")
    return kind


def _check_range(name: str, value: object, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number, not {shown(value)}")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ConfigError(f"{name} must be {bound}, not {shown(value)}")
