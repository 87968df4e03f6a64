"""The mixes of requests, by name: what people ask of an engine, in its essentials and without their texts.

Each takes (count, rate, seed, vocab_size, max_len): so many requests, so many a second (None: all at once), the seed of all
that is random, the model's vocabulary, and the longest prompt and output together. Token ids are random, so only what
is meant to be shared is shared.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cupaged.errors import WorkloadError
from cupaged.workloads import arrivals
from cupaged.workloads.lengths import ALPACA, SHAREGPT, Dataset, Lengths
from cupaged.workloads.request import IntArray, TraceRequest, Workload

CODE_SHARE = 0.32
"""Mean share of the longest sequence that a request of `code_batch` fills. The article's own batch is a picture: this one
is ours, with the mean that it names."""

Generator = Callable[[int, float | None, int, int, int], Workload]


def _random(count: int, seed: int, vocab_size: int) -> np.random.Generator:
    if count < 1:
        raise WorkloadError(f"a workload has at least 1 request, not {count}")
    if vocab_size < 1:
        raise WorkloadError(f"a vocabulary has at least 1 token, not {vocab_size}")
    return np.random.default_rng(seed)


def _tokens(rng: np.random.Generator, vocab_size: int, count: int) -> IntArray:
    return rng.integers(0, vocab_size, count, np.int32)


def independent(name: str, dataset: Dataset, count: int, rate: float | None, seed: int, vocab_size: int, max_len: int) -> Workload:
    """Requests that share nothing, with a dataset's lengths."""
    rng = _random(count, seed, vocab_size)
    at = arrivals.times(rate, count, rng)
    prompts, outputs = dataset.draw(count, max_len, rng)
    requests = [TraceRequest(float(t), _tokens(rng, vocab_size, int(p)), int(o)) for t, p, o in zip(at, prompts, outputs, strict=True)]
    return Workload.of(name, seed, requests, max_len)


def sharegpt(count: int, rate: float | None, seed: int, vocab_size: int, max_len: int) -> Workload:
    """Conversations: long answers to prompts of some length."""
    return independent("sharegpt", SHAREGPT, count, rate, seed, vocab_size, max_len)


def alpaca(count: int, rate: float | None, seed: int, vocab_size: int, max_len: int) -> Workload:
    """Instructions: short in, short out."""
    return independent("alpaca", ALPACA, count, rate, seed, vocab_size, max_len)


def code_batch(count: int, rate: float | None, seed: int, vocab_size: int, max_len: int, share: float = CODE_SHARE) -> Workload:
    """Code generation: on average a request fills such a share of the longest sequence, half of that with its prompt."""
    half = Lengths(share * max_len / 2)
    return independent("code_batch", Dataset(half, half), count, rate, seed, vocab_size, max_len)


# ---- prompts that share


def _shared(
    name: str, at: arrivals.Seconds, seed: int, max_len: int, prompts: list[tuple[str, IntArray]], outputs: IntArray
) -> Workload:
    """Requests from (session, prompt) pairs; a prompt too long for its answer loses its end."""
    requests = []
    for arrival, (session, prompt), wanted in zip(at, prompts, outputs, strict=True):
        output = min(int(wanted), max_len - 1)
        requests.append(TraceRequest(float(arrival), prompt[: max_len - output], output, session))
    return Workload.of(name, seed, requests, max_len)


