"""Hugging Face transformers on the CPU, measured: a job on stdin, figures on stdout (see peer_job.py).

Many requests go through its continuous batching with paged attention, one request through plain generate().
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

from peer_job import Answers, Job, Request, answer, read_job, report, versions

job = read_job()
os.environ["OMP_NUM_THREADS"] = str(job.threads)  # torch reads it while it loads
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig  # noqa: E402
from transformers.generation.streamers import BaseStreamer  # noqa: E402

PAGE = 32
STEP_TOKENS = 512
NO_EOS = -1


class Clock(BaseStreamer):  # type: ignore[misc]  # transformers is not typed
    """Notes when each token comes; the first call brings the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def one_by_one(model: AutoModelForCausalLM, requests: list[Request]) -> Answers:
    token_ids, first = [], []
    started = time.perf_counter()
    for request in requests:
        clock = Clock()
        prompt = torch.tensor([request.prompt_ids])
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=request.max_new_tokens,
            max_new_tokens=request.max_new_tokens,
            streamer=clock,
        )
        token_ids.append(output[0, len(request.prompt_ids) :].tolist())
        first.append(clock.times[1] - started)
    return Answers(token_ids, first, time.perf_counter() - started)


def together(model: AutoModelForCausalLM, requests: list[Request]) -> Answers:
    blocks = sum(-(-(len(r.prompt_ids) + r.max_new_tokens) // PAGE) for r in requests)
    batching = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=blocks, max_batch_tokens=STEP_TOKENS, max_requests_per_batch=len(requests)
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=NO_EOS)
    with model.continuous_batching_context_manager(greedy, continuous_batching_config=batching) as manager:
        started = time.perf_counter()
        for i, request in enumerate(requests):
            manager.add_request(
                request.prompt_ids, str(i), max_new_tokens=request.max_new_tokens, record_timestamps=True, eos_token_id=NO_EOS
            )
        results: dict[int, Any] = {}
        while len(results) < len(requests):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("the generation thread ended")
            if result is not None and result.is_finished():
                results[int(result.request_id)] = result
        seconds = time.perf_counter() - started
    ordered = [results[i] for i in range(len(requests))]
    return Answers([r.generated_tokens for r in ordered], [r.timestamps[0] - started for r in ordered], seconds)


def run(job: Job) -> None:
    torch.set_num_threads(job.threads)
    batched = job.at_once > 1
    model = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=torch.float32, attn_implementation="paged|sdpa" if batched else "sdpa"
    )
    generate = together if batched else one_by_one
    with torch.inference_mode():
        if job.warm_up:
            generate(model, job.warm_up)
        answers = answer(job, partial(generate, model))
    report(job, answers, versions=versions("transformers", "torch"))


if __name__ == "__main__":
    run(job)
