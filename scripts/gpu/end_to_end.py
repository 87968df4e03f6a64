"""The whole engine, requests in and tokens out: Llama 8B's shape with random weights against the floor, and SmolLM2."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from cupaged import LLM, SamplingParams
from cupaged.config import ModelConfig
from cupaged.hub import DEFAULT_MODEL, alias_path, is_cached
from cupaged.step_plan import StepRecord
from gpu.bench import Bench
from gpu.cases import Case, Figures, Skip
from gpu.machine import ROOT, free_memory
from gpu.random_model import LLAMA_8B, TINY, open_random, weight_bytes

WORKLOAD = ROOT / "tests" / "golden" / "workload.json"
BLOCK = 16
OTHER_BYTES = 3 << 30
"""What activations, logits and kernels of the large model take, roughly."""

STEADY = 0.5
"""Share of the full decode steps, the last ones, that are looked at: the first ones compile kernels and capture graphs."""


class Watch:
    """When every step ended, and what it was."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.steps: list[tuple[float, StepRecord]] = []
        llm.engine.observers.append(lambda record: self.steps.append((time.perf_counter(), record)))

    def generate(self, prompts: list[list[int]], new: int) -> Figures:
        """Greedy answers of `new` tokens each, all requests there at the start."""
        self.steps.clear()
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True))
        seconds = time.perf_counter() - started
        decode = [
            (end - before, record) for (before, _), (end, record) in zip(self.steps, self.steps[1:], strict=False)
            if record.num_decode == record.num_tokens == len(prompts)
        ]  # fmt: skip
        decode = decode[int(len(decode) * (1 - STEADY)) :]
        if not decode:
            raise Skip(f"no step of {len(prompts)} sequences was seen")
        first = max((o.metrics.first_token or started) - started for o in outputs)
        step = statistics.median(seconds for seconds, _ in decode)
        return {
            "step ms": 1e3 * step, "host share %": 100 * statistics.median(1 - record.run_seconds / seconds for seconds, record in decode),
            "decode tokens/s": len(prompts) / step, "prompt tokens/s": sum(map(len, prompts)) / first, "all tokens/s": len(prompts) * new / seconds,
        }  # fmt: skip


def large_model(bench: Bench) -> Iterator[Case]:
    """Llama 8B's shape (bfloat16, random weights) at batch 1, 32 and 128, a prompt of 1,024 tokens each."""
    batches, prompt, new = ((1, 2), 8, 4) if bench.tiny else ((1, 32, 128), 1024, 48)
    opened: list[Watch] = []
    for batch in batches:
        yield Case(f"batch {batch}, prompts of {prompt}", partial(_large, bench, opened, batch, prompt, new, max(batches)))
    yield Case("closed", partial(_close, bench, opened))


def _close(bench: Bench, opened: list[Watch]) -> Figures:
    """The model's memory is the next part's."""
    opened.clear()
    bench.release()
    return {}


def _large(bench: Bench, opened: list[Watch], batch: int, prompt: int, new: int, most: int) -> Figures:
    config, bandwidth = TINY if bench.tiny else LLAMA_8B, bench.bandwidth
    if not opened:
        opened.append(Watch(_open_large(bench, config, most, prompt + new + 16)))
    prompts = np.random.default_rng(batch).integers(3, config.vocab_size, (batch, prompt)).tolist()
    figures = opened[0].generate(prompts, new)
    context = prompt + new * (1 - STEADY / 2)
    floor = (weight_bytes(config) + batch * context * config.kv_bytes_per_token("bfloat16")) / bandwidth
    return figures | {"floor ms": 1e3 * floor, "% of the floor's speed": 100 * 1e3 * floor / figures["step ms"], "target %": 80 if batch == 1 else 75}


def _open_large(bench: Bench, config: ModelConfig, most: int, length: int) -> LLM:
    """The engine with room for `most` sequences of `length` tokens. Raises Skip where the memory is not there."""
    bench.release()
    num_blocks, free = most * -(-length // BLOCK) + 8, free_memory(bench.device)
    wanted = weight_bytes(config) + 2 * config.vocab_size * config.hidden_size + num_blocks * BLOCK * config.kv_bytes_per_token("bfloat16") + OTHER_BYTES
    if free is not None and free < wanted:
        raise Skip(f"wants {wanted / 2**30:.0f} GiB of memory, {free / 2**30:.0f} are free")
    return open_random(
        config, device=_device_option(bench), max_num_seqs=most, max_model_len=length, prefix_cache=False, num_blocks=num_blocks, block_size=BLOCK,
        max_num_batched_tokens=most * 4 if bench.tiny else 8192,
    )  # fmt: skip


def _device_option(bench: Bench) -> str:
    device: Any = bench.device
    return f"cuda:{device._device.id}" if device.name == "cuda" else "emu"


def model_path(given: str) -> str:
    """What --model says, else the cached default. Raises Skip where there is neither."""
    if given:
        return given
    if not is_cached(DEFAULT_MODEL):
        raise Skip(f"no model: cupaged pull {DEFAULT_MODEL}, or --model FILE")
    return str(alias_path(DEFAULT_MODEL))


def small_model(bench: Bench) -> Iterator[Case]:
    """SmolLM2 as users run it, in graphs and without, prompts of 128 tokens."""
    batches, prompt, new = ((2,), 8, 4) if bench.tiny else ((1, 32, 128), 128, 128)
    for eager in (False, True):
        opened: list[Watch] = []
        for batch in batches:
            title = f"batch {batch}, prompts of {prompt}" + (", --enforce-eager" if eager else "")
            yield Case(title, partial(_small, bench, opened, batch, prompt, new, max(batches), eager))


def _small(bench: Bench, opened: list[Watch], batch: int, prompt: int, new: int, most: int, eager: bool) -> Figures:
    length = prompt + new + 16
    options: dict[str, Any] = {
        "device": _device_option(bench), "max_num_seqs": most, "max_model_len": length, "prefix_cache": False, "enforce_eager": eager,
        "num_blocks": most * -(-length // BLOCK) + 8, "block_size": BLOCK, "max_num_batched_tokens": max(most, 8 if bench.tiny else 4096),
    }  # fmt: skip
    if not opened:
        llm = open_random(TINY, **options) if bench.tiny else LLM(model_path(bench.model), dtype="bfloat16", **options)
        opened.append(Watch(llm))
    return opened[0].generate(prompts_of(batch, prompt, TINY.vocab_size if bench.tiny else None), new)


def prompts_of(batch: int, length: int, vocabulary: int | None = None) -> list[list[int]]:
    """Pieces of the stored workload's prompts; below `vocabulary` where that is given."""
    text = [token for request in json.loads(WORKLOAD.read_text(encoding="utf-8")) for token in request["prompt_ids"]]
    text *= -(-batch * length // len(text)) + 1
    pieces = [text[i * (length + 1) : i * (length + 1) + length] for i in range(batch)]
    return pieces if vocabulary is None else [[token % vocabulary for token in piece] for piece in pieces]
