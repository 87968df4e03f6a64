"""Setup: a machine to simulate, as a value, and the real scheduler and cache for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cupaged.cache.contiguous import RESERVATIONS, ContiguousCache
from cupaged.cache.eviction import POLICIES as EVICTIONS
from cupaged.cache.manager import CacheManager
from cupaged.capacity import Wish, capacity
from cupaged.errors import ConfigError, shown
from cupaged.policy import POLICIES as QUEUES
from cupaged.presets import Device, ModelShape
from cupaged.scheduler import Scheduler
from cupaged.separate_prompts import SeparatePromptScheduler
from cupaged.sim.cost import Roofline
from cupaged.static_batch import StaticBatchScheduler

ALLOCATIONS = ("paged", *RESERVATIONS)
BATCHINGS = ("continuous", "separate", "static")
MOST_BLOCKS = 1 << 24


@dataclass(frozen=True)
class Setup:
    """What is simulated. None: as much as the machine holds, the model's context.

    allocation              paged, or a contiguous reservation (cache/contiguous.py): max, pow2, oracle, demand
    batching                continuous; separate: prompts in steps of their own; static: nobody joins a batch that runs
    max_len                 longest sequence, tokens
    overhead                seconds a step beside the roofline
    """

    model: ModelShape
    device: Device
    allocation: str = "paged"
    batching: str = "continuous"
    block_size: int = 16
    num_blocks: int | None = None
    memory: int | None = None
    utilisation: float = 0.9
    max_len: int | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    gpus: int = 1
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    prefix_cache: bool = True
    eviction: str = "lru"
    queue: str = "fcfs"
    overhead: float = 0.0

    def __post_init__(self) -> None:
        for name, value, known in (
            ("allocation", self.allocation, ALLOCATIONS),
            ("batching", self.batching, BATCHINGS),
            ("eviction", self.eviction, EVICTIONS),
            ("queue", self.queue, QUEUES),
        ):
            if value not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, not {shown(value)}")
        if not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs ({self.max_num_seqs}) must be at least 1 and at most max_num_batched_tokens ({self.max_num_batched_tokens})"
            )
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, not {shown(self.num_blocks)}")

    def decided(self) -> Setup:
        """With every open value decided. Raises ConfigError where the pool does not hold one sequence of max_len."""
        wish = Wish(self.memory, self.max_len, self.dtype, self.kv_cache_dtype, self.block_size, self.gpus, self.utilisation)
        found = capacity(self.model, self.device, wish)
        blocks = found.num_blocks if self.num_blocks is None else self.num_blocks
        if blocks > MOST_BLOCKS:
            raise ConfigError(f"a pool of {blocks:,} blocks is more than the {MOST_BLOCKS:,} that can be simulated: take larger blocks, or less memory")
        if blocks * self.block_size < found.context:
            raise ConfigError(
                f"the pool is too small: its {blocks} blocks hold {blocks * self.block_size} tokens, and a sequence may have {found.context}"
                " (max_len); take more memory or devices, or lower max_len"
            )
        return replace(self, num_blocks=blocks, max_len=found.context, dtype=found.dtype, kv_cache_dtype=found.kv_cache_dtype)

    def scheduler(self) -> Scheduler:
        """The scheduler and, behind it, the cache. Prompts of a static batch are computed in one step."""
        if self.num_blocks is None or self.max_len is None:
            return self.decided().scheduler()
        cache: CacheManager
        if self.allocation == "paged":
            cache = CacheManager(self.num_blocks, self.block_size, prefix_cache=self.prefix_cache, eviction=EVICTIONS[self.eviction])
        else:
            cache = ContiguousCache(self.num_blocks, self.block_size, reservation=self.allocation, max_len=self.max_len)
        policy = QUEUES[self.queue]()
        if self.batching == "static":
            return StaticBatchScheduler(
                cache, max_num_batched_tokens=self.max_num_seqs * self.max_len, max_num_seqs=self.max_num_seqs, policy=policy
            )
        kind = SeparatePromptScheduler if self.batching == "separate" else Scheduler
        return kind(cache, max_num_batched_tokens=self.max_num_batched_tokens, max_num_seqs=self.max_num_seqs, policy=policy)

    def roofline(self) -> Roofline:
        """How long its steps take."""
        setup = self.decided()
        return Roofline(
            setup.model, setup.device, dtype=setup.dtype, kv_cache_dtype=setup.kv_cache_dtype, block_size=setup.block_size,
            gpus=setup.gpus, overhead=setup.overhead,
        )  # fmt: skip
