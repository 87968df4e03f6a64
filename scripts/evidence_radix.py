"""The RadixAttention paper's claims (arXiv 2312.07104), simulated: what its tree gains where prompts share, what it finds, and
what it costs where they do not.

The machine is the paper's for small models, an A10G with Llama-7B, under a roofline: no overhead is fitted, for there is no
figure to fit it to. With the tree comes the paper's order of service, the longest shared prefix first. Its programs are not here. These are of their kinds; the lengths of chats are the paper's, all others ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cupaged.bench.report import Cell, Plot, Report, Table
from cupaged.presets import Device, GiB, ModelShape
from cupaged.sequence import Request, Status
from cupaged.sim.report import simulate
from cupaged.sim.setup import Setup
from cupaged.sim.simulator import Simulator
from cupaged.step_plan import common_prefix
from cupaged.workloads.generators import few_shot_trees, make
from cupaged.workloads.lengths import SHAREGPT
from cupaged.workloads.request import TraceRequest, Workload

Tokens = npt.NDArray[np.int32]
Program = Sequence[tuple[Tokens, int]]
"""Turns of one conversation: what is new in the prompt, and how many tokens are answered. All before is in the prompt, too."""

LLAMA_7B = ModelShape("llama-7b", 32000, 4096, 11008, 32, 32, 32, 128, 4096)
A10G = Device("a10g", 24 * GiB, 600e9, 70e12, "bfloat16")
MACHINE = Setup(LLAMA_7B, A10G)

# ---- programs


def _tokens(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(0, LLAMA_7B.vocab_size, count, np.int32)


def questions(rng: np.random.Generator) -> list[Program]:
    """Five examples of 128 tokens for each of 16 subjects; 25 questions of 128 tokens behind each, answered with a letter."""
    examples = [_tokens(rng, 5 * 128) for _ in range(16)]
    return [[(np.concatenate([examples[n % 16], _tokens(rng, 128)]), 1)] for n in range(400)]


def agents(rng: np.random.Generator) -> list[Program]:
    """48 agents with one instruction of 1,000 tokens, and six rounds of 32 to 64 tokens in and out."""
    instruction = _tokens(rng, 1000)
    return [[(_rounds(rng, instruction, n), int(rng.integers(32, 65))) for n in range(6)] for _ in range(48)]


def _rounds(rng: np.random.Generator, instruction: Tokens, number: int) -> Tokens:
    observed = _tokens(rng, int(rng.integers(32, 65)))
    return observed if number else np.concatenate([instruction, observed])


def chats(rng: np.random.Generator, least: int, most: int) -> list[Program]:
    """64 conversations of four turns, 256 to 512 tokens in and so many out."""
    return [[(_tokens(rng, int(rng.integers(256, 513))), int(rng.integers(least, most + 1))) for _ in range(4)] for _ in range(64)]


def strangers(rng: np.random.Generator) -> list[Program]:
    """100 requests of ShareGPT's lengths that share nothing."""
    prompts, outputs = SHAREGPT.draw(100, 2048, rng)
    return [[(_tokens(rng, int(prompt)), int(output))] for prompt, output in zip(prompts, outputs, strict=True)]


PROGRAMS = {
    "few-shot questions": questions,
    "agents": agents,
    "chats, short answers": lambda rng: chats(rng, 4, 8),
    "chats, long answers": lambda rng: chats(rng, 256, 512),
    "nothing shared": strangers,
}


@dataclass(frozen=True)
class Served:
    """programs a second; mean seconds of a program; prompt tokens found in the cache, of all."""

    rate: float
    latency: float
    hit_rate: float


def serve(programs: Sequence[Program], prefix_cache: bool, at_once: int) -> Served:
    """Run programs, so many at a time; a turn begins when the one before it has ended."""
    setup = replace(MACHINE, prefix_cache=prefix_cache, queue="lpm" if prefix_cache else "fcfs").decided()
    simulator = Simulator(setup.scheduler(), setup.roofline())
    todo = list(reversed(programs))
    going: dict[Request, tuple[Program, float]] = {}
    latencies = []
    prompts = 0
    while todo or going:
        while todo and len(going) < at_once:
            (tokens, output), *later = todo.pop()
            going[simulator.add(TraceRequest(simulator.now, tokens, output))] = later, simulator.now
        simulator.step()
        for request in [request for request in going if request.status is Status.FINISHED]:
            later, began = going.pop(request)
            prompts += request.num_prompt
            if later:
                (tokens, output), *later = later
                prompt = np.concatenate([request.sequences[0].tokens, tokens])
                going[simulator.add(TraceRequest(simulator.now, prompt, output))] = later, began
            else:
                latencies.append(simulator.now - began)
    return Served(len(programs) / simulator.now, float(np.mean(latencies)), simulator.cached_tokens / prompts)


