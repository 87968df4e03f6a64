"""Drives an engine with a workload whose requests arrive in real time, and keeps every time and every StepRecord.

A request's clock starts when it was meant to arrive, not when a busy engine took notice of it: what it waits for a step to
end is part of its time to first token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from cupaged.engine import Engine
from cupaged.errors import WorkloadError
from cupaged.outputs import RequestOutput
from cupaged.params import BeamSearchParams, SamplingParams
from cupaged.step_plan import StepRecord
from cupaged.workloads import metrics
from cupaged.workloads.metrics import RequestTimes, mean
from cupaged.workloads.request import TraceRequest, Workload

Watch = Callable[[int, int], None]
"""Called with (finished, all) requests."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A step and when it ended, in seconds from the start."""

    seconds: float
    record: StepRecord


@dataclass
class Run:
    """What happened, in seconds from the start.

    times     of every request, in the order of their arrival
    moments   one a step
    gaps      seconds between neighbouring tokens of an answer, over all requests with one answer
    cached    prompt tokens found in the cache; prompt: of so many
    """

    times: list[RequestTimes] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    cached: int = 0
    prompt: int = 0
    answers: list[list[int]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last finish."""
        return metrics.seconds(self.times)

    @property
    def request_rate(self) -> float:
        """Requests a second."""
        return metrics.throughput(self.times).requests

    @property
    def output_rate(self) -> float:
        """Output tokens a second."""
        return metrics.throughput(self.times).output_tokens

    @property
    def computed(self) -> int:
        """Tokens that the model computed, prompts and recomputations included."""
        return sum(moment.record.num_tokens for moment in self.moments)

    @property
    def hit_rate(self) -> float:
        return self.cached / self.prompt

    @property
    def preemptions(self) -> int:
        return sum(moment.record.num_preempted for moment in self.moments)

    @property
    def mean_running(self) -> float:
        """Mean sequences in a step, those that it finished among them (of requests with one answer)."""
        return mean([moment.record.num_running + moment.record.num_finished for moment in self.moments])

    def token_share(self, block_size: int) -> float:
        """Share of the slots of held blocks that hold KV, over all steps: 1 is no waste."""
        held = sum(moment.record.blocks_used for moment in self.moments) * block_size
        return sum(moment.record.slots_used for moment in self.moments) / held


def serve(engine: Engine, workload: Workload, watch: Watch | None = None) -> Run:
    """Serve a workload to its end. Raises WorkloadError, before anything runs, for a request that the engine cannot hold.

    Answers are greedy and of the wanted length whatever the model says; several samples of a prompt are drawn with the
    workload's seed.
    """
    _check(engine, workload.requests)
    return _Server(engine, workload, watch or (lambda done, total: None)).run()


def serve_one_by_one(engine: Engine, workload: Workload, watch: Watch | None = None) -> Run:
    """Each request when the one before it is finished, whenever it arrives: for what does not depend on time."""
    whole = Run()
    for number, request in enumerate(workload.requests):
        alone = Workload(workload.name, workload.seed, (replace(request, arrival=0.0),), workload.max_len)
        run = serve(engine, alone)
        for name in ("times", "moments", "gaps", "answers"):
            getattr(whole, name).extend(getattr(run, name))
        whole.cached += run.cached
        whole.prompt += run.prompt
        if watch is not None:
            watch(number + 1, len(workload.requests))
    return whole


def _check(engine: Engine, requests: Sequence[TraceRequest]) -> None:
    limit = engine.config.max_model_len or engine.model_config.max_position
    pool = (engine.config.num_blocks or 0) * engine.config.block_size
    for request in requests:
        if request.num_tokens > limit:
            raise WorkloadError(
                f"a request of {request.num_tokens} tokens is longer than the longest sequence ({limit} tokens) in a pool of"
                f" {pool} tokens: raise --max-model-len and --num-blocks, or take shorter requests"
            )


class _Server:
    def __init__(self, engine: Engine, workload: Workload, watch: Watch) -> None:
        self._engine, self._workload, self._watch = engine, workload, watch
        self._pending = deque(workload.requests)
        self._asked: dict[str, TraceRequest] = {}
        self._last_token: dict[str, float] = {}
        self._finished: dict[str, RequestTimes] = {}
        self._result = Run()
        self._started = 0.0

    def run(self) -> Run:
        self._started = time.perf_counter()
        self._engine.observers.append(self._observe)
        try:
            while self._pending or self._engine.has_unfinished():
                self._admit()
                if self._engine.has_unfinished():
                    for output in self._engine.step():
                        self._follow(output)
                else:
                    time.sleep(max(0.0, self._pending[0].arrival - self._now()))
        finally:
            self._engine.observers.remove(self._observe)
            for request_id in self._asked:
                self._engine.abort(request_id)
        self._result.times = [self._finished[request_id] for request_id in self._asked]
        return self._result

    def _now(self) -> float:
        return time.perf_counter() - self._started

    def _observe(self, record: StepRecord) -> None:
        self._result.moments.append(Moment(self._now(), record))

    def _admit(self) -> None:
        """Hand over what has arrived by now."""
        now = self._now()
        while self._pending and self._pending[0].arrival <= now:
            request = self._pending[0]
            params = _params(request, self._workload.seed + len(self._asked))
            self._asked[self._engine.add_request(request.prompt.tolist(), params)] = request
            self._pending.popleft()

    def _follow(self, output: RequestOutput) -> None:
        now, request = self._now(), self._asked[output.request_id]
        if request.width == 1:
            if output.request_id in self._last_token:
                self._result.gaps.append(now - self._last_token[output.request_id])
            self._last_token[output.request_id] = now
        if output.finished:
            self._finish(output, request, now)

    def _finish(self, output: RequestOutput, request: TraceRequest, now: float) -> None:
        first = now if output.metrics.first_token is None else output.metrics.first_token - self._started
        self._finished[output.request_id] = RequestTimes(
            request.arrival, first, now, request.num_prompt, max(len(a.token_ids) for a in output.outputs), len(output.outputs)
        )
        self._result.answers.append(output.outputs[0].token_ids)
        self._result.cached += output.num_cached_tokens
        self._result.prompt += request.num_prompt
        self._watch(len(self._finished), len(self._workload.requests))


def _params(request: TraceRequest, seed: int) -> SamplingParams | BeamSearchParams:
    if request.beams:
        return BeamSearchParams(beam_width=request.beams, max_tokens=request.num_output, ignore_eos=True)
    temperature = 0.0 if request.n == 1 else 1.0
    return SamplingParams(n=request.n, temperature=temperature, max_tokens=request.num_output, ignore_eos=True, seed=seed)
