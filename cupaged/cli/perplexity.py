"""`cupaged perplexity`: exp of the mean negative log-likelihood of a text's tokens, each with context before it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cupaged.cli.options import engine_options
from cupaged.cli.prompts import read_text, source_name
from cupaged.cli.settings import Settings
from cupaged.cli.terminal import ProgressView, open_llm
from cupaged.errors import ConfigError, RequestError
from cupaged.outputs import RequestOutput
from cupaged.params import SamplingParams

if TYPE_CHECKING:
    from cupaged.engine import Engine

CONTEXT = 512


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@click.option("--context", type=click.IntRange(min=2), help=f"Tokens per window (default {CONTEXT}, or less if the model takes less).")
@click.option("--stride", type=click.IntRange(min=1), help="Tokens from one window to the next (default: half a window).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@engine_options
def command(file: Path, context: int | None, stride: int | None, as_json: bool, **options: Any) -> None:
    """How well a model predicts the text in FILE ("-" is standard input); lower is better.

    The text is read through overlapping windows. Each token but the first is counted once, in the first window that
    holds it; a shorter stride gives each token more context and takes longer.

    \b
    Examples:
      cupaged perplexity book.txt
      cupaged perplexity book.txt --context 1024 --stride 256 --json
    """
    settings = Settings.of(options)
    text = read_text(file)
    if stride and stride >= (context or CONTEXT):
        raise click.UsageError(f"--stride ({stride}) must be below --context ({context or CONTEXT})")
    llm = open_llm(settings)
    longest = (llm.engine.config.max_model_len or llm.engine.model_config.max_position) - 1
    if longest < 2:
        raise ConfigError(f"max_model_len is {longest + 1}: at least 3 are needed, two tokens of the text and one more")
    window = min(context or CONTEXT, longest)
    if context and context > longest:
        raise click.UsageError(f"--context ({context}) must be at most {longest}, the model's longest sequence less one")
    token_ids = llm.tokenizer.encode(text)
    if len(token_ids) < 2:
        raise RequestError(f"{source_name(file)} has too few tokens: at least 2 are needed, to predict one from another")
    step = min(stride or window // 2, window - 1)
    total, count = score(llm.engine, token_ids, window, step)
    perplexity = math.exp(total / count) if total / count < 700 else math.inf
    if as_json:
        result = {"perplexity": perplexity, "tokens": count, "negative_log_likelihood": total, "context": window, "stride": step}
        click.echo(json.dumps(result))
    else:
        click.echo(f"perplexity {perplexity:.4f} over {count} tokens (context {window}, stride {step})")


def windows(num_tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, first): score the tokens first .. stop - 1 with the context from `start` on; stride < window.

    Every token but the first is scored exactly once, and never without at least one token before it.
    """
    start, scored = 0, 1
    while scored < num_tokens:
        stop = min(start + window, num_tokens)
        yield start, stop, scored
        start, scored = start + stride, stop


def score(engine: Engine, token_ids: list[int], window: int, stride: int) -> tuple[float, int]:
    """Sum of the negative log-likelihoods in nats, and of how many tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    spans = {}
    for start, stop, first in windows(len(token_ids), window, stride):
        spans[engine.add_request(token_ids[start:stop], params)] = first - start
    total, count, done = 0.0, 0, 0
    with ProgressView() as progress:
        while engine.has_unfinished():
            for output in engine.step():
                if output.finished:
                    losses = _losses(output, spans[output.request_id])
                    total, count, done = total + math.fsum(losses), count + len(losses), done + 1
            progress("scoring", done, len(spans))
    return total, count


def _losses(output: RequestOutput, first: int) -> list[float]:
    """Negative log-likelihood of the prompt's tokens from `first` on."""
    assert output.prompt_logprobs is not None
    reported = zip(output.prompt_token_ids[first:], output.prompt_logprobs[first:], strict=True)
    return [-candidates[token].logprob for token, candidates in reported if candidates is not None]
