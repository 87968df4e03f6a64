"""The options that commands share: the engine's, and a request's parameters.

An option only names a field of EngineConfig, SamplingParams or BeamSearchParams and reads its type; what it means and
which values are right is theirs to say. An option that nobody gave stays None and leaves the field's default alone.
`settings.py` sorts them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import click

from cupaged.cli import config_file
from cupaged.hub import DEFAULT_MODEL

F = TypeVar("F", bound=Callable[..., Any])


def memory_size(text: Any) -> int:
    """Bytes: 536870912, 512MiB (powers of 1024), 512MB or 512M (powers of 1000)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|b)?\s*", str(text), re.IGNORECASE)
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size such as 512MB or 2GiB")
    number, prefix, binary = match.groups()
    power = "kmgt".index(prefix.lower()) + 1 if prefix else 0
    return int(Fraction(number) * (1024 if binary else 1000) ** power)


def logit_bias(text: Any) -> tuple[int, float]:
    """One pair ID=VALUE."""
    try:
        token, number = str(text).split("=")
        return int(token), float(number)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not of the form ID=VALUE, such as 42=-100") from error


def early_stopping(text: Any) -> bool | str:
    """true, false or never."""
    value = str(text).lower()
    if value not in ("true", "false", "never"):
        raise click.BadParameter(f"{text!r} is not one of true, false, never")
    return value if value == "never" else value == "true"


def _option(*names: str, **settings: Any) -> Callable[[F], F]:
    """A click option that may also come from the environment: --block-size from CUPAGED_BLOCK_SIZE."""
    if not settings.get("multiple"):
        long = next(name for name in names if name.startswith("--")).split("/")[0]
        settings["envvar"] = "CUPAGED_" + long[2:].upper().replace("-", "_")
    return click.option(*names, **({"default": None} | settings))


ENGINE_OPTIONS = (
    _option("--model", "-m", default=DEFAULT_MODEL, show_default=True, help="Folder, .gguf file, hub id or built-in name."),
    _option("--device", help="auto, cuda, cuda:1, cpu, reference (slow and exact), or emu (the CUDA kernels, emulated)."),
    _option("--dtype", help="Storage of the weights: auto (the checkpoint's), float32, float16, bfloat16, int8."),
    _option("--kv-cache-dtype", help="Storage of keys and values: auto (float32), float32, float16, bfloat16, int8 (CPU), fp8 (GPU, emu)."),
    _option("--block-size", type=int, help="Tokens per KV block, 1 to 256 (default 16)."),
    _option("--num-blocks", type=int, help="KV blocks in the pool (default: by its size)."),
    _option("--kv-cache-memory", type=memory_size, metavar="SIZE", help="The pool's size: 512MB, 2GiB (default: at most a quarter of the free memory)."),
    _option("--max-model-len", type=int, help="Longest sequence in tokens (default: the model's, or what the pool holds)."),
    _option("--max-num-batched-tokens", type=int, help="Tokens computed in one step (default 512, on a GPU 2048)."),
    _option("--max-num-seqs", type=int, help="Sequences computed in one step (default 64, on a GPU 256)."),
    _option("--prefix-cache/--no-prefix-cache", help="Keep computed prefixes and reuse them (default)."),
    _option("--eviction", help="Which cached block goes first: lru (default), fifo, lfu, weighted."),
    _option("--queue", help="Who is served next: fcfs (default), lpm (longest cached prefix), dfs (depth first in the cache)."),
    _option("--preemption", help="When the pool is full: recompute (default), swap to host memory, or auto."),
    _option("--swap-space", type=memory_size, metavar="SIZE", help="Host memory for swapping (default 1GiB)."),
    _option("--threads", type=int, help="CPU threads (default: the cores this process may use)."),
    _option("--pin-threads/--no-pin-threads", help="Keep each thread on a core of its own while it computes."),
    _option("--gpu-memory-utilization", type=float, help="Share of the GPU's memory for weights and pool (default 0.9)."),
    _option("--overlap/--no-overlap", help="Plan a step while the one before is computed (default on a GPU)."),
    _option("--enforce-eager/--no-enforce-eager", help="GPU, emu: launch a decode step's kernels one by one, not as one graph."),
    _option("--batch-invariant/--no-batch-invariant", help="Insist on logits that are the same bits in any batch; the CPU's are, at no cost."),
)

SAMPLING_OPTIONS = (
    _option("--temperature", type=float, help="0 is greedy (default: the model's, else 1)."),
    _option("--top-k", type=int, help="Keep the k most likely tokens; 0: all."),
    _option("--top-p", type=float, help="Keep the likeliest tokens up to this probability."),
    _option("--min-p", type=float, help="Keep tokens at least this likely, relative to the likeliest."),
    _option("--repetition-penalty", type=float, help="Above 1: fewer repetitions of prompt and answer."),
    _option("--presence-penalty", type=float, help="-2 to 2, once for each token already in the answer."),
    _option("--frequency-penalty", type=float, help="-2 to 2, for each time a token is in the answer."),
    _option("--seed", type=int, help="Same seed, same answer."),
    _option("--max-tokens", type=int, help="Most tokens of an answer (default 256, in a chat 512)."),
    _option("--min-tokens", type=int, help="No end before this many tokens."),
    _option("--stop", multiple=True, metavar="TEXT", help="End the answer at this text; repeatable."),
    _option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="End at this token; repeatable."),
    _option("--bad-word", "bad_words", multiple=True, metavar="TEXT", help="Never write this; repeatable."),
    _option("--logit-bias", type=logit_bias, multiple=True, metavar="ID=VALUE", help="Add VALUE to a token's logit; repeatable."),
    _option("--ignore-eos/--no-ignore-eos", help="Go on after the model's end of text."),
    _option("--logprobs", type=int, help="Report this many likely tokens per token (--json)."),
    _option("--prompt-logprobs", type=int, help="The same for the prompt's tokens (--json)."),
    _option("--skip-special-tokens/--no-skip-special-tokens", help="Leave special tokens out of the text (default)."),
    _option("--include-stop-str-in-output/--no-include-stop-str-in-output", help="Keep the stop text."),
)

ANSWER_OPTIONS = (
    _option("--n", type=int, help="Answers to each prompt."),
    _option("--best-of", type=int, help="Answers to make, of which the --n likeliest are given."),
    _option("--beam-width", type=int, help="Search so many of the likeliest answers instead of sampling."),
    _option("--length-penalty", type=float, help="Of a beam's score: above 0 prefers long answers (default 1)."),
    _option("--early-stopping", type=early_stopping, metavar="WHEN", help="When a beam search ends: true, false (default) or never."),
    _option("--cache-salt", metavar="TEXT", help="Share cached prefixes only with requests of the same salt."),
)


def _read_config(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    path = value or config_file.default_path()
    if value is None and not path.is_file():
        return
    carrier = _with(ENGINE_OPTIONS + SAMPLING_OPTIONS + ANSWER_OPTIONS)(click.Command("all"))
    ctx.default_map = config_file.read(path, carrier.params)


def _with(options: tuple[Callable[[Any], Any], ...]) -> Callable[[F], F]:
    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_CONFIG_OPTION = click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar="CUPAGED_CONFIG",
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    help="TOML file of options (default: ~/.config/cupaged/config.toml).",
)

engine_options = _with((*ENGINE_OPTIONS, _CONFIG_OPTION))
sampling_options = _with(SAMPLING_OPTIONS)
answer_options = _with(ANSWER_OPTIONS)
