"""The scheduler: every step it decides which tokens of which sequences are computed, then books the results.

`schedule` hands out a token budget: running requests whose sequences need one token first, then running ones that need
more, oldest first, then waiting ones in the order of the policy, while their whole context fits. `apply` books what a
plan computed. Between the two the plan is in flight: its blocks are pinned, its sequences carry `num_scheduled`, and
they may be aborted meanwhile: `apply` then drops what nobody waits for any more. Nobody is preempted while a plan is
in flight: what it holds would not be free. `schedule_ahead` plans a step before the tokens of the one in flight are known.

Full is not an error: a running request that finds no block makes the latest one give its blocks up, all its sequences
together. That one waits, and later computes its context again ("recompute"), as far as it is not still cached, or gets
it back from host memory ("swap"); its tokens do not change. How a waiting request begins is told in admission.py.

The sequences of a request share what they have in common by forking: when the prompt has been computed for the first
time, or again when the request resumes.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

import numpy as np

from cupaged.admission import Admission
from cupaged.cache.manager import CacheManager
from cupaged.draft import Draft
from cupaged.errors import InvariantError, RequestError
from cupaged.lookahead import promise_tokens
from cupaged.policy import FirstComeFirstServed, Policy
from cupaged.sequence import Request, Sequence, Status, candidates
from cupaged.step_plan import UNREAD, IntArray, ModelOutput, SampleSpec, ScheduledSequence, StepPlan
from cupaged.streak import Streak

PROMISED: IntArray = np.array([UNREAD], np.int32)


def _arrival(request: Request) -> int:
    return request.arrival


def _turn(request: Request) -> tuple[bool, int]:
    """Requests that need one token a sequence come first; then the earliest."""
    for sequence in request.live:
        if sequence.remaining > 1:
            return True, request.arrival
    return False, request.arrival


class Scheduler:
    """Continuous batching with chunked prefill over a CacheManager; knows nothing of text, models or devices."""

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        policy: Policy | None = None,
        preemption: str = "recompute",
        window: int = 0,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise InvariantError("the token budget must give every running sequence a token")
        self.cache = cache
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._admission = Admission(cache, policy or FirstComeFirstServed(), window)
        self._preemption = preemption
        self._window = window
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._live: dict[int, Sequence] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._in_flight: dict[StepPlan, tuple[IntArray, Streak | None]] = {}  # with the blocks that are pinned for it, and its streak
        self._streak: Streak | None = None  # goes on from the plan that was made last
        self._next_arrival = 0
        self._next_id = 0
        self._step = 0

    # ---- requests come and go

    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def num_running_sequences(self) -> int:
        return sum(len(request.live) for request in self.running)

    def add(self, request: Request) -> Sequence:
        """Queue a request; its first sequence. Raises RequestError if it could never run, however empty the pool."""
        if request.width > self._max_num_seqs:
            raise RequestError(
                f"request {request.request_id} asks for {request.width} sequences at once, and {self._max_num_seqs} run"
                " at most (max_num_seqs)"
            )
        needed = self._most_blocks(request)
        if needed > self.cache.num_blocks:
            raise RequestError(
                f"request {request.request_id} may grow to {request.max_len} tokens"
                f"{f' in {request.width} sequences' if request.width > 1 else ''}, which take {needed} KV blocks of"
                f" {self.cache.block_size}, but the pool has {self.cache.num_blocks}: shorten the prompt, lower"
                " max_tokens, or enlarge the pool (num_blocks, kv_cache_memory)"
            )
        request.arrival = self._next_arrival
        self._next_arrival += 1
        insort(self.waiting, request, key=_arrival)
        return self._new_sequence(request, request.prompt_token_ids)

    def _most_blocks(self, request: Request) -> int:
        """Blocks that the request holds at its longest; what lies wholly in the prompt is shared."""
        # the last token is sampled but never computed, so it takes no slot
        longest = self.cache.blocks_for(max(1, request.max_len - 1))
        shared = request.num_prompt // self.cache.block_size
        return longest + (request.width - 1) * max(0, longest - shared)

    def _new_sequence(self, request: Request, tokens: IntArray) -> Sequence:
        sequence = Sequence(self._next_id, request, len(request.sequences), tokens)
        self._next_id += 1
        request.sequences.append(sequence)
        request.live = [*request.live, sequence]
        self._live[sequence.seq_id] = sequence
        return sequence

    def abort(self, request: Request) -> None:
        """End all of a request's sequences now, whatever they are doing."""
        for sequence in request.live:
            self.finish(sequence, "abort")

    def finish(self, sequence: Sequence, reason: str, stop_reason: str | int | None = None) -> None:
        """End a sequence now: its blocks are free at once, or when its plan is applied."""
        if sequence.finish_reason is not None:
            return
        request = sequence.request
        self._streak = None
        self.cache.release(sequence.seq_id, sequence.tokens, request.salt)
        sequence.restart()
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        del self._live[sequence.seq_id]
        request.live = [s for s in request.live if s is not sequence]
        if not request.live:
            (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
            request.status = Status.FINISHED
            self._give_rows_back(request)

    # ---- planning

    def schedule(self) -> StepPlan:
        """The next step's plan; empty when there is nothing to compute or everything waits for plans in flight."""
        draft = None if self._in_flight else self._go_on(ahead=False)
        draft = draft or self._plan_running(self.running)
        self._plan_waiting(draft)
        return self._take_off(draft)

    def schedule_ahead(self) -> StepPlan | None:
        """The plan after the one in flight, which goes on with tokens that nobody has read yet; None, and nothing is planned,
        where that one has to be applied first (see lookahead.py), or nothing else is to be computed.

        There must be one plan in flight. The new one is the next to run.
        """
        (before,) = self._in_flight
        draft = self._go_on(ahead=True)
        if draft is None:
            if not promise_tokens(before, self._live):
                return None
            draft = self._plan_running(self.running)
        if draft.crowded:
            self._withdraw(draft.items)
            return None
        self._plan_waiting(draft)
        return self._take_off(draft) if draft.items or draft.decodes else None

    def _go_on(self, *, ahead: bool) -> Draft | None:
        """A draft of what the streak goes on with, if there is one and it does."""
        decodes = None if self._streak is None else self._streak.next(ahead=ahead)
        return None if decodes is None else Draft(self._max_num_batched_tokens, decodes)

    def _plan_running(self, requests: Iterable[Request]) -> Draft:
        """What these running requests compute in the next step."""
        draft = Draft(self._max_num_batched_tokens)
        for request in sorted(requests, key=_turn):
            if request.status is Status.RUNNING:
                self._plan_request(request, draft)
        return draft

    def _plan_waiting(self, draft: Draft) -> None:
        # who has just given its blocks up must not take them back in the same step
        while draft.budget and not draft.preempted and self.waiting and self._admit(self._admission.choose(self.waiting)):
            draft.join()
            self._plan_request(self.running[-1], draft)

    def _take_off(self, draft: Draft) -> StepPlan:
        """The draft as a plan in flight."""
        draft.items.sort(key=lambda item: item.num_tokens > 1)
        swap_out, swap_in = self.cache.take_swaps()
        copies = self.cache.take_copies()
        plan = StepPlan(
            self._step, self.cache.block_size, draft.decodes or tuple(draft.items), tuple(draft.preempted), swap_out, swap_in, copies
        )
        self._step += 1
        if draft.decodes is None:
            self._streak = Streak.begin(plan, self._live, self.num_running_sequences, self.cache, self._window)
        self._in_flight[plan] = self.cache.pin(plan.block_tables), self._streak
        return plan

    def _plan_request(self, request: Request, draft: Draft) -> None:
        """Add the request's sequences to the plan, as far as budget and blocks go."""
        live = request.live
        if len(live) > 1 or not live[0].started:
            self._admission.start_sequences(request)
        kept_back = int(len(live) > 1 and self._keeps_back(request, live))
        ready = [s for s in live if s.started and s.remaining > kept_back]
        tables = self._make_room(request, ready, draft) if ready and draft.budget else None
        for sequence, blocks in zip(ready, tables or (), strict=False):
            if draft.budget:
                count = min(draft.budget, sequence.remaining - kept_back)
                draft.items.append(self._plan(sequence, count, blocks))
                draft.budget -= count

    def _keeps_back(self, request: Request, live: list[Sequence]) -> bool:
        """Whether the last token of each sequence, the one that makes it grow, must not be computed yet.

        Nobody may end while others still wait to fork from it; beams take their steps together.
        """
        if any(not s.started for s in live):
            return True
        return request.beam is not None and len(live) > 1 and any(s.num_tokens - s.num_computed > 1 for s in live)

    def _make_room(self, request: Request, ready: list[Sequence], draft: Draft) -> list[IntArray] | None:
        """Reserve blocks for all tokens of these sequences, taking them from the latest requests if need be; their tables.

        The latest gives way whatever the queue's policy is, so the earliest always finishes. None: there is no room.
        """
        tables = []
        for sequence in ready:
            start = sequence.num_computed + sequence.num_scheduled
            while (blocks := self.cache.reserve(sequence.seq_id, start, sequence.num_promised)) is None:
                if self._in_flight:
                    draft.crowded = True
                    return None  # blocks may be pinned: see what is free once those plans are applied
                victim = max(self.running, key=_arrival)
                draft.drop({s.seq_id for s in victim.live})
                self._preempt(victim)
                draft.preempted.append(victim.arrival)
                if victim is request:
                    return None
            tables.append(blocks)
        return tables

    def _plan(self, sequence: Sequence, count: int, blocks: IntArray) -> ScheduledSequence:
        """Schedule the sequence's next `count` tokens over its blocks."""
        start = sequence.num_computed + sequence.num_scheduled
        stop = start + count
        request = sequence.request
        targets = None if request.prompt_reported else request.prompt_token_ids[start + 1 : stop + 1]
        promised = start == sequence.num_tokens
        chooses = stop == sequence.num_promised
        sequence.num_scheduled += count
        return ScheduledSequence(  # by position: by name takes three times as long
            sequence.seq_id,
            start,
            PROMISED if promised else sequence.tokens[start:stop].copy(),
            blocks,
            self._samples(sequence) if chooses and not request.beam else (),
            request.beam.num_candidates if chooses and request.beam else 0,
            request.params.prompt_logprobs if targets is not None else None,
            targets,
            sequence.token_source if promised else -1,
        )

    def _samples(self, sequence: Sequence) -> tuple[SampleSpec, ...]:
        """How the sequence's next token is chosen; after the prompt, also the first tokens of those that will fork."""
        request = sequence.request
        indices = range(request.width) if len(request.sequences) < request.width else (sequence.index,)
        history = None
        if request.params.has_penalties and not sequence.history_sent:
            history = (request.prompt_token_ids, sequence.output_ids.copy())
            sequence.history_sent = True
        banned = sequence.banned_tokens()
        return tuple(
            [SampleSpec(request.params, request.rows[i], request.seed, i, banned, history) for i in indices]
        )

    # ---- admission

    def _admit(self, request: Request) -> bool:
        """Move a request from the queue to the running, with blocks for its whole context; False if it has to wait."""
        if len(self._free_rows) < request.width or not self._admission.begin(request, self.running):
            return False
        for passed in self.waiting[: self.waiting.index(request)]:
            passed.times_passed += 1
        self.waiting.remove(request)
        self.running.append(request)
        request.status = Status.RUNNING
        request.rows = [self._free_rows.pop() for _ in range(request.width)]
        return True

    # ---- booking

    def apply(self, plan: StepPlan, output: ModelOutput) -> list[Sequence]:
        """Book what the oldest plan in flight computed; the sequences that got a token, finished ones among them, in the
        plan's order."""
        streak = self._land(plan)
        if streak is not None and streak is self._streak:
            may_end = streak.book(output.token_ids)
            if output.logprobs is not None:
                for row, sequence in enumerate(streak.sequences):
                    sequence.note_logprobs(output.logprobs, row)
            for sequence, token_id in may_end:
                self._end(sequence, token_id)
            return streak.sequences
        return self._book_runs(plan, output)

    def _book_runs(self, plan: StepPlan, output: ModelOutput) -> list[Sequence]:
        """The same for any plan, sequence by sequence."""
        changed: list[Sequence] = []
        searching: dict[Request, list[Sequence]] = {}
        row = 0
        for item in plan.sequences:
            first, row = row, row + len(item.samples)
            sequence = self._live.get(item.seq_id)
            if sequence is None:
                continue  # ended while the plan was in flight
            count = item.num_tokens
            sequence.num_scheduled -= count
            sequence.num_computed += count
            self.cache.commit(sequence.seq_id, sequence.tokens, sequence.num_computed, sequence.request.salt)
            if self._window:
                self.cache.leave_behind(sequence.seq_id, self._admission.oldest_read(sequence.num_computed))
            if item.seq_id in output.prompt_logprobs:
                reported = output.prompt_logprobs[item.seq_id]
                k = item.prompt_logprobs or 0
                sequence.request.prompt_candidates += candidates(reported, range(len(reported.token_ids)), k)
            if item.num_candidates:
                searching.setdefault(sequence.request, []).append(sequence)
            if item.samples:
                # forks first: a sequence that ends with its first token gives its blocks back
                grown = [sequence, *[self._fork(sequence) for _ in item.samples[1:]]]
                for sampled_row, each in enumerate(grown, first):
                    token_id = output.token_ids.item(sampled_row)
                    each.append(token_id)
                    if output.logprobs is not None:
                        each.note_logprobs(output.logprobs, sampled_row)
                    self._end(each, token_id)
                changed += grown
        for request, beams in searching.items():
            changed += self._advance(request, beams, output)
        return changed

    def _advance(self, request: Request, beams: list[Sequence], output: ModelOutput) -> list[Sequence]:
        """Let a beam search take its step; the beams that got a token, or one that ended the search."""
        assert request.beam is not None
        chosen = request.beam.advance(
            [tuple(s.output_ids.tolist()) for s in beams],
            [s.cumulative_logprob for s in beams],
            [output.candidates[s.seq_id] for s in beams],
        )
        if not chosen:
            for beam in beams:
                self.finish(beam, request.beam.hypotheses[0].finish_reason)
            return beams[:1]
        # forks first, while every parent is as it was; a parent itself is the first of its children
        used: set[int] = set()
        children = []
        for parent in (beams[c.beam] for c in chosen):
            children.append(self._fork(parent) if parent.seq_id in used else parent)
            used.add(parent.seq_id)
        for beam in beams:
            if beam.seq_id not in used:
                self.finish(beam, "dropped")
        for child, continuation in zip(children, chosen, strict=True):
            child.append(continuation.token_id)
            child.cumulative_logprob = continuation.score
        request.sequences, request.live = children, list(children)
        return children

    def _fork(self, parent: Sequence) -> Sequence:
        """A further sequence of the request, with everything that the parent has computed."""
        child = self._new_sequence(parent.request, parent.tokens)
        self.cache.fork(parent.seq_id, child.seq_id, parent.num_computed)
        child.num_computed = parent.num_computed
        child.started = True
        return child

    def _end(self, sequence: Sequence, token_id: int) -> None:
        """Finish a sequence if this token, its last, ends it."""
        ended = sequence.ended_by(token_id)
        if ended is not None:
            self.finish(sequence, *ended)

    def cancel(self, plan: StepPlan) -> None:
        """Undo the latest plan in flight, which was not (fully) run: nothing of it counts, its tokens will be scheduled again."""
        self._land(plan, done=False)
        self._withdraw(plan.sequences, counted=True)  # the backend may have counted tokens that nobody got
        self._distrust_copies(plan)

    def _distrust_copies(self, plan: StepPlan) -> None:
        """The next plan makes this one's copies, perhaps for the second time, and by then from blocks that this one has written
        to: what a sequence had from there on, it computes again."""
        written = plan.first_written if len(plan.copies) else {}
        for source, copy in plan.copies.tolist():
            for item in plan.sequences if source in written else ():
                sequence = self._live.get(item.seq_id)
                if sequence is not None and copy in item.blocks and sequence.num_computed > written[source]:
                    sequence.num_computed = written[source]
                    self.cache.take_back(sequence.seq_id, written[source])

    def _withdraw(self, items: Iterable[ScheduledSequence], *, counted: bool = False) -> None:
        """Take back runs that were scheduled, and what was promised to their sequences."""
        self._streak = None
        for item in items:
            sequence = self._live.get(item.seq_id)
            if sequence is not None:
                sequence.num_scheduled -= item.num_tokens
                sequence.token_source = -1
                if counted or any(spec.history is not None for spec in item.samples):
                    sequence.history_sent = False

    def _land(self, plan: StepPlan, done: bool = True) -> Streak | None:
        """The plan is no longer in flight: let go of its blocks; its streak. Copies that were not made are left to the next plan."""
        if plan is not next(iter(self._in_flight) if done else reversed(self._in_flight), None):
            raise InvariantError("plans are applied in their order, and cancelled from the latest backwards")
        pinned, streak = self._in_flight.pop(plan)
        self.cache.unpin(pinned)
        if done:
            self.cache.copies_done(plan.copies)
            self.cache.swaps_done(plan.swap_out, plan.swap_in)
        else:
            self.cache.return_copies(plan.copies)
            self.cache.swaps_cancelled(plan.swap_out, plan.swap_in)
        return streak

    # ---- leaving

    def _preempt(self, request: Request) -> None:
        """Back to the queue, with all tokens and without blocks; what these hold goes to host memory or is lost."""
        self._streak = None
        self.running.remove(request)
        swapped = self._swaps(request) and self.cache.swap_out([s.seq_id for s in request.live])
        for sequence in request.live:
            if not swapped:
                self.cache.release(sequence.seq_id, sequence.tokens, request.salt)
            sequence.restart()
        self._give_rows_back(request)
        request.status = Status.WAITING
        request.num_preemptions += 1
        if not request.prompt_reported:
            request.prompt_candidates.clear()  # reported half-way: the recomputation reports them all
        insort(self.waiting, request, key=_arrival)

    def _swaps(self, request: Request) -> bool:
        """Whether a preempted request's KV is worth keeping: with "auto", if computing it again takes over a step."""
        if self._preemption != "auto":
            return self._preemption == "swap"
        return sum(s.num_computed for s in request.live) > self._max_num_batched_tokens

    def _give_rows_back(self, request: Request) -> None:
        self._free_rows += reversed(request.rows)
        request.rows = []

    # ---- proof

    def check_invariants(self) -> None:
        """Raise InvariantError unless queues, rows, counts, the streak and the cache agree."""
        self.cache.check_invariants()
        if self._streak is not None:
            self._streak.check_invariants()
        rows = sorted(self._free_rows + [row for r in self.running for row in r.rows])
        if rows != list(range(self._max_num_seqs)):
            raise InvariantError("sampling rows are lost or held twice")
        if sorted(self._live) != sorted(s.seq_id for r in self.running + self.waiting for s in r.live):
            raise InvariantError("a live sequence is in no queue, or in two")
        if not self._live and not self._in_flight and self.cache.num_used:
            raise InvariantError(f"{self.cache.num_used} blocks are held though nothing runs")
        for request in self.running + self.waiting:
            if request.live != [s for s in request.sequences if s.finish_reason is None]:
                raise InvariantError(f"request {request.request_id} does not know which of its sequences still grow")
        for sequence in self._live.values():
            if sequence.token_source >= 0 and not self._in_flight:
                raise InvariantError(f"sequence {sequence.seq_id} is promised a token that nobody chooses")
            if not 0 <= sequence.num_computed + sequence.num_scheduled <= sequence.num_promised:
                raise InvariantError(f"sequence {sequence.seq_id} computes more tokens than it has")
