"""Engine: requests in, outputs out, one step at a time.

    schedule -> run -> apply -> hand out

`Engine.step` is the program's heart. Around it: requests are checked when they are added, stop strings are found in
the text and told to the scheduler, and every step leaves one StepRecord for whoever watches.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from cupaged.answer import Answer, prompt_candidates
from cupaged.beam import BeamSearch
from cupaged.cache.manager import CacheUsage
from cupaged.config import EngineConfig, ModelConfig
from cupaged.door import Door, Prompt
from cupaged.errors import RequestError
from cupaged.exclusive import Exclusive
from cupaged.outputs import CompletionOutput, RequestMetrics, RequestOutput
from cupaged.params import BeamSearchParams, SamplingParams
from cupaged.scheduler import Scheduler
from cupaged.sequence import Request, Sequence, Status
from cupaged.step_plan import StepPlan, StepRecord
from cupaged.steps import PlanRunner, make_steps
from cupaged.stream import RequestStream
from cupaged.text.tokenizer import Tokenizer


class _Live:
    """A request on its way: what the scheduler does not care about."""

    def __init__(self, request: Request, mailbox: deque[RequestOutput] | None, only_finished: bool) -> None:
        self.request = request
        self.prompt_ids = request.prompt_token_ids.tolist()
        self.answers: dict[int, Answer] = {}
        self.mailbox = mailbox
        self.only_finished = only_finished
        self.has_stop_strings = request.beam is None and bool(request.params.stop)
        self.first_token: float | None = None


class Engine:
    """Runs requests through a scheduler and a model. `model_loader.open_engine` builds one from a model's name.

    config          with every open value decided (num_blocks, max_model_len)
    default_params  what the model's generation_config.json recommends
    observers       called with a StepRecord after every step
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: PlanRunner,
        config: EngineConfig,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None = None,
        default_params: SamplingParams | None = None,
        model_name: str = "",
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.default_params = default_params or SamplingParams()
        self.observers: list[Callable[[StepRecord], None]] = []
        self._scheduler = scheduler
        self._runner = runner
        self._block_bytes = model_config.kv_bytes_per_token(config.stored_kv) * config.block_size
        self._live: dict[str, _Live] = {}
        self._next_id = 0
        self._door = Door(model_config, config.max_model_len or model_config.max_position, tokenizer)
        self._forgotten: deque[str] = deque()  # streams that were dropped, perhaps in the middle of a step
        self._exclusive = Exclusive()  # abort may come from another thread; it waits for the step to end, as Ctrl-C does
        self._steps = make_steps(scheduler, runner, self._exclusive, overlap=bool(config.overlap))

    # ---- requests

    def has_unfinished(self) -> bool:
        return bool(self._live)

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        mailbox: deque[RequestOutput] | None = None,
        cache_salt: str = "",
        only_finished: bool = False,
    ) -> str:
        """Queue a prompt (text or token ids); its id. Raises RequestError for one that can never be served.

        There is an output for each of its tokens, or, with `only_finished`, one when it is finished, which is cheaper.
        Each is also appended to `mailbox`, whoever calls the `step` or `abort` that makes it. Requests share cached
        prefixes only with those of the same `cache_salt`.
        """
        with self._exclusive:
            request_id = self.new_id() if request_id is None else request_id
            if request_id in self._live:
                raise RequestError(f"a request with the id {request_id!r} is already running")
            request = self._door.admit(request_id, prompt, self.default_params if params is None else params, cache_salt)
            self._scheduler.add(request)
            self._live[request_id] = _Live(request, mailbox, only_finished)
            return request_id

    def new_id(self) -> str:
        """An id for a request: the next number that no caller has taken for an id of its own."""
        with self._exclusive:
            while str(self._next_id) in self._live:
                self._next_id += 1
            self._next_id += 1
            return str(self._next_id - 1)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and free everything it holds; what it has so far, or None for an unknown id."""
        with self._exclusive:
            live = self._live.get(request_id)
            if live is None:
                return None
            self._scheduler.abort(live.request)
            return self._reports([live])[0]

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests go on undisturbed."""
        with self._exclusive:
            self._scheduler.cache.reset_prefix_cache()

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestStream:
        """An iterator over the outputs of one request as it grows (text and ids are cumulative).

        Closing it aborts the request, and so does the next step once it was dropped. Several streams may be open at
        once: each step serves all of them.
        """
        wanted = params or self.default_params
        if wanted.num_samples > wanted.n:
            raise RequestError("best_of cannot be streamed: which answers are the best is known at the end; use n")
        mailbox: deque[RequestOutput] = deque()
        request_id = self.add_request(prompt, params, mailbox=mailbox)
        return RequestStream(mailbox, self.step, lambda: self.abort(request_id), lambda: self._forgotten.append(request_id))

    # ---- the heart

    def step(self) -> list[RequestOutput]:
        """Compute one step; the outputs of the requests that got a token in it, or, of those that want only this, ended
        with it. Nothing to do: an empty list."""
        with self._exclusive:
            while self._forgotten:
                self.abort(self._forgotten.popleft())
            if not self._live:
                return []
            started = time.perf_counter()
            plan, output, planning = self._steps.next()
            ran = time.perf_counter()
            usage = self._scheduler.cache.usage() if self.observers else None
            changed = self._scheduler.apply(plan, output)
            outputs = self._reports(self._follow(changed, ran))
            if usage is not None:
                self._record(plan, outputs, usage, (planning, ran - started - planning, time.perf_counter() - ran))
            return outputs

    def _follow(self, changed: list[Sequence], now: float) -> list[_Live]:
        """The requests of sequences that got a token, as far as somebody waits for an output now. A sequence that has just
        completed a stop string ends; all other text is made when somebody wants to see it."""
        wanted: dict[_Live, None] = {}
        for sequence in changed:
            request = sequence.request
            live = self._live[request.request_id]
            if live.first_token is None:
                live.first_token = now
            if live.has_stop_strings:
                self._look_for_stop(live, sequence)
            if not live.only_finished or request.status is Status.FINISHED:
                wanted[live] = None
        return list(wanted)

    def _look_for_stop(self, live: _Live, sequence: Sequence) -> None:
        matched = self._answer(live, sequence).follow()
        if matched is not None:
            if sequence.finish_reason is None:
                self._scheduler.finish(sequence, "stop", matched)
            else:  # the token that ended the answer also completed a stop string
                sequence.finish_reason, sequence.stop_reason = "stop", matched

    def _answer(self, live: _Live, sequence: Sequence) -> Answer:
        if sequence.seq_id not in live.answers:
            live.answers[sequence.seq_id] = Answer(sequence, self.tokenizer)
        return live.answers[sequence.seq_id]

    def _reports(self, changed: list[_Live]) -> list[RequestOutput]:
        """Their outputs; those that are finished are gone then, and with the last of them whatever is in flight."""
        outputs = [self._report(live) for live in changed]
        if not self._live:
            self._steps.forget()
        return outputs

    def _report(self, live: _Live) -> RequestOutput:
        request = live.request
        finished = request.status is Status.FINISHED
        reported = finished and request.params.prompt_logprobs is not None
        output = RequestOutput(  # by position: by name takes twice as long
            request.request_id,
            request.prompt,
            live.prompt_ids,
            self._samples(live, finished) if request.beam is None else self._beams(request.beam),
            finished,
            prompt_candidates(request.prompt_candidates, self.tokenizer) if reported else None,
            request.num_cached or 0,
            RequestMetrics(request.arrival_time, live.first_token, time.perf_counter() if finished else None, request.num_preemptions),
        )
        if live.mailbox is not None:
            live.mailbox.append(output)
        if finished:
            del self._live[request.request_id]
        return output

    def _samples(self, live: _Live, finished: bool) -> list[CompletionOutput]:
        """The request's answers by index; at the end, of best_of answers the n with the highest mean logprob, best first."""
        params = live.request.params
        answers = [self._answer(live, sequence).output() for sequence in live.request.sequences]
        if finished and params.num_samples > params.n:
            answers.sort(key=lambda a: -(a.cumulative_logprob or 0.0) / max(1, len(a.token_ids)))
            answers = [replace(answer, index=index) for index, answer in enumerate(answers[: params.n])]
        return answers

    def _beams(self, search: BeamSearch) -> list[CompletionOutput]:
        """The complete answers of a beam search so far, best first."""
        return [
            CompletionOutput(
                index=index,
                text=self.tokenizer.decode(answer.token_ids) if self.tokenizer else "",
                token_ids=list(answer.token_ids),
                cumulative_logprob=answer.cumulative_logprob,
                score=answer.score,
                finish_reason=answer.finish_reason,
            )
            for index, answer in enumerate(search.hypotheses)
        ]

    def _record(
        self, plan: StepPlan, outputs: list[RequestOutput], usage: CacheUsage, times: tuple[float, float, float]
    ) -> None:
        """Tell the observers. `times`: seconds of planning, running and applying."""
        scheduler, cache = self._scheduler, self._scheduler.cache
        record = StepRecord(
            step=plan.step,
            num_decode=plan.num_decode,
            num_tokens=plan.num_tokens,
            num_sampled=len(plan.samples),
            num_running=scheduler.num_running_sequences,
            num_waiting=len(scheduler.waiting),
            num_preempted=len(plan.preempted),
            num_finished=sum(output.finished for output in outputs),
            blocks_total=cache.num_blocks,
            blocks_used=usage.blocks_used,
            slots_used=usage.slots_used + plan.num_tokens,
            blocks_cached=usage.blocks_cached,
            blocks_shared=usage.blocks_shared,
            blocks_copied=cache.counters.blocks_copied,
            blocks_evicted=cache.counters.blocks_evicted,
            bytes_swapped=cache.counters.blocks_swapped * self._block_bytes,
            schedule_seconds=times[0],
            run_seconds=times[1],
            apply_seconds=times[2],
        )
        for observe in self.observers:
            observe(record)
