"""cupaged, measured: a job on stdin, figures on stdout (see peer_job.py).

Beside the times it reports the floor of the very steps that were run (see gemm_floor.py), for `host` and `host1` where the time
of a full decode step went, and for `stream16` how many bytes a token reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from cupaged import LLM, SamplingParams  # before anything else that imports NumPy: it sets the BLAS policy

# isort: split
import threadpoolctl
from gemm_floor import Shapes, floor_seconds, gflops, measure
from peer_job import Answers, Job, Request, answer, peak_memory, read_job, report, versions

from cupaged.model import batch as batches
from cupaged.outputs import RequestOutput
from cupaged.step_plan import StepRecord

FLOORED = ("workload", "stream", "prefill")
"""Measurements whose time is compared with that of the matrices alone."""

HOST = ("host", "host1")
"""Measurements of what the host does around the model."""


class Stopwatch:
    """Times every call of an object's attribute, by putting itself in its place."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds = 0.0
        self._function: Callable[..., Any] = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return self._function(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - started

    def take(self) -> float:
        """The seconds since the last call."""
        taken, self.seconds = self.seconds, 0.0
        return taken


class HostShare:
    """Splits the wall time of full decode steps into the model's arithmetic, the choice of the likeliest tokens among it, and what
    the host does around it.

    batch       plan to arrays, checks, and the parameters of sampling
    outputs     what a request is told after a step, its text included

    The clock runs from one StepRecord to the next, so whatever happens between two steps counts in `total` as well.
    """

    def __init__(self, llm: LLM, sequences: int) -> None:
        self._sequences = sequences
        engine, runner = llm.engine, llm.engine._runner
        forward = ("_forward", "_forward_and_head", "_forward_and_choose", "_attend", "_finish", "_head")
        self._watches = {
            "model": [Stopwatch(runner, name) for name in forward],
            "batch": [Stopwatch(batches, "build"), Stopwatch(runner._backend, "set_batch"), Stopwatch(runner._packer, "pack")],  # type: ignore[attr-defined]
            "outputs": [Stopwatch(engine, "_reports")],
        }
        self._before = time.perf_counter()
        self.steps: list[dict[str, float]] = []
        engine.observers.append(self._record)

    def _record(self, record: StepRecord) -> None:
        now = time.perf_counter()
        parts = {name: sum(watch.take() for watch in watches) for name, watches in self._watches.items()}
        if record.num_decode == record.num_tokens == self._sequences:
            known = {"schedule": record.schedule_seconds, "apply": record.apply_seconds - parts["outputs"]}
            self.steps.append({"total": now - self._before, **parts, **known})
        self._before = now

    def take(self) -> list[dict[str, float]]:
        """The steps since the last call."""
        taken, self.steps = self.steps, []
        return taken


def host_steps(llm: LLM, job: Job) -> dict[str, list[dict[str, float]]]:
    """Steps of the job's requests, where there is one output at the end of each, and where there is one after every step."""
    host, found = HostShare(llm, len(job.requests)), {}
    for outputs, on_output in (("at the end", None), ("after every step", lambda output: None)):
        llm.engine.reset_prefix_cache()
        generate(llm, job.requests, on_output)
        found[outputs] = host.take()
    return found


def generate(llm: LLM, requests: list[Request], on_output: Callable[[RequestOutput], None] | None = None) -> Answers:
    params = [SamplingParams(temperature=0, max_tokens=r.max_new_tokens, ignore_eos=True) for r in requests]
    started = time.perf_counter()
    outputs = llm.generate([r.prompt_ids for r in requests], params, on_output=on_output)
    seconds = time.perf_counter() - started
    first = [output.metrics.first_token or started for output in outputs]
    return Answers([o.outputs[0].token_ids for o in outputs], [at - started for at in first], seconds)


def floor(llm: LLM, records: list[StepRecord]) -> dict[str, Any]:
    steps = [(record.num_tokens, record.num_sampled) for record in records]
    shapes = Shapes.of(llm.engine.model_config)
    costs = measure(shapes, {rows for rows, _ in steps}, {sampled for _, sampled in steps if sampled})
    speeds = {str(rows): gflops(shapes, rows, seconds) for rows, seconds in sorted(costs.layer.items())}
    return {"floor_seconds": floor_seconds(steps, costs, shapes.num_layers), "floor_gflops": speeds}


def bytes_per_token(llm: LLM, request: Request) -> float:
    """What computing a token reads: every matrix, as float16, and the keys and values of half the way to the request's end."""
    shapes, config = Shapes.of(llm.engine.model_config), llm.engine.model_config
    context = len(request.prompt_ids) + request.max_new_tokens / 2
    return 2 * shapes.weights + context * config.kv_bytes_per_token(llm.engine.config.kv_cache_dtype)


def blas() -> str:
    libraries = [library for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"]
    return ", ".join(f"{lib['internal_api']} {lib['version']} {lib.get('architecture')} x{lib['num_threads']}" for lib in libraries)


def run(job: Job) -> None:
    began = time.perf_counter()
    llm = LLM(job.model, threads=job.threads)
    load_seconds = time.perf_counter() - began
    if job.warm_up:
        generate(llm, job.warm_up)
    records: list[StepRecord] = []
    llm.engine.observers.append(records.append)
    answers = answer(job, partial(generate, llm))
    more: dict[str, Any] = {"peak_bytes": peak_memory()}  # before the floor is measured
    if job.measurement in HOST:
        more["host_steps"] = host_steps(llm, job)
    elif job.measurement == "stream16":
        more["bytes_per_token"] = bytes_per_token(llm, job.requests[0])
    elif job.measurement in FLOORED:
        more |= floor(llm, records)
    report(
        job,
        answers,
        load_seconds=load_seconds,
        versions=versions("cupaged", "numpy", "numba") | {"BLAS": blas()},
        steps=[[r.num_tokens, r.num_sampled, r.schedule_seconds, r.run_seconds, r.apply_seconds] for r in records],
        preempted=sum(record.num_preempted for record in records),
        **more,
    )


if __name__ == "__main__":
    run(read_job())
