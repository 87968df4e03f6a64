"""Running a model without engine or scheduler: plans written by hand, over a block table fixed in the test."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cupaged.backends import open_backend
from cupaged.checkpoint import open_checkpoint
from cupaged.model.kv_store import KVStore
from cupaged.model.llama import Llama
from cupaged.model.rope import rope_tables
from cupaged.model.runner import Runner
from cupaged.model.weights import load_weights
from cupaged.params import SamplingParams
from cupaged.step_plan import SampleSpec, ScheduledSequence, StepPlan


def open_runner(
    path: Path, device: str, num_blocks: int, block_size: int, max_rows: int = 256, *, dtype: str = "auto", kv_dtype: str = "auto", threads: int | None = None
) -> Runner:
    backend, checkpoint = open_backend(device, threads, dtype=dtype, kv_dtype=kv_dtype), open_checkpoint(path)
    cos, sin = rope_tables(checkpoint.config, num_blocks * block_size)
    model = Llama(checkpoint.config, load_weights(checkpoint, backend), backend.upload(cos), backend.upload(sin))
    kv = KVStore(backend, checkpoint.config, num_blocks, block_size)
    return Runner(backend, model, kv, max_rows=max_rows, max_seqs=4)


def greedy(
    runner: Runner, prompt: list[int], count: int, blocks: list[int], block_size: int, chunk: int | None = None
) -> tuple[list[int], list[float]]:
    """`count` greedy tokens and their logprobs, all KV in `blocks`; the prompt in chunks where `chunk` is given."""
    params = SamplingParams(temperature=0, logprobs=1)
    tokens, logprobs = list(prompt), []
    start = 0
    while len(tokens) < len(prompt) + count:
        stop = min(len(tokens), start + chunk) if chunk else len(tokens)
        spec = SampleSpec(params, row_id=0, seed=0, index=0) if stop == len(tokens) else None
        table = np.array(blocks[: -(-stop // block_size)], np.int32)
        item = ScheduledSequence(0, start, np.array(tokens[start:stop], np.int32), table, () if spec is None else (spec,))
        output = runner.run(StepPlan(0, block_size, (item,)))
        start = stop
        if spec is not None:
            tokens.append(int(output.token_ids[0]))
            assert output.logprobs is not None
            logprobs.append(float(output.logprobs.logprobs[0]))
    return tokens[len(prompt) :], logprobs
