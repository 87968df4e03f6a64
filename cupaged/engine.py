"""Engine: requests in, outputs out, one step at a time.

    schedule -> run -> apply -> hand out

`Engine.step` is the program's heart. Around it: requests are checked when they are added, stop strings are found in
the text and told to the scheduler, and every step leaves one StepRecord for whoever watches.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from cupaged.answer import Answer, prompt_candidates
from cupaged.config import EngineConfig, ModelConfig
from cupaged.errors import InvariantError, RequestError, shown
from cupaged.exclusive import Exclusive
from cupaged.outputs import RequestMetrics, RequestOutput
from cupaged.params import SamplingParams
from cupaged.scheduler import Scheduler
from cupaged.sequence import Request
from cupaged.step_plan import IntArray, ModelOutput, StepPlan, StepRecord
from cupaged.stream import RequestStream
from cupaged.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]


class PlanRunner(Protocol):
    """What the engine needs of a model: model.runner.Runner, or a stand-in."""

    def run(self, plan: StepPlan) -> ModelOutput: ...


class _Live:
    """A request on its way: what the scheduler does not care about."""

    def __init__(self, request: Request, answer: Answer, mailbox: deque[RequestOutput] | None) -> None:
        self.request = request
        self.prompt_ids = request.prompt_token_ids.tolist()
        self.answer = answer
        self.mailbox = mailbox
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
        self._live: dict[str, _Live] = {}
        self._next_id = 0
        # a damaged config may name ids that the model does not have: they can never come, and must not be banned
        self._eos_ids = frozenset(i for i in model_config.eos_token_ids if 0 <= i < model_config.vocab_size)
        self._forgotten: deque[str] = deque()  # streams that were dropped, perhaps in the middle of a step
        self._exclusive = Exclusive()  # abort may come from another thread; it waits for the step to end, as Ctrl-C does

    # ---- requests

    def has_unfinished(self) -> bool:
        return bool(self._live)

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        mailbox: deque[RequestOutput] | None = None,
    ) -> str:
        """Queue a prompt (text or token ids); its id. Raises RequestError for one that can never be served.

        Each of its outputs is also appended to `mailbox`, whoever calls the `step` or `abort` that makes it.
        """
        params = self.default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling parameters must be a SamplingParams, not {type(params).__name__}")
        with self._exclusive:
            request_id = self.new_id() if request_id is None else request_id
            if request_id in self._live:
                raise RequestError(f"a request with the id {request_id!r} is already running")
            token_ids = self._prompt_ids(prompt)
            bad_words = self._bad_words(params)
            self._check_parameters(params, bad_words)
            limit = self._max_model_len
            request = Request(
                request_id,
                token_ids,
                params,
                max_len=limit if params.max_tokens is None else min(limit, len(token_ids) + params.max_tokens),
                seed=secrets.randbits(64) if params.seed is None else params.seed,
                prompt=prompt if isinstance(prompt, str) else None,
                eos_ids=self._eos_ids,
                bad_words=bad_words,
                arrival_time=time.perf_counter(),
            )
            sequence = self._scheduler.add(request)
            self._live[request_id] = _Live(request, Answer(sequence, self.tokenizer), mailbox)
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
            if live is None or live.request.sequence is None:
                return None
            self._scheduler.finish(live.request.sequence, "abort")
            live.answer.flush()
            return self._report(live)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestStream:
        """An iterator over the outputs of one request as it grows (text and ids are cumulative).

        Closing it aborts the request, and so does the next step once it was dropped. Several streams may be open at
        once: each step serves all of them.
        """
        mailbox: deque[RequestOutput] = deque()
        request_id = self.add_request(prompt, params, mailbox=mailbox)
        return RequestStream(mailbox, self.step, lambda: self.abort(request_id), lambda: self._forgotten.append(request_id))

    # ---- the heart

    def step(self) -> list[RequestOutput]:
        """Compute one step; the outputs of the requests that got a token in it. Nothing to do: an empty list."""
        with self._exclusive:
            while self._forgotten:
                self.abort(self._forgotten.popleft())
            if not self._live:
                return []
            started = time.perf_counter()
            plan = self._scheduler.schedule()
            planned = time.perf_counter()
            output = self._run(plan)
            ran = time.perf_counter()
            in_use = self._scheduler.cache.num_used, self._scheduler.cache.slots_used + plan.num_tokens
            changed = self._scheduler.apply(plan, output)
            outputs = [self._hand_out(self._live[s.request.request_id], ran) for s in changed]
            self._record(plan, outputs, in_use, (started, planned, ran))
            return outputs

    def _run(self, plan: StepPlan) -> ModelOutput:
        try:
            if not plan.sequences:
                raise InvariantError("requests are waiting, but none of them can be scheduled")
            self._exclusive.interruptible = True
            output = self._runner.run(plan)
            self._exclusive.interruptible = False
            return output
        except BaseException:  # Ctrl-C included: the plan did not happen
            self._exclusive.interruptible = False
            self._scheduler.cancel(plan)
            raise

    def _hand_out(self, live: _Live, now: float) -> RequestOutput:
        if live.first_token is None:
            live.first_token = now
        sequence = live.request.sequence
        assert sequence is not None
        matched = live.answer.follow()
        if matched is not None:
            if sequence.finish_reason is None:
                self._scheduler.finish(sequence, "stop", matched)
            else:  # the token that ended the answer also completed a stop string
                sequence.finish_reason, sequence.stop_reason = "stop", matched
        return self._report(live)

    def _report(self, live: _Live) -> RequestOutput:
        request, answer = live.request, live.answer.output()
        sequence = request.sequence
        assert sequence is not None
        finished = answer.finish_reason is not None
        output = RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=live.prompt_ids,
            outputs=[answer],
            finished=finished,
            prompt_logprobs=(
                None
                if request.params.prompt_logprobs is None or not finished
                else prompt_candidates(request.prompt_candidates, self.tokenizer)
            ),
            metrics=RequestMetrics(
                arrival=request.arrival_time,
                first_token=live.first_token,
                finished=time.perf_counter() if finished else None,
                num_preemptions=sequence.num_preemptions,
            ),
        )
        if live.mailbox is not None:
            live.mailbox.append(output)
        if finished:
            del self._live[request.request_id]
        return output

    def _record(
        self, plan: StepPlan, outputs: list[RequestOutput], in_use: tuple[int, int], times: tuple[float, float, float]
    ) -> None:
        if not self.observers:
            return
        started, planned, ran = times
        scheduler, cache = self._scheduler, self._scheduler.cache
        record = StepRecord(
            step=plan.step,
            num_decode=plan.num_decode,
            num_tokens=plan.num_tokens,
            num_sampled=len(plan.sampled),
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_preempted=len(plan.preempted),
            num_finished=sum(output.finished for output in outputs),
            blocks_total=cache.num_blocks,
            blocks_used=in_use[0],
            slots_used=in_use[1],
            schedule_seconds=planned - started,
            run_seconds=ran - planned,
            apply_seconds=time.perf_counter() - ran,
        )
        for observe in self.observers:
            observe(record)

    # ---- checks at the door

    @property
    def _max_model_len(self) -> int:
        return self.config.max_model_len or self.model_config.max_position

    def _prompt_ids(self, prompt: Prompt) -> IntArray:
        if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, (str, Sequence, np.ndarray)):
            raise RequestError(f"a prompt is a text or a list of token ids, not {type(prompt).__name__}")
        if isinstance(prompt, np.ndarray) and prompt.ndim != 1:
            raise RequestError(f"a prompt of token ids is a list of them, not an array of {prompt.ndim} dimensions")
        ids = self._require_tokenizer("a text prompt").encode(prompt) if isinstance(prompt, str) else prompt
        if not len(ids):
            raise RequestError("the prompt is empty: give at least one token")
        if len(ids) >= self._max_model_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, but prompt and output together may have {self._max_model_len}"
                " (max_model_len): shorten the prompt"
            )
        vocabulary = self.model_config.vocab_size
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < vocabulary:
                raise RequestError(f"the prompt holds {shown(token)}, which is no token id: those are 0 .. {vocabulary - 1}")
        return np.asarray(ids, np.int32)

    def _check_parameters(self, params: SamplingParams, bad_words: Sequence[tuple[int, ...]]) -> None:
        vocabulary = self.model_config.vocab_size
        for name, tokens in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids)):
            for token in tokens:
                if token >= vocabulary:
                    raise RequestError(f"{name} names token {token}, but the vocabulary ends at {vocabulary - 1}")
        if params.stop:
            self._require_tokenizer("a stop string")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > vocabulary:
                raise RequestError(f"{name} asks for {getattr(params, name)} candidates of {vocabulary} tokens")
        banned = {word[-1] for word in bad_words}
        if params.min_tokens:
            banned |= self._eos_ids.union(params.stop_token_ids)
        if len(banned) == vocabulary:
            raise RequestError("bad_words and the stop tokens that min_tokens forbids leave no token to choose from")

    def _bad_words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """Token sequences of the bad words, at the start of a text and after a space; those the model can produce."""
        if not params.bad_words:
            return []
        tokenizer = self._require_tokenizer("a bad word")
        variants = (text for word in params.bad_words for text in (word, " " + word.lstrip()))
        encoded = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in variants)
        return sorted({ids for ids in encoded if ids and max(ids) < self.model_config.vocab_size})

    def _require_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"{what} needs a tokenizer, and this model has none: give token ids")
        return self.tokenizer
