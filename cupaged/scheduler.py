"""The scheduler: every step it decides which tokens of which sequences are computed, then books the results.

`schedule` hands out a token budget: running sequences that need one token first, then running ones that need more,
oldest first, then waiting ones in the order of the policy, while their whole context fits. `apply` books what a plan
computed. Between the two the plan is in flight: its blocks are pinned, its sequences carry `num_scheduled`, and
anything may happen to them meanwhile (abort, preemption); `apply` then drops what nobody waits for any more.

Full is not an error: a running sequence that finds no block makes the latest one give its blocks up. That one waits,
and later computes its context again ("recompute"); its tokens do not change. A waiting sequence is admitted only if
its whole context fits and every running sequence can still grow by a block, so that admission and preemption do not
chase each other.
"""

from __future__ import annotations

from bisect import insort

from cupaged.cache.manager import CacheManager
from cupaged.errors import InvariantError, RequestError
from cupaged.policy import FirstComeFirstServed, Policy
from cupaged.sequence import Request, Sequence, Status, candidates
from cupaged.step_plan import ModelOutput, SampleSpec, ScheduledSequence, StepPlan


class Scheduler:
    """Continuous batching with chunked prefill over a CacheManager; knows nothing of text, models or devices."""

    def __init__(
        self, cache: CacheManager, *, max_num_batched_tokens: int, max_num_seqs: int, policy: Policy | None = None
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise InvariantError("the token budget must give every running sequence a token")
        self.cache = cache
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._policy = policy or FirstComeFirstServed()
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._live: dict[int, Sequence] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._in_flight: list[StepPlan] = []
        self._next_id = 0
        self._step = 0

    # ---- requests come and go

    def has_unfinished(self) -> bool:
        return bool(self._live)

    def add(self, request: Request) -> Sequence:
        """Queue a request. Raises RequestError if the pool could never hold it, however empty."""
        # the last token is sampled but never computed, so it takes no slot
        needed = self.cache.blocks_for(max(1, request.max_len - 1))
        if needed > self.cache.num_blocks:
            raise RequestError(
                f"request {request.request_id} may grow to {request.max_len} tokens, which take {needed} KV blocks of"
                f" {self.cache.block_size}, but the pool has {self.cache.num_blocks}: shorten the prompt, lower"
                " max_tokens, or enlarge the pool (num_blocks, kv_cache_memory)"
            )
        sequence = Sequence(self._next_id, request, arrival=self._next_id)
        request.sequence = sequence
        self._next_id += 1
        self._live[sequence.seq_id] = sequence
        insort(self.waiting, sequence, key=self._policy.key)
        return sequence

    def finish(self, sequence: Sequence, reason: str, stop_reason: str | int | None = None) -> None:
        """End a sequence now, whatever it is doing: its blocks are free at once, or when its plan is applied."""
        if sequence.status is Status.FINISHED:
            return
        (self.running if sequence.status is Status.RUNNING else self.waiting).remove(sequence)
        self._withdraw(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        del self._live[sequence.seq_id]

    # ---- planning

    def schedule(self) -> StepPlan:
        """The next step's plan; empty when there is nothing to compute or everything waits for plans in flight."""
        budget = self._max_num_batched_tokens
        planned: list[ScheduledSequence] = []
        preempted: list[int] = []

        for sequence in sorted(self.running, key=lambda s: (s.remaining != 1, *self._policy.key(s))):
            if sequence.status is not Status.RUNNING or not sequence.remaining or not budget:
                continue
            if not self._make_room(sequence, preempted):
                continue
            planned.append(self._plan(sequence, budget))
            budget -= planned[-1].num_tokens

        # who has just given its blocks up must not take them back in the same step
        while budget and not preempted and self.waiting and self._admit(self.waiting[0]):
            planned.append(self._plan(self.running[-1], budget))
            budget -= planned[-1].num_tokens

        planned.sort(key=lambda item: item.num_tokens > 1)
        plan = StepPlan(self._step, self.cache.block_size, tuple(planned), tuple(preempted))
        self._step += 1
        self._in_flight.append(plan)
        return plan

    def _make_room(self, sequence: Sequence, preempted: list[int]) -> bool:
        """Reserve blocks for all the sequence's tokens, taking them from the policy's victims if need be."""
        while self.cache.reserve(sequence.seq_id, sequence.num_tokens) is None:
            if self._in_flight:
                return False  # blocks may be pinned: see what is free once those plans are applied
            victim = self._policy.victim(self.running)
            if victim.num_scheduled:
                raise InvariantError(f"sequence {victim.seq_id} is to be preempted in the step that computes it")
            self._preempt(victim)
            preempted.append(victim.seq_id)
            if victim is sequence:
                return False
        return True

    def _admit(self, sequence: Sequence) -> bool:
        """Move the head of the queue to the running, with blocks for its whole context; False if there is no room."""
        if len(self.running) >= self._max_num_seqs:
            return False
        needed = self.cache.blocks_for(sequence.num_tokens)
        if needed + len(self.running) > self.cache.num_free:
            return False
        self.cache.reserve(sequence.seq_id, sequence.num_tokens)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.status = Status.RUNNING
        sequence.row_id = self._free_rows.pop()
        sequence.history_sent = False
        return True

    def _plan(self, sequence: Sequence, budget: int) -> ScheduledSequence:
        """Schedule as many of the sequence's tokens as the budget allows, and pin its blocks."""
        start = sequence.num_computed + sequence.num_scheduled
        stop = start + min(budget, sequence.remaining)
        blocks = self.cache.reserve(sequence.seq_id, stop)
        if blocks is None:
            raise InvariantError(f"sequence {sequence.seq_id} was planned without room")
        self.cache.pin(blocks)
        request = sequence.request
        targets = None
        if request.params.prompt_logprobs is not None and len(request.prompt_candidates) < request.num_prompt - 1:
            targets = request.prompt_token_ids[start + 1 : stop + 1]
        sequence.num_scheduled += stop - start
        return ScheduledSequence(
            seq_id=sequence.seq_id,
            epoch=sequence.epoch,
            row_id=sequence.row_id,
            start=start,
            token_ids=sequence.tokens[start:stop].copy(),
            blocks=blocks,
            sample=self._sample_spec(sequence) if stop == sequence.num_tokens else None,
            prompt_logprobs=request.params.prompt_logprobs if targets is not None else None,
            prompt_targets=targets,
        )

    def _sample_spec(self, sequence: Sequence) -> SampleSpec:
        params = sequence.request.params
        history = None
        if params.has_penalties and not sequence.history_sent:
            history = (sequence.request.prompt_token_ids, sequence.output_ids.copy())
            sequence.history_sent = True
        return SampleSpec(
            params, sequence.request.seed, sequence.index, sequence.num_tokens, sequence.banned_tokens(), history
        )

    # ---- booking

    def apply(self, plan: StepPlan, output: ModelOutput) -> list[Sequence]:
        """Book what a plan computed; the sequences that got a token, finished ones among them, in the plan's order."""
        self._land(plan)
        changed: list[Sequence] = []
        row = 0
        for item in plan.sequences:
            sampled_row = row
            row += item.sample is not None
            sequence = self._live.get(item.seq_id)
            if sequence is None or sequence.epoch != item.epoch:
                continue  # aborted or preempted while the plan was in flight
            sequence.num_scheduled -= item.num_tokens
            sequence.num_computed += item.num_tokens
            self.cache.commit(sequence.seq_id, sequence.num_computed)
            if item.seq_id in output.prompt_logprobs:
                reported = output.prompt_logprobs[item.seq_id]
                k = item.prompt_logprobs or 0
                sequence.request.prompt_candidates += candidates(reported, range(len(reported.token_ids)), k)
            if item.sample is not None:
                self._book_token(sequence, output, sampled_row)
                changed.append(sequence)
        return changed

    def _book_token(self, sequence: Sequence, output: ModelOutput, row: int) -> None:
        token_id = int(output.token_ids[row])
        sequence.append(token_id)
        k = sequence.request.params.logprobs
        if k is not None and output.logprobs is not None:
            sequence.candidates += candidates(output.logprobs, range(row, row + 1), k)
            sequence.cumulative_logprob += float(output.logprobs.logprobs[row])
        ended = sequence.ended_by(token_id)
        if ended is not None:
            self.finish(sequence, *ended)

    def cancel(self, plan: StepPlan) -> None:
        """Undo a plan that was not (fully) run: nothing of it counts, its tokens will be scheduled again."""
        self._land(plan)
        for item in plan.sequences:
            sequence = self._live.get(item.seq_id)
            if sequence is not None and sequence.epoch == item.epoch:
                sequence.num_scheduled -= item.num_tokens
                sequence.history_sent = False  # the backend may have counted a token that nobody got

    def _land(self, plan: StepPlan) -> None:
        """The plan is no longer in flight: let go of its blocks."""
        self._in_flight.remove(plan)
        for item in plan.sequences:
            self.cache.unpin(item.blocks)

    # ---- leaving

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue, with its tokens and without its blocks."""
        self.running.remove(sequence)
        self._withdraw(sequence)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        if len(sequence.request.prompt_candidates) < sequence.request.num_prompt - 1:
            sequence.request.prompt_candidates.clear()  # reported half-way: the recomputation reports them all
        insort(self.waiting, sequence, key=self._policy.key)

    def _withdraw(self, sequence: Sequence) -> None:
        """Give blocks and row back; plans in flight no longer concern the sequence."""
        self.cache.release(sequence.seq_id)
        if sequence.row_id >= 0:
            self._free_rows.append(sequence.row_id)
        sequence.row_id = -1
        sequence.num_computed = sequence.num_scheduled = 0
        sequence.epoch += 1

    # ---- proof

    def check_invariants(self) -> None:
        """Raise InvariantError unless queues, rows, counts and the cache agree."""
        self.cache.check_invariants()
        rows = sorted(self._free_rows + [s.row_id for s in self.running])
        if rows != list(range(self._max_num_seqs)):
            raise InvariantError("sampling rows are lost or held twice")
        if sorted(self._live) != sorted(s.seq_id for s in self.running + self.waiting):
            raise InvariantError("a live sequence is in no queue, or in two")
        if not self._live and not self._in_flight and self.cache.num_used:
            raise InvariantError(f"{self.cache.num_used} blocks are held though nothing runs")
        for sequence in self._live.values():
            if not 0 <= sequence.num_computed + sequence.num_scheduled <= sequence.num_tokens:
                raise InvariantError(f"sequence {sequence.seq_id} computes more tokens than it has")
