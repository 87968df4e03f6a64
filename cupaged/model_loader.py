"""open_engine: a model's name -> a running Engine. The one place where all the parts are put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

from cupaged.artefact import Progress
from cupaged.backends import find_device, open_backend
from cupaged.backends.base import Backend
from cupaged.backends.compile_ahead import (
    compile_kernels as compile_kernels,  # for the command line, which knows no backend
)
from cupaged.backends.compile_ahead import kernel_folder as kernel_folder
from cupaged.cache.eviction import POLICIES as EVICTIONS
from cupaged.cache.manager import CacheManager
from cupaged.checkpoint import open_checkpoint
from cupaged.checkpoint.base import Checkpoint, GenerationDefaults
from cupaged.config import EngineConfig
from cupaged.engine import Engine
from cupaged.errors import BackendError, CheckpointError, ConfigError, ParameterError
from cupaged.hub import RECOMMENDED, resolve_model
from cupaged.memory import available_memory, size_pool, swap_blocks, wanted_length
from cupaged.model.kv_store import KVStore
from cupaged.model.llama import Llama
from cupaged.model.profile import memory_for_pool
from cupaged.model.rope import rope_tables
from cupaged.model.runner import Runner
from cupaged.model.weights import load_weights
from cupaged.params import SamplingParams
from cupaged.policy import POLICIES as QUEUES
from cupaged.scheduler import Scheduler
from cupaged.text.tokenizer import load_tokenizer


def open_engine(model: str, config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Find, open and load a model and set an engine up for it.

    `model` is a folder, a GGUF file, an alias or a hub id (see hub.resolve_model). Raises HubError, CheckpointError,
    ConfigError or BackendError, each with one line.
    """
    checkpoint = open_checkpoint(resolve_model(model, progress))
    default_params = _params(checkpoint, RECOMMENDED.get(model, GenerationDefaults()))
    tokenizer = load_tokenizer(checkpoint) if _has_tokenizer(checkpoint) else None
    announce = None if progress is None else lambda line: progress(line, 0, 0)
    config = _settle(config, checkpoint, announce)
    if config.device_kind != "cuda":
        config = size_pool(config, checkpoint.config, available_memory())
    num_swap_blocks = swap_blocks(config, checkpoint.config)
    widths = {"dtype": config.dtype, "kv_dtype": config.kv_cache_dtype}
    backend = open_backend(config.device, config.threads, announce, **widths, pin=config.pin_threads, graphs=not config.enforce_eager)
    if config.batch_invariant and not backend.batch_invariant:
        raise ConfigError(f"batch_invariant: on the {backend.name} backend logits depend on what else is in the batch; use device cpu with Numba installed")
    try:
        llama = _load(checkpoint, backend, wanted_length(config, checkpoint.config), progress)
        config = _sized(config, llama, backend)
        config = replace(config, overlap=backend.asynchronous if config.overlap is None else config.overlap)
        assert config.num_blocks is not None
        runner = Runner(
            backend,
            llama,
            KVStore(backend, checkpoint.config, config.num_blocks, config.block_size, num_swap_blocks),
            max_rows=config.step_tokens,
            max_seqs=config.step_seqs,
            overlap=bool(config.overlap),
        )
    except MemoryError as error:
        raise BackendError(
            f"not enough memory for {model}: {error}; take a smaller model, or a smaller KV pool (num_blocks, kv_cache_memory; now"
            f" {config.num_blocks} blocks), max_num_batched_tokens ({config.step_tokens}) or max_num_seqs ({config.step_seqs})"
        ) from error
    scheduler = Scheduler(
        CacheManager(
            config.num_blocks,
            config.block_size,
            prefix_cache=config.prefix_cache,
            eviction=EVICTIONS[config.eviction],
            num_swap_blocks=num_swap_blocks,
        ),
        max_num_batched_tokens=config.step_tokens,
        max_num_seqs=config.step_seqs,
        policy=QUEUES[config.queue](),
        preemption=config.preemption,
        window=checkpoint.config.window_of_all,
    )
    return Engine(scheduler, runner, config, checkpoint.config, tokenizer, default_params, model)


def _settle(config: EngineConfig, checkpoint: Checkpoint, announce: Callable[[str], None] | None) -> EngineConfig:
    """The config with its device decided, with it the size of a step, and the type that a GPU computes with: auto is the checkpoint's, bfloat16 for
    quantised blocks. An option that only a CPU or only a GPU has decides, too."""
    device = config.device
    if device == "auto":
        device = "cpu" if "int8" in (config.dtype, config.kv_cache_dtype) else find_device(announce)
    dtype = config.dtype
    if device.startswith("cuda") and dtype == "auto":
        storages = {source.storage for source in checkpoint.tensors.values() if len(source.shape) == 2}
        dtype = {"F16": "float16", "F32": "float32"}.get(storages.pop() if len(storages) == 1 else "", "bfloat16")
    config = replace(config, device=device, dtype=dtype)
    return replace(config, max_num_batched_tokens=config.step_tokens, max_num_seqs=config.step_seqs)


def _sized(config: EngineConfig, llama: Llama, backend: Backend) -> EngineConfig:
    """The config with a pool that the GPU's memory holds; elsewhere it has been decided already."""
    if backend.memory() is None:
        return config
    decided = config.num_blocks is not None or config.kv_cache_memory is not None
    return size_pool(config, llama.config, 0 if decided else memory_for_pool(backend, llama, config), own=True)


def _has_tokenizer(checkpoint: Checkpoint) -> bool:
    """A model without one still serves token ids."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    return "tokenizer.ggml.model" in checkpoint.metadata or any(checkpoint.file(name) for name in names)


def _load(checkpoint: Checkpoint, backend: Backend, max_model_len: int, progress: Progress | None) -> Llama:
    report = None if progress is None else lambda done, total: progress("loading weights", done, total)
    weights = load_weights(checkpoint, backend, report)
    cos, sin = rope_tables(checkpoint.config, max_model_len)
    return Llama(checkpoint.config, weights, backend.upload(cos), backend.upload(sin))


def _params(checkpoint: Checkpoint, recommended: GenerationDefaults) -> SamplingParams:
    """What the checkpoint recommends, else what the built-in model's makers do."""
    source = recommended if checkpoint.generation == GenerationDefaults() else checkpoint.generation
    given = {f.name: getattr(source, f.name) for f in fields(source)}
    try:
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})
    except ParameterError as error:
        raise CheckpointError(f"{checkpoint.path} recommends sampling parameters that make no sense: {error}") from None
