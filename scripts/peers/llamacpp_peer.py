"""llama.cpp by its Python package's low-level calls, measured: a job on stdin, figures on stdout (see peer_job.py).

Continuous batching as llama.cpp's own server does it: a step holds the next token of every sequence whose prompt is done,
then pieces of the other prompts. Attention is the fused kind and the cache is one for all sequences, which was faster than
separate ones or as fast in every measurement; the rest are its defaults. The most likely token is found with NumPy, which
takes less time than the package's samplers.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial

import llama_cpp as llama
import numpy as np
from peer_job import Answers, Job, Request, answer, read_job, report, versions

BATCH_TOKENS = 2048
"""In one call; llama.cpp computes them 512 at a time."""

MAX_SEQUENCES = 64
PAD = 256
"""The cache's size is rounded up to so many tokens."""


@dataclass
class Running:
    """A request under way in one of the cache's sequences; `done` tokens of prompt and answer are in the cache."""

    index: int
    request: Request
    sequence: int
    done: int = 0
    answer: list[int] = field(default_factory=list)

    @property
    def in_prompt(self) -> bool:
        return self.done < len(self.request.prompt_ids)

    def next_tokens(self, room: int) -> list[int]:
        """At most `room` tokens to compute next."""
        tokens = self.request.prompt_ids[self.done : self.done + room] if self.in_prompt else self.answer[-1:]
        return tokens[:room]


class Engine:
    """A model with a cache for `sequences` of together `cells` tokens. Raises ValueError for what llama.cpp refuses."""

    def __init__(self, job: Job) -> None:
        self._silence = llama.llama_log_callback(lambda level, text, data: None)
        llama.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(job.model.encode(), llama.llama_model_default_params())
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {job.model}")
        self.sequences = min(job.at_once, MAX_SEQUENCES)
        lengths = sorted(len(r.prompt_ids) + r.max_new_tokens for r in (*job.requests, *job.warm_up))
        params = llama.llama_context_default_params()
        params.n_ctx = -(-sum(lengths[-self.sequences :]) // PAD) * PAD
        params.n_seq_max = self.sequences
        params.kv_unified, params.flash_attn_type = True, llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.n_batch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = job.threads
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError("llama.cpp makes no context")
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)

    def step(self, running: list[Running]) -> list[Running]:
        """Compute what fits of the next tokens, in this order; those whose answer has grown."""
        count, grown = 0, []
        for one in running:
            tokens = one.next_tokens(BATCH_TOKENS - count)
            for token in tokens:
                self._put(count, token, one.done, one.sequence)
                count, one.done = count + 1, one.done + 1
            if tokens and not one.in_prompt:
                self._batch.logits[count - 1] = 1
                grown.append((one, count - 1))
        self._batch.n_tokens = count
        if status := llama.llama_decode(self._context, self._batch):
            raise ValueError(f"llama_decode returned {status}")
        for one, row in grown:
            logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(self._context, row), (self._vocabulary,))
            one.answer.append(int(logits.argmax()))
        return [one for one, _ in grown]

    def _put(self, at: int, token: int, position: int, sequence: int) -> None:
        batch = self._batch
        batch.token[at], batch.pos[at], batch.logits[at] = token, position, 0
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence

    def forget(self, sequence: int) -> None:
        llama.llama_memory_seq_rm(llama.llama_get_memory(self._context), sequence, -1, -1)


def generate(engine: Engine, requests: list[Request]) -> Answers:
    """All requests together, as many at a time as the engine has sequences."""
    waiting, free = deque(enumerate(requests)), list(range(engine.sequences))
    running: list[Running] = []
    first = [0.0] * len(requests)
    answers: list[list[int]] = [[] for _ in requests]
    started = time.perf_counter()
    while waiting or running:
        while waiting and free:
            running.append(Running(*waiting.popleft(), free.pop()))
        running.sort(key=lambda one: one.in_prompt)
        for one in engine.step(running):
            if len(one.answer) == 1:
                first[one.index] = time.perf_counter() - started
            if len(one.answer) == one.request.max_new_tokens:
                answers[one.index] = one.answer
                engine.forget(one.sequence)
                free.append(one.sequence)
                running.remove(one)
    return Answers(answers, first, time.perf_counter() - started)


def run(job: Job) -> None:
    engine = Engine(job)
    if job.warm_up:
        generate(engine, job.warm_up)
    report(job, answer(job, partial(generate, engine)), versions=versions("llama_cpp_python"))


if __name__ == "__main__":
    run(read_job())
