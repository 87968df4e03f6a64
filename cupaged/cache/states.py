"""MemoryStates: what each slot of a KV pool is good for at one moment, in the terms of the PagedAttention paper.

    pool = token states + reservation + internal + external + cached                  (arXiv 2309.06180, figure 2)
"""

from __future__ import annotations

from dataclasses import dataclass

from cupaged.cache.manager import CacheManager


@dataclass(frozen=True, slots=True)
class MemoryStates:
    """Slots, one token each.

    token_states   hold KV of a live sequence, or get it in the running step
    reservation    a sequence will fill them later
    internal       given to a sequence that will never fill them
    external       everything else: what rounding adds to a run, pieces too small for anybody, and what nobody asked for
    cached         held by nobody and kept for their content (paged only)
    """

    pool: int
    token_states: int
    reservation: int
    internal: int
    external: int
    cached: int = 0


def paged_states(cache: CacheManager, writing: int) -> MemoryStates:
    """Of a paged pool, while a step writes `writing` tokens: the empty part of last blocks counts as internal."""
    usage = cache.usage()
    filled = usage.slots_used + writing
    held, cached = usage.blocks_used * cache.block_size, usage.blocks_cached * cache.block_size
    pool = cache.num_blocks * cache.block_size
    return MemoryStates(pool, filled, 0, held - filled, pool - held - cached, cached)
