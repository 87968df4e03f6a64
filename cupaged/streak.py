"""Streak: decode steps of the same sequences, one after the other. The next plan is made from the one before.

Most steps give each sequence one more token, and nothing else happens: nobody comes, ends or gives way. What they compute is
the step before, with each place moved on by one:

    starts        17  5  48        18  6  49        19  7  50
    tables        .   .  new block .   .  .         .   .  .
    token_ids     what the step before has chosen, or UNREAD while it is in flight

So nothing is decided again for every sequence and every token; the rows stay in the order of the first plan. The scheduler ends
a streak when anything else happens, and makes its next plan from the sequences themselves, which are always up to date.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cupaged.cache.manager import CacheManager
from cupaged.errors import InvariantError
from cupaged.sequence import Sequence
from cupaged.step_plan import UNREAD, Decodes, IntArray, StepPlan, as_matrix


class Streak:
    """The plans that follow a decode plan. `begin` makes one."""

    def __init__(self, plan: StepPlan, sequences: list[Sequence], cache: CacheManager, window: int) -> None:
        self.sequences = sequences
        self._cache, self._window = cache, window
        self._ids = [sequence.seq_id for sequence in sequences]
        self._samples = plan.samples
        self._first = [item.stop for item in plan.sequences]  # positions that the plan after it computes
        self._planned = self._booked = 0  # plans made after it, and plans booked, it among them
        self._starts: IntArray = np.array(self._first, np.int32)  # positions that the next plan computes
        self._left = min(_plans_alike(sequence, start) for sequence, start in zip(sequences, self._first, strict=True))

        self._at_block = _by_phase(self._first, cache.block_size)
        self._behind_block = _by_phase([start - window + 1 for start in self._first], cache.block_size) if window else []
        self._ending = [place for place, s in enumerate(sequences) if s.request.eos_ids or s.request.stop_ids]
        self._before_longest = min(s.request.max_len - start for s, start in zip(sequences, self._first, strict=True))

        self._places = np.arange(len(sequences), dtype=np.int32)
        self._unread = np.full(len(sequences), UNREAD, np.int32)
        self._chosen: IntArray = self._unread
        self._blocks: list[IntArray] = [item.blocks for item in plan.sequences]
        self._tables = as_matrix(self._blocks)
        self._changed = set(range(len(sequences)))  # plans that are still in flight may change any table when they are applied

    @classmethod
    def begin(cls, plan: StepPlan, live: Mapping[int, Sequence], running: int, cache: CacheManager, window: int) -> Streak | None:
        """The streak that begins with a plan; None where what comes after it is another matter. `running`: how many sequences run."""
        items = plan.sequences
        if not plan.num_decode == plan.num_tokens == len(plan.samples) == running > 0:
            return None
        if any(len(item.samples) != 1 or item.num_candidates or item.samples[0].history is not None for item in items):
            return None
        sequences = [live[item.seq_id] for item in items]
        if any(sequence.watches_words or not sequence.request.prompt_reported for sequence in sequences):
            return None
        return cls(plan, sequences, cache, window)

    def next(self, *, ahead: bool) -> Decodes | None:
        """Schedule one more token of every sequence, which the plan in flight is still to choose if `ahead`. None where the
        streak ends, and then nothing is scheduled."""
        if self._planned == self._left or not self._reserve():
            return None
        for sequence in self.sequences:
            sequence.num_scheduled += 1
        if ahead:
            for place, sequence in enumerate(self.sequences):
                sequence.token_source = place
        starts = self._starts
        self._starts = starts + np.int32(1)
        self._planned += 1
        token_ids, sources = (self._unread, self._places) if ahead else (self._chosen, None)
        return Decodes(self._ids, starts, token_ids, self._tables, sources, self._samples)

    def _reserve(self) -> bool:
        """Have a slot for the next token of every sequence; False where there is no room for one."""
        places = self._changed.union(self._at_block[self._planned % self._cache.block_size])
        for place in sorted(places):
            start = self._first[place] + self._planned
            blocks = self._cache.reserve(self._ids[place], start, start + 1)
            if blocks is None:
                return False
            self._blocks[place] = blocks
        if places:
            self._tables = self._tables_with(places)
            self._changed.clear()
        return True

    def _tables_with(self, places: set[int]) -> IntArray:
        """The block tables with new ones in these places; in memory of its own, for plans in flight have the old one."""
        old, width = self._tables, max(len(self._blocks[place]) for place in places)
        tables = old.copy() if width <= old.shape[1] else np.full((len(old), width), -1, np.int32)
        tables[:, : old.shape[1]] = old
        for place in places:
            blocks = self._blocks[place]
            tables[place, : len(blocks)] = blocks
        return tables

    def book(self, chosen: IntArray) -> list[tuple[Sequence, int]]:
        """Book what the oldest plan that is not booked yet has computed and chosen; the sequences that may end with it, and their tokens."""
        token_ids = chosen.tolist()
        self._cache.commit_one(self._ids)
        for sequence, token_id in zip(self.sequences, token_ids, strict=True):
            sequence.advance(token_id)
        self._commit_blocks()
        self._booked += 1
        self._chosen = chosen
        if self._booked >= self._before_longest:
            return list(zip(self.sequences, token_ids, strict=True))
        return [(self.sequences[place], token_ids[place]) for place in self._ending]

    def _commit_blocks(self) -> None:
        """Tell the cache of blocks that are full now, and of those that lie behind the window."""
        size, every = self._cache.block_size, range(len(self.sequences))
        started = self._booked == 0  # and a sequence may have more than one block that the cache was not told of
        for place in every if started else self._at_block[self._booked % size]:
            sequence = self.sequences[place]
            self._cache.commit(sequence.seq_id, sequence.tokens, sequence.num_computed, sequence.request.salt)
            self._changed.add(place)
        if not self._window:
            return
        for place in every if started else self._behind_block[self._booked % size]:
            behind = self._first[place] + self._booked - self._window + 1
            if behind > 0:
                self._cache.leave_behind(self._ids[place], behind)
                self._changed.add(place)

    def check_invariants(self) -> None:
        """Raise InvariantError unless it goes on where its sequences are."""
        for place, sequence in enumerate(self.sequences):
            start = self._starts.item(place)
            if start != sequence.num_computed + sequence.num_scheduled or sequence.finish_reason is not None:
                raise InvariantError(f"a streak goes on with sequence {sequence.seq_id} at {start}, which is elsewhere")
            blocks = self._blocks[place]
            if place not in self._changed and not np.array_equal(blocks, self._cache.table(sequence.seq_id)[: len(blocks)]):
                raise InvariantError(f"a streak goes on with blocks that sequence {sequence.seq_id} has no more")


def _plans_alike(sequence: Sequence, start: int) -> int:
    """How many plans from `start` on choose a token that there can be, by the rules of the plan before."""
    request = sequence.request
    to_choose = request.max_len - 1 - start
    barred = request.params.min_tokens - (start - request.num_prompt)  # plans, that one included, in which the answer must not end
    return min(to_choose, barred - 1) if barred > 0 else to_choose


def _by_phase(positions: list[int], block_size: int) -> list[list[int]]:
    """Places of a list whose positions, moved on by 0, 1, .. block_size - 1, are the first of a block."""
    phases: list[list[int]] = [[] for _ in range(block_size)]
    for place, position in enumerate(positions):
        phases[-position % block_size].append(place)
    return phases
