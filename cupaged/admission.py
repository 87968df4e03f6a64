"""Admission: how a request that waits gets its first blocks, and how its sequences share them.

A request is admitted when its whole context fits and every running sequence can still grow by a block. It begins in
one of two ways: with what is cached of it and new blocks for the rest, or with what was swapped to host memory. Its
first sequence begins so; the others (after a preemption there may be several) fork from one that has computed what
they share.
"""

from __future__ import annotations

from cupaged.cache.manager import CacheManager
from cupaged.policy import Policy
from cupaged.sequence import Request, Sequence
from cupaged.step_plan import common_prefix

MAX_TIMES_PASSED = 32
"""How many later requests may be admitted before a waiting one, whatever the policy prefers."""

MAX_STEPS_WAITED = 64
"""How many steps a request waits for another one that is computing the prefix they share."""


class Admission:
    """Decides over blocks, not over queues: those are the scheduler's. `window`: what no layer looks beyond, or 0."""

    def __init__(self, cache: CacheManager, policy: Policy, window: int) -> None:
        self._cache = cache
        self._policy = policy
        self._window = window

    def choose(self, waiting: list[Request]) -> Request:
        """The policy's choice, unless somebody has been passed over too often."""
        aged = next((request for request in waiting if request.times_passed >= MAX_TIMES_PASSED), None)
        return aged or self._policy.choose(waiting, self._cache)

    def begin(self, request: Request, running: list[Request]) -> bool:
        """Give a request its first blocks; False, and no change, if it has to wait."""
        if self._cache.swapped_blocks([s.seq_id for s in request.live]):
            return self._bring_back(request, running)
        return self._compute(request, running)

    def _bring_back(self, request: Request, running: list[Request]) -> bool:
        """Begin a request whose KV is in host memory, if there is room for it and for what is still to be computed."""
        ids = [s.seq_id for s in request.live]
        growth = _growing(running) + sum(1 + self._cache.blocks_for(s.num_tokens) for s in request.live)
        growth -= sum(self._cache.swapped_blocks([i]) for i in ids)
        if running and self._cache.swapped_blocks(ids) + growth > self._cache.num_free:
            return False
        computed = self._cache.swap_in(ids)
        if computed is None:
            return False
        for sequence in request.live:
            sequence.started = sequence.seq_id in computed
            sequence.num_computed = computed.get(sequence.seq_id, 0)
        return True

    def _compute(self, request: Request, running: list[Request]) -> bool:
        """Begin a request with what is cached of it and blocks for the rest."""
        if self._waits_for_prefix(request, running):
            return False
        lead, *others = request.live
        growth = _growing(running) + self._own_blocks(lead, others)
        if not self._begin(lead, growth):
            return False
        if request.num_cached is None:
            request.num_cached = lead.num_computed
        return True

    def _begin(self, sequence: Sequence, growth: int) -> bool:
        """Give a sequence its table, cached blocks and new ones, if `growth` blocks remain besides."""
        request = sequence.request
        usable = sequence.reusable if request.prompt_reported else sequence.reusable[:0]
        found = self._cache.cached_prefix(usable, request.salt)
        # Copying a block that is cached in part takes one more: where that is too much, take whole blocks only.
        for count in (found, found // self._cache.block_size * self._cache.block_size):
            adopted = self._cache.adopt(sequence.seq_id, usable[:count], request.salt)
            room = self._cache.reserve(sequence.seq_id, adopted, sequence.num_tokens) is not None
            if room and self._cache.num_free >= growth:
                self._cache.was_of_use(usable[:adopted], request.salt)
                sequence.num_computed = adopted
                sequence.started = True
                return True
            self._cache.release(sequence.seq_id, usable, request.salt)
        return False

    def _own_blocks(self, lead: Sequence, others: list[Sequence]) -> int:
        """Blocks that a request's other sequences will need beyond those that they share with an earlier one."""
        needed = 0
        earlier = [lead]
        for sequence in others:
            shared = max(common_prefix(sequence.reusable, s.tokens) for s in earlier)
            needed += self._cache.blocks_for(sequence.num_tokens) - shared // self._cache.block_size
            earlier.append(sequence)
        return needed

    def _waits_for_prefix(self, request: Request, running: list[Request]) -> bool:
        """Whether a running sequence is just computing more of this one's prefix than is cached; for a bounded time."""
        if not self._cache.prefix_cache or not request.prompt_reported or request.steps_waited >= MAX_STEPS_WAITED:
            return False
        tokens = request.live[0].reusable
        cached = self._cache.cached_prefix(tokens, request.salt)
        for other in running:
            lead = other.live[0]
            if other.salt != request.salt or lead.num_computed >= lead.num_tokens - 1:
                continue
            shared = common_prefix(tokens, lead.tokens)
            if shared // self._cache.block_size * self._cache.block_size > max(cached, lead.num_computed):
                request.steps_waited += 1
                return True
        return False

    # ---- sequences of one request

    def start_sequences(self, request: Request) -> None:
        """Let sequences that have no table yet (after a preemption) fork from one that computed what they share."""
        for sequence in request.live:
            if sequence.started:
                continue
            offers = [(common_prefix(sequence.reusable, s.tokens), s) for s in request.live if s.started]
            whole = [(n, s) for n, s in offers if self._cache.holds_from(s.seq_id) <= self.oldest_read(n)]
            if not whole:  # those that had begun have ended, or their window has moved on
                self._begin(sequence, 0)
                continue
            shared, donor = max(whole, key=lambda pair: pair[0])
            if donor.num_computed >= shared:
                self._cache.fork(donor.seq_id, sequence.seq_id, shared)
                sequence.num_computed = shared
                sequence.started = True

    def oldest_read(self, position: int) -> int:
        """The oldest position that a token at `position` looks at."""
        return max(0, position - self._window + 1) if self._window else 0


def _growing(running: list[Request]) -> int:
    """Sequences that may each take a block in the next step."""
    return sum(len(request.live) for request in running)