# ---- the claims


def gains(kinds: Sequence[str] = tuple(PROGRAMS)) -> Report:
    """Programs a second with all of them at once, and the latency of one alone: without the prefix cache, and with it."""
    rows: list[tuple[Cell, ...]] = []
    faster: dict[str, float] = {}
    sooner: dict[str, float] = {}
    for kind in kinds:
        programs = PROGRAMS[kind](np.random.default_rng(0))
        off, on = (serve(programs, cached, len(programs)) for cached in (False, True))
        alone_off, alone_on = (serve(programs, cached, 1) for cached in (False, True))
        faster[kind], sooner[kind] = on.rate / off.rate, alone_off.latency / alone_on.latency
        rows.append((kind, off.rate, on.rate, faster[kind], alone_off.latency, alone_on.latency, sooner[kind], 100 * on.hit_rate))
    header = ("programs", "a second without", "with", "gain", "s alone without", "with", "gain alone", "hits, %")
    fast, soon = (max(found, key=found.__getitem__) for found in (faster, sooner))
    return Report(
        faster[fast] >= 6.4 / 2 and sooner[soon] >= 3.7 / 2 and min(faster.values()) >= 0.97 and faster.get("chats, long answers", 1) < 1.5,
        f"up to {faster[fast]:.1f} times the throughput ({fast}) and up to {sooner[soon]:.1f} times lower latency ({soon})"
        + "".join(f"; {kind} {faster[kind]:.2f} times" for kind in ("chats, long answers", "nothing shared") if kind in faster and kind != fast),
        (Table("with and without the prefix cache, Llama-7B on an A10G", header, tuple(rows)),),
        (Plot("bars", "throughput with the prefix cache over without", "programs", "times", tuple(kinds), {"gain": list(faster.values())}),),
    )


def optimum(orders: Sequence[str] = ("dfs", "lpm")) -> Report:
    """Tokens that a pool for little more than the longest request computes of few-shot prompts that all wait, one at a time,
    by the order of service; and the tokens on the edges of the prompts' radix tree."""
    longest = 1024
    workload = few_shot_trees(32, None, 0, LLAMA_7B.vocab_size, longest)
    # the one token of an answer is sampled and never computed
    requests = [TraceRequest(0.0, request.prompt, 1) for request in workload.requests]
    edges = edge_tokens([request.prompt for request in requests])
    setup = replace(MACHINE, num_blocks=longest // 16 + 1, max_len=longest, max_num_seqs=1)
    found = {
        order: simulate(Workload.of("few-shot trees", 0, requests, longest), replace(setup, queue=order)).computed_tokens
        for order in dict.fromkeys(("fcfs", *orders))
    }
    rows = tuple((order, computed, computed / edges) for order, computed in found.items())
    return Report(
        all(found[order] == edges for order in orders),
        f"the tree's edges have {edges:,} tokens; " + ", ".join(f"{order} computes {computed:,}" for order, computed in found.items()),
        (Table("32 few-shot prompts in a pool for one", ("order", "tokens computed", "of the tree's edges"), rows),),
    )


def edge_tokens(prompts: Sequence[Tokens]) -> int:
    """Tokens on the edges of the radix tree of distinct prompts: in the order of their text each adds what it does not share
    with the one before it."""
    ordered = sorted(prompts, key=lambda prompt: prompt.tolist())
    return sum(len(p) - common_prefix(p, before) for before, p in zip([ordered[0][:0], *ordered], ordered, strict=False))


def cost(block_size: int = 16, repeat: int = 5) -> Report:
    """Processor time that the tree adds to planning and booking 100 ShareGPT requests that share nothing, over their run."""
    setup = replace(MACHINE, block_size=block_size).decided()
    workload = make("sharegpt", 100, None, 0, LLAMA_7B.vocab_size, LLAMA_7B.max_position)
    rounds = [[simulate(workload, replace(setup, prefix_cache=cached), states_every=0) for cached in (False, True)] for _ in range(repeat)]
    off, on = (min(run.host_seconds for run in runs) for runs in zip(*rounds, strict=True))
    seconds = rounds[0][0].seconds
    share = (on - off) / seconds
    header = ("block size", "bookkeeping without, s", "with the tree, s", "the run, s (simulated)", "the tree, % of it", "paper, %")
    return Report(
        share < 0.003,
        f"with blocks of {block_size} the tree takes {on - off:.3f} s of processor time in a run of {seconds:.1f} s: {100 * share:.2f} %",
        (Table("100 ShareGPT requests, Llama-7B on an A10G", header, ((block_size, off, on, seconds, 100 * share, 100 * 0.2 / 74.3),)),),
    )
