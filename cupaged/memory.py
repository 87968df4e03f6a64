"""How large the KV pool is: from the options, else from the memory that this machine has free."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path

from cupaged.config import LARGEST_INT, EngineConfig, ModelConfig
from cupaged.errors import ConfigError

FREE_SHARE = 0.25
"""Share of the free memory that the pool takes by default."""

DEFAULT_SWAP_SPACE = 1 << 30
"""Bytes."""

UNKNOWN_MEMORY = 4 << 30
"""Assumed free memory, in bytes, where the system does not tell."""


def available_memory() -> int:
    """Bytes that this process can still allocate: free memory of the machine, or of its container if that is less."""
    available = _machine_memory()
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return max(available, 0)


def _machine_memory() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:  # no Linux: half of what is built in is a fair guess
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return UNKNOWN_MEMORY


def swap_blocks(config: EngineConfig, model: ModelConfig) -> int:
    """Blocks of host memory for swapping: none where preempted requests are recomputed. Raises ConfigError for too few."""
    if config.preemption == "recompute":
        return 0
    space = DEFAULT_SWAP_SPACE if config.swap_space is None else config.swap_space
    block_bytes = model.kv_bytes_per_token(config.stored_kv) * config.block_size
    if space < block_bytes:
        raise ConfigError(f"swap_space ({space} bytes) holds no block: one takes {block_bytes} bytes; raise it, or use preemption recompute")
    return space // block_bytes


def wanted_length(config: EngineConfig, model: ModelConfig) -> int:
    """max_model_len, or the model's, in tokens. Raises ConfigError for more than its positions can tell apart."""
    if config.max_model_len is not None and config.max_model_len > model.longest:
        raise ConfigError(f"max_model_len ({config.max_model_len}) is above the model's {model.longest} positions")
    return config.max_model_len or model.max_position


def size_pool(config: EngineConfig, model: ModelConfig, available: int, *, own: bool = False) -> EngineConfig:
    """The config with `num_blocks` and `max_model_len` decided.

    num_blocks, else kv_cache_memory, else the smaller of FREE_SHARE of `available` bytes and what max_num_seqs
    sequences of max_model_len take; with `own` memory, that of a GPU, all of `available`. Where max_model_len was left open, it is the model's, or what the pool holds if that
    is less. Raises ConfigError for a pool that cannot hold one sequence.
    """
    wanted_len = wanted_length(config, model)
    block_bytes = model.kv_bytes_per_token(config.stored_kv) * config.block_size
    blocks_per_sequence = -(-wanted_len // config.block_size)
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    elif config.kv_cache_memory is not None:
        num_blocks = min(config.kv_cache_memory // block_bytes, LARGEST_INT)
        if num_blocks < 1:
            raise ConfigError(
                f"kv_cache_memory ({config.kv_cache_memory} bytes) holds no block: one block of {config.block_size}"
                f" tokens takes {block_bytes} bytes"
            )
    else:
        if own:
            num_blocks = min(available // block_bytes, LARGEST_INT)
        else:
            num_blocks = min(int(available * FREE_SHARE) // block_bytes, config.step_seqs * blocks_per_sequence, LARGEST_INT)
        if num_blocks < 1:
            raise ConfigError(
                f"{available} bytes of memory are free, too few for a KV pool (one block takes {block_bytes}):"
                " free some, or set num_blocks"
            )
    capacity = num_blocks * config.block_size
    if config.max_model_len is not None and config.max_model_len > capacity:
        raise ConfigError(
            f"the KV pool is too small: {num_blocks} blocks hold {capacity} tokens, max_model_len is {wanted_len};"
            f" raise num_blocks to {blocks_per_sequence}, or lower max_model_len"
        )
    if capacity < 2:
        raise ConfigError(f"the KV pool is too small: {capacity} token; raise num_blocks or block_size")
    return replace(config, num_blocks=num_blocks, max_model_len=min(wanted_len, capacity))
