"""Capacity: what a machine of some size does with a model, on paper and before anybody buys it.

    memory x utilisation - weights = pool    pool / bytes of a block = blocks    blocks / blocks a request = requests

Everything is per device: with tensor parallelism N each of the N devices has a share of the weights and of the KV heads.
The pool's requests are counted as allocators would: contiguous ones take a power of two of blocks (see cache/buddy.py),
for the longest context (max) or for the prompt and the answer rounded up to a power of two (pow2); paged ones take what
they fill. A full step is then timed by its three parts, and the largest of them is the bottleneck.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cupaged.artefact import Progress
from cupaged.cache.contiguous import power_of_two
from cupaged.checkpoint import open_checkpoint
from cupaged.checkpoint.hf_config import model_config
from cupaged.checkpoint.json_file import read_json
from cupaged.config import LARGEST_INT
from cupaged.errors import CheckpointError, ConfigError, shown
from cupaged.hub import ALIASES, resolve_config
from cupaged.memory import available_memory
from cupaged.presets import BYTES, KV_TYPES, MODELS, Device, ModelShape, preset

MEAN_PROMPT, MEAN_OUTPUT = 161, 338
"""Tokens of a ShareGPT request on average (arXiv 2309.06180, figure 11)."""


@dataclass(frozen=True)
class Wish:
    """What is asked for. None: the device's memory, the model's context, ShareGPT's mean lengths (less where they do not fit).

    memory         bytes of one device
    stored_bytes   of the checkpoint, where its own format is computed with (a quantised file on a CPU)
    """

    memory: int | None = None
    context: int | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    tensor_parallel: int = 1
    utilisation: float = 0.9
    mean_prompt: int | None = None
    mean_output: int | None = None
    stored_bytes: int | None = None


@dataclass(frozen=True)
class Way:
    """One way of laying a model out: `requests` of the whole context fit, paged; bytes are one device's."""

    gpus: int
    dtype: str
    weights_bytes: int
    pool_bytes: int
    requests: int


@dataclass(frozen=True)
class Capacity:
    """What was found. Bytes are one device's.

    dtype       of the weights; "stored": as they are on disk
    requests    by allocator, at once; "paged": on average, answers half written; "paged, longest": all fully grown
    seconds     of a step with `requests["paged"]` requests that generate: reading weights, reading KV, computing
    bottleneck  memory (reading the weights takes longest: more requests would share it), bandwidth or compute
    """

    model: str
    device: str
    parameters: int
    dtype: str
    kv_cache_dtype: str
    memory: int
    context: int
    block_size: int
    tensor_parallel: int
    mean_prompt: int
    mean_output: int
    weights_bytes: int
    kv_formula: str
    kv_bytes_per_token: int
    block_bytes: int
    context_bytes: int
    pool_bytes: int
    num_blocks: int
    requests: dict[str, int]
    seconds: dict[str, float]
    tokens_per_second: float
    bottleneck: str
    ways: tuple[Way, ...]

    @property
    def fits(self) -> bool:
        """Whether at least one request of the whole context does."""
        return self.num_blocks >= _blocks(self.context, self.block_size)

    def values(self) -> dict[str, Any]:
        """All of it by name, for JSON."""
        return asdict(self) | {"fits": self.fits}


def find_model(name: str, progress: Progress | None = None) -> tuple[ModelShape, int | None]:
    """The shape that a preset, folder, .gguf file, built-in model or hub id means, and its weights' bytes on disk.

    A folder may hold a config.json alone, and of a hub id no more is fetched. Raises ConfigError, HubError or CheckpointError.
    """
    if name in MODELS:
        return MODELS[name], None
    path = Path(os.path.expanduser(name))
    if not path.exists() and name not in ALIASES and "/" not in name and path.suffix != ".gguf":
        return preset("model", name, MODELS), None
    found = resolve_config(name, progress)
    files = [found] if found.is_file() else list(found.glob("*.safetensors"))
    if files:
        config = open_checkpoint(found).config
    elif (found / "config.json").is_file():
        config = model_config(found / "config.json", read_json(found / "config.json"), {})
    else:
        raise CheckpointError(f"{found} has no config.json, so it is no model's folder")
    title = found.stem if found.is_file() else found.resolve().name if path.exists() else name
    return ModelShape.of(title, config), sum(file.stat().st_size for file in files) or None


