"""Draft: a plan in the making."""

from __future__ import annotations

from collections.abc import Container

from cupaged.step_plan import Decodes, ScheduledSequence


class Draft:
    """What a step will compute, as far as it is decided.

    budget      tokens that may still be added; `decodes` take theirs
    decodes     what a streak goes on with; None: all that there is are items
    items       runs of single sequences
    preempted   arrival numbers of the requests that gave their blocks up for it
    crowded     a running request found no block, and a plan in flight keeps others from giving way
    """

    def __init__(self, budget: int, decodes: Decodes | None = None) -> None:
        self.budget = budget if decodes is None else budget - len(decodes)
        self.decodes = decodes
        self.items: list[ScheduledSequence] = []
        self.preempted: list[int] = []
        self.crowded = False

    def join(self) -> None:
        """What the streak goes on with is a part of the plan like any other."""
        self.items += self.decodes or ()
        self.decodes = None

    def drop(self, seq_ids: Container[int]) -> None:
        """Take these sequences out again."""
        for item in [item for item in self.items if item.seq_id in seq_ids]:
            self.items.remove(item)
            self.budget += item.num_tokens
