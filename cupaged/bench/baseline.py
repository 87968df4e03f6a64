"""Baselines on the real engine: the same model, kernels and scheduler over a cache without pages."""

from __future__ import annotations

from cupaged.cache.contiguous import ContiguousCache
from cupaged.cache.manager import CacheManager
from cupaged.cache.states import MemoryStates, paged_states
from cupaged.engine import Engine
from cupaged.scheduler import Scheduler
from cupaged.sequence import Request, Sequence
from cupaged.step_plan import StepPlan

SYSTEMS = ("paged", "oracle", "pow2", "max")
"""Pages, and what is reserved without them: the true length, the answer's length rounded up, the model's longest."""


class AnnouncingScheduler(Scheduler):
    """Tells a contiguous cache how long each sequence will be before it is scheduled."""

    cache: ContiguousCache

    def add(self, request: Request) -> Sequence:
        sequence = super().add(request)
        self.cache.expect(sequence.seq_id, request.num_prompt, request.max_len - request.num_prompt)
        return sequence


def contiguous(engine: Engine, reservation: str) -> Engine:
    """A new engine on the model and the pool of an idle one, which must not be used any more. No prefix cache, no samples.

    `reservation` is one of cache.contiguous.RESERVATIONS. Raises ConfigError for a pool that cannot hold one.
    """
    config = engine.config
    assert config.num_blocks is not None
    assert config.max_model_len is not None
    scheduler = AnnouncingScheduler(
        ContiguousCache(config.num_blocks, config.block_size, reservation=reservation, max_len=config.max_model_len),
        max_num_batched_tokens=config.step_tokens,
        max_num_seqs=config.step_seqs,
    )
    return Engine(scheduler, engine._runner, config, engine.model_config, engine.tokenizer, engine.default_params, engine.model_name)


def system(engine: Engine, name: str) -> Engine:
    """The engine itself for "paged", else on a contiguous cache."""
    return engine if name == "paged" else contiguous(engine, name)


class StatesWatch:
    """Keeps what every slot was good for in each step, while the step ran. Used as `with StatesWatch(engine) as watch:`."""

    def __init__(self, engine: Engine) -> None:
        self._scheduler = engine._scheduler
        self._schedule = self._scheduler.schedule
        self.states: list[MemoryStates] = []

    def __enter__(self) -> StatesWatch:
        self._scheduler.schedule = self._watched  # type: ignore[method-assign]  # to see the pool between plan and run
        return self

    def __exit__(self, *error: object) -> None:
        self._scheduler.schedule = self._schedule  # type: ignore[method-assign]

    def _watched(self) -> StepPlan:
        plan = self._schedule()
        self.states.append(_states(self._scheduler.cache, plan))
        return plan


def _states(cache: CacheManager, plan: StepPlan) -> MemoryStates:
    if isinstance(cache, ContiguousCache):
        return cache.states({item.seq_id: item.num_tokens for item in plan.sequences})
    return paged_states(cache, plan.num_tokens)