def shared_prompt(count: int, rate: float | None, seed: int, vocab_size: int, max_len: int, num_heads: int = 8) -> Workload:
    """System prompts of half the longest sequence, some more in demand than others (1, 1/2, 1/3, ...), each question new."""
    rng = _random(count, seed, vocab_size)
    at = arrivals.times(rate, count, rng)
    heads = [_tokens(rng, vocab_size, max(1, max_len // 2)) for _ in range(num_heads)]
    demand = 1 / np.arange(1, num_heads + 1)
    chosen = rng.choice(num_heads, count, p=demand / demand.sum())
    questions = Lengths(max(1.0, max_len / 16)).draw(count, max(1, max_len // 4), rng)
    outputs = Lengths(max(1.0, max_len / 16)).draw(count, max(1, max_len // 4), rng)
    prompts = [(f"system-{head}", np.concatenate([heads[head], _tokens(rng, vocab_size, int(length))])) for head, length in zip(chosen, questions, strict=True)]
    return _shared("shared_prompt", at, seed, max_len, prompts, outputs)


def chats(count: int, rate: float | None, seed: int, vocab_size: int, max_len: int, num_open: int = 8) -> Workload:
    """Conversations that take turns at random; one that has no room for another turn makes way for a new one.

    A turn's prompt is everything said before and a new question. The answers in it are part of the trace: a model that
    answers otherwise finds its cache right up to the end of the previous prompt.
    """
    rng = _random(count, seed, vocab_size)
    at = arrivals.times(rate, count, rng)
    questions = Lengths(max(1.0, max_len / 24)).draw(count, max(1, max_len // 8), rng)
    outputs = Lengths(max(1.0, max_len / 16)).draw(count, max(1, max_len // 8), rng)
    empty: IntArray = np.empty(0, np.int32)
    histories, numbers, opened = [empty] * num_open, list(range(num_open)), num_open
    prompts = []
    for question, output in zip(questions, outputs, strict=True):
        place = int(rng.integers(num_open))
        if len(histories[place]) + int(question) + int(output) > max_len:
            histories[place], numbers[place], opened = empty, opened, opened + 1
        prompt = np.concatenate([histories[place], _tokens(rng, vocab_size, int(question))])
        prompts.append((f"chat-{numbers[place]}", prompt))
        histories[place] = np.concatenate([prompt, _tokens(rng, vocab_size, int(output))])
    return _shared("chats", at, seed, max_len, prompts, outputs)


def few_shot_trees(count: int, rate: float | None, seed: int, vocab_size: int, max_len: int, tasks: int = 4, variants: int = 4) -> Workload:
    """Trees of prompts: an instruction, under it sets of examples, under each of them questions."""
    rng = _random(count, seed, vocab_size)
    at = arrivals.times(rate, count, rng)
    roots = [_tokens(rng, vocab_size, max(1, max_len // 4)) for _ in range(tasks)]
    examples = [[_tokens(rng, vocab_size, max(1, max_len // 4)) for _ in range(variants)] for _ in range(tasks)]
    questions = Lengths(max(1.0, max_len / 16)).draw(count, max(1, max_len // 4), rng)
    outputs = Lengths(max(1.0, max_len / 32)).draw(count, max(1, max_len // 8), rng)
    prompts = []
    for length in questions:
        task, variant = int(rng.integers(tasks)), int(rng.integers(variants))
        parts = [roots[task], examples[task][variant], _tokens(rng, vocab_size, int(length))]
        prompts.append((f"task-{task}-{variant}", np.concatenate(parts)))
    return _shared("few_shot_trees", at, seed, max_len, prompts, outputs)


def adversarial_prefixes(count: int, rate: float | None, seed: int, vocab_size: int, max_len: int) -> Workload:
    """Four prompts that come again and again, between bursts of eight long ones that begin alike and never come again.

    The floods fill a cache with what nobody asks for a second time, and their common beginning makes them look useful.
    """
    rng = _random(count, seed, vocab_size)
    at = arrivals.times(rate, count, rng)
    heads = [_tokens(rng, vocab_size, max(1, max_len // 2)) for _ in range(4)]
    bait = _tokens(rng, vocab_size, max(1, max_len // 16))
    tail = max(1, max_len // 32)
    prompts = []
    for number in range(count):
        head = number % 12
        if head < 4:
            prompts.append((f"wanted-{head}", np.concatenate([heads[head], _tokens(rng, vocab_size, tail)])))
        else:
            prompts.append(("flood", np.concatenate([bait, _tokens(rng, vocab_size, max(1, max_len * 3 // 4))])))
    return _shared("adversarial_prefixes", at, seed, max_len, prompts, np.full(count, tail, np.int32))


GENERATORS: dict[str, Generator] = {
    "sharegpt": sharegpt,
    "alpaca": alpaca,
    "code_batch": code_batch,
    "shared_prompt": shared_prompt,
    "chats": chats,
    "few_shot_trees": few_shot_trees,
    "adversarial_prefixes": adversarial_prefixes,
}


def make(name: str, count: int, rate: float | None, seed: int, vocab_size: int, max_len: int) -> Workload:
    """A workload by its mix's name. Raises WorkloadError for a name that there is not, and what the mix itself raises."""
    if name not in GENERATORS:
        raise WorkloadError(f"there is no workload {name!r}; there are {', '.join(GENERATORS)}, and traces (a .jsonl file)")
    return GENERATORS[name](count, rate, seed, vocab_size, max_len)