def capacity(model: ModelShape, device: Device, wish: Wish) -> Capacity:
    """What `device` does with `model`. A model that does not fit is an answer too; a wish that makes no sense is a ConfigError."""
    context, prompt, output = _lengths(model, wish)
    dtype, kv_dtype = _types(device, wish)
    memory = _memory(device, wish)
    _check(model, wish)
    gpus, size = wish.tensor_parallel, wish.block_size
    kv_bytes = model.kv_bytes_per_token(kv_dtype) // gpus
    stored = wish.stored_bytes if wish.dtype == "auto" and device.memory is None else None  # a CPU computes what is on disk
    weights = weights_bytes(model, dtype, gpus, stored)
    pool = max(0, int(memory * wish.utilisation) - weights)
    blocks = min(pool // (kv_bytes * size), LARGEST_INT)
    requests = _requests(blocks, size, context, prompt, output)
    seconds = _step_seconds(model, device, requests["paged"], prompt + output / 2, weights, kv_bytes, gpus)
    step = max(seconds["weights"] + seconds["kv"], seconds["compute"])
    longest = max(seconds, key=lambda part: seconds[part])
    return Capacity(
        model=model.name, device=device.name, parameters=model.num_parameters, dtype=dtype if stored is None else "stored", kv_cache_dtype=kv_dtype,
        memory=memory, context=context, block_size=size, tensor_parallel=gpus, mean_prompt=prompt, mean_output=output,
        weights_bytes=weights, kv_formula=_formula(model, kv_dtype, gpus), kv_bytes_per_token=kv_bytes,
        block_bytes=kv_bytes * size, context_bytes=kv_bytes * context, pool_bytes=pool, num_blocks=blocks,
        requests=requests, seconds=seconds, tokens_per_second=requests["paged"] / step,
        bottleneck={"weights": "memory", "kv": "bandwidth", "compute": "compute"}[longest],
        ways=_ways(model, memory, wish, kv_dtype, context),
    )  # fmt: skip


def weights_bytes(model: ModelShape, dtype: str, gpus: int = 1, stored: int | None = None) -> int:
    """Bytes of the weights that one of `gpus` devices holds."""
    whole = int(model.num_parameters * BYTES[dtype]) if stored is None else stored
    return -(-whole // gpus)


# ---- what is asked


def _check(model: ModelShape, wish: Wish) -> None:
    if not 1 <= wish.block_size <= 256:
        raise ConfigError(f"block_size must be between 1 and 256, not {shown(wish.block_size)}")
    if wish.tensor_parallel < 1 or model.num_kv_heads % wish.tensor_parallel:
        raise ConfigError(f"tensor_parallel must divide the model's {model.num_kv_heads} KV heads, which {shown(wish.tensor_parallel)} does not")
    if not 0 < wish.utilisation <= 1:
        raise ConfigError(f"utilisation is a share of the memory, above 0 and at most 1, not {shown(wish.utilisation)}")


def _lengths(model: ModelShape, wish: Wish) -> tuple[int, int, int]:
    """Context and mean lengths in tokens."""
    context = model.max_position if wish.context is None else wish.context
    if not 1 < context <= model.max_position:
        raise ConfigError(f"context must be 2 to {model.max_position} tokens, not {shown(context)}: {model.name} has {model.max_position} positions")
    prompt = min(MEAN_PROMPT, context // 2) if wish.mean_prompt is None else wish.mean_prompt
    output = max(1, min(MEAN_OUTPUT, context - prompt)) if wish.mean_output is None else wish.mean_output
    for name, value in (("mean_prompt", prompt), ("mean_output", output)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1 token, not {shown(value)}")
    if prompt + output > context:
        raise ConfigError(f"prompt and output have {prompt + output} tokens on average, but the context ends at {context}: raise context")
    return context, prompt, output


def _types(device: Device, wish: Wish) -> tuple[str, str]:
    dtype = device.dtype if wish.dtype == "auto" else wish.dtype
    kv_dtype = device.dtype if wish.kv_cache_dtype == "auto" else wish.kv_cache_dtype
    if dtype not in BYTES:
        raise ConfigError(f"dtype must be one of auto, {', '.join(BYTES)}, not {shown(dtype)}")
    if kv_dtype not in KV_TYPES:
        raise ConfigError(f"kv_cache_dtype must be one of auto, {', '.join(KV_TYPES)}, not {shown(kv_dtype)}")
    return dtype, kv_dtype


def _memory(device: Device, wish: Wish) -> int:
    memory = wish.memory if wish.memory is not None else device.memory
    memory = available_memory() if memory is None else memory
    if memory < 1:
        raise ConfigError(f"memory must be a positive number of bytes, not {shown(memory)}")
    return memory


# ---- what follows


def _formula(model: ModelShape, kv_dtype: str, gpus: int) -> str:
    number = f"({model.head_dim} + 4)" if kv_dtype == "int8" else f"{model.head_dim} x {BYTES[kv_dtype]:g} bytes"
    shared = f" / {gpus} devices" if gpus > 1 else ""
    return f"2 x {model.num_layers} layers x {model.num_kv_heads} KV heads x {number}{shared} = {model.kv_bytes_per_token(kv_dtype) // gpus:,}"


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _requests(blocks: int, size: int, context: int, prompt: int, output: int) -> dict[str, int]:
    """Requests at once by allocator; half of a paged request's last block is empty on average."""
    return {
        "max": blocks // power_of_two(_blocks(context, size)),
        "pow2": blocks // power_of_two(_blocks(prompt + power_of_two(output), size)),
        "paged": int(blocks * size / (prompt + output / 2 + (size - 1) / 2)),
        "paged, longest": blocks // _blocks(prompt + output, size),
    }


def _step_seconds(model: ModelShape, device: Device, requests: int, held: float, weights: int, kv_bytes: int, gpus: int) -> dict[str, float]:
    """Seconds that the parts of one step take, in which every request generates a token over `held` tokens of KV."""
    batch = max(1, requests)
    return {
        "weights": weights / device.bandwidth,
        "kv": batch * held * kv_bytes / device.bandwidth,
        "compute": model.flops(batch, batch, batch * held) / gpus / device.flops,
    }


def _ways(model: ModelShape, memory: int, wish: Wish, kv_dtype: str, context: int) -> tuple[Way, ...]:
    """16-bit and 8-bit weights over 1, 2, 4, ... devices of this memory."""
    ways = []
    for gpus in (2**i for i in range(model.num_kv_heads.bit_length()) if model.num_kv_heads % 2**i == 0):
        for dtype in ("bfloat16", "fp8"):
            weights = weights_bytes(model, dtype, gpus)
            pool = max(0, int(memory * wish.utilisation) - weights)
            block_bytes = model.kv_bytes_per_token(kv_dtype) // gpus * wish.block_size
            ways.append(Way(gpus, dtype, weights, pool, pool // block_bytes // _blocks(context, wish.block_size)))
    return tuple(ways)
