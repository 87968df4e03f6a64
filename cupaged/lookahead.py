"""Looking ahead: what the next plan may count on while the plan before it is still in flight.

A sequence whose next token is being chosen can go on with that token unread: all that the next plan needs is its place in
the context, and the device finds the token itself where the plan in flight has put it. Not so where the choice decides
what is to be computed next: which beams go on, which answers fork, which words are now forbidden. There the plan in
flight must be applied first.
"""

from __future__ import annotations

from collections.abc import Mapping

from cupaged.sequence import Sequence
from cupaged.step_plan import ScheduledSequence, StepPlan


def promise_tokens(plan: StepPlan, live: Mapping[int, Sequence]) -> bool:
    """Promise the tokens that a plan in flight chooses to the sequences that will go on with them; False, and no promise,
    where what comes next depends on what the plan computes."""
    promises = []
    first = 0
    for item in plan.sequences:
        source, first = first, first + len(item.samples)
        sequence = live.get(item.seq_id)
        if sequence is None:
            continue  # ended while the plan was in flight
        if _must_be_read(item, sequence):
            return False
        if item.samples and sequence.num_tokens + 1 < sequence.request.max_len:  # else this token is its last
            promises.append((sequence, source))
    for sequence, source in promises:
        sequence.token_source = source
    return True


def _must_be_read(item: ScheduledSequence, sequence: Sequence) -> bool:
    """Whether nothing can be planned for the sequence, or others of its request, before the output of this run is known."""
    forks = len(item.samples) > 1
    watches = bool(item.samples) and sequence.watches_words
    counts = bool(item.samples) and sequence.request.params.has_penalties and not sequence.history_sent
    return item.num_candidates > 0 or forks or watches or counts
