"""What sharing blocks gains: prefixes computed once, and beams and samples that keep one copy of what they have in common."""

from __future__ import annotations

from statistics import median

import numpy as np

from cupaged.bench.lab import Lab
from cupaged.bench.report import Cell, Plot, Report, Table
from cupaged.bench.runner import Run, serve
from cupaged.bench.stand_in import VOCABULARY, stand_in
from cupaged.engine import Engine
from cupaged.errors import WorkloadError
from cupaged.workloads.lengths import ALPACA
from cupaged.workloads.request import IntArray, TraceRequest, Workload

# ---- prefixes

QUESTION = 16
"""Tokens of a question behind the shared prefix."""


def prefix(lab: Lab) -> Report:
    """Requests one after another behind one prefix, by its length: without the prefix cache, and with it from cold."""
    rows: list[tuple[Cell, ...]] = []
    gains = []
    engines = {name: lab.engine(prefix_cache=name == "with") for name in ("without", "with")}
    for length in lab.whole_values:
        found: dict[str, Run] = {}
        for name, engine in engines.items():
            engine.reset_prefix_cache()
            workload = _behind_one_prefix(lab, length, engine.model_config.vocab_size)
            found[name] = lab.serve_one_by_one(engine, workload, f"{length} tokens, {name} the cache")
        plain = median(t.ttft for t in found["without"].times)
        cold, *later = (t.ttft for t in found["with"].times)
        gains.append(plain / median(later))
        rows.append((length, 1e3 * plain, 1e3 * cold, 1e3 * median(later), gains[-1], found["without"].computed, found["with"].computed, found["with"].hit_rate))
    header = ("shared tokens", "without, ms", "cold, ms", "warm, ms", "without / warm", "computed without", "computed with", "hit rate")
    return Report(
        gains[-1] >= 5,
        f"behind {lab.whole_values[-1]} shared tokens a warm first token comes {gains[-1]:.1f} times sooner, behind {lab.whole_values[0]} {gains[0]:.1f} times",
        (Table("median time to first token", header, tuple(rows)),),
        (Plot("bars", "how many times sooner the first token comes", "shared tokens", "times", lab.whole_values, {"gain": gains}),),
        {"gains": gains},
    )


def _behind_one_prefix(lab: Lab, length: int, vocab_size: int) -> Workload:
    if lab.requests < 2:
        raise WorkloadError("sharing takes at least 2 requests: raise --requests")
    rng = lab.rng()
    head = rng.integers(0, vocab_size, length)
    prompts = (np.concatenate([head, rng.integers(0, vocab_size, QUESTION)]).astype(np.int32) for _ in range(lab.requests))
    workload = Workload.of(f"{length} shared tokens", lab.seed, [TraceRequest(0.0, prompt, 1, "shared") for prompt in prompts])
    lab.remember(workload)
    return workload


# ---- beams and samples

TEXTS = (
    "List three ways in which a small town could save energy in winter, and explain each of them in a sentence.",
    "Write a short letter to a neighbour whose dog barks every night.",
    "Explain to a child why the moon changes its shape during a month.",
    "Turn the following notes into a friendly invitation: Saturday, garden, six o'clock, bring a salad.",
    "What should a beginner know before buying a used bicycle?",
    "Describe how bread is made, from the field to the table.",
    "Give arguments for and against homework in primary schools.",
    "Summarise what a library offers to people who do not read books.",
)
"""Instructions: beams of random tokens would not behave like beams of a text."""

PAPER = {("samples", 2): "6.1", ("samples", 4): "8.5", ("samples", 6): "9.8", ("beams", 2): "37.6", ("beams", 4): "53.1", ("beams", 6): "55.2"}
"""Blocks saved in percent, Alpaca (arXiv 2309.06180, figure 15)."""


def beam(lab: Lab) -> Report:
    """Blocks saved over blocks without sharing, summed over all steps, and the article's example counted."""
    rows: list[tuple[Cell, ...]] = []
    saved: dict[tuple[str, int], float] = {}
    engine = lab.engine(prefix_cache=False)
    for kind in ("samples", "beams"):
        for width in lab.whole_values:
            run = lab.serve(engine, _wide(lab, engine, kind, width), f"{width} {kind}")
            saved[kind, width] = 100 * blocks_saved(run)
            rows.append((kind, width, saved[kind, width], PAPER.get((kind, width), "-"), run.moments[-1].record.blocks_copied))
    prompt, whole = articles_example(lab.seed)
    holds = all(saved["beams", width] > saved["samples", width] for width in lab.whole_values if width > 1) and saved["beams", max(lab.whole_values)] >= 35
    return Report(
        holds,
        f"{max(lab.whole_values)} beams save {saved['beams', max(lab.whole_values)]:.1f} % of their blocks, as many samples {saved['samples', max(lab.whole_values)]:.1f} %;"
        f" 4 beams of 2,048 + 512 tokens save {100 * prompt:.0f} % of the prompt's blocks",
        (
            Table("blocks saved by sharing", ("sequences", "of a prompt", "saved, %", "the paper's Alpaca, %", "blocks copied, in all"), tuple(rows)),
            Table("4 beams, 2,048 + 512 tokens, counted", ("blocks saved", "%"), (("of the prompt's", 100 * prompt), ("of all, at the end", 100 * whole))),
        ),
        (Plot("bars", "blocks saved, %", "sequences of a prompt", "%", tuple(f"{w} {k}" for k, w in saved), {"saved": list(saved.values())}),),
        {"saved": {f"{kind} {width}": value for (kind, width), value in saved.items()}, "example": {"prompt": prompt, "all": whole}},
    )


def blocks_saved(run: Run) -> float:
    """Blocks that sharing saves over blocks without it, both summed over all steps."""
    shared = sum(m.record.blocks_shared for m in run.moments)
    return shared / (shared + sum(m.record.blocks_used for m in run.moments))


def _wide(lab: Lab, engine: Engine, kind: str, width: int) -> Workload:
    """Requests with several sequences each; answers have Alpaca's lengths, prompts are texts."""
    prompts = [_prompt(engine, TEXTS[i % len(TEXTS)]) for i in range(lab.requests)]
    outputs = ALPACA.output.draw(lab.requests, lab.max_len // 2, lab.rng())
    requests = [
        TraceRequest(0.0, prompt, int(output), None, *((width, 0) if kind == "samples" else (1, width))) for prompt, output in zip(prompts, outputs, strict=True)
    ]
    workload = Workload.of(f"{width} {kind}", lab.seed, requests, lab.max_len)
    lab.remember(workload)
    return workload


def _prompt(engine: Engine, text: str) -> IntArray:
    if engine.tokenizer is None:
        raise WorkloadError(f"beams are measured on texts, and {engine.model_name} has no tokenizer")
    return np.array(engine.tokenizer.encode(text), np.int32)


def articles_example(seed: int, prompt: int = 2048, output: int = 512, width: int = 4) -> tuple[float, float]:
    """Shares of blocks that sharing saves among beams that part at once and never fall back on one: of the prompt's, and
    of all at the end; counted with samples, which do just that."""
    engine = stand_in(4 * (prompt + output) // 16, seed, max_model_len=prompt + output, max_num_batched_tokens=prompt)
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, prompt).astype(np.int32)
    run = serve(engine, Workload.of("the article's beams", seed, [TraceRequest(0.0, tokens, output, n=width)]))
    last = max(run.moments, key=lambda m: m.record.blocks_shared + m.record.blocks_used).record
    of_prompt = width * (prompt // engine.config.block_size)
    return last.blocks_shared / of_prompt, last.blocks_shared / (last.blocks_shared + last.blocks_used)
