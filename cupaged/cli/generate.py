"""`cupaged generate`: prompts in, answers out, as they come on a terminal and in the order of the prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cupaged.cli import prompts
from cupaged.cli.json_output import as_object
from cupaged.cli.options import answer_options, engine_options, sampling_options
from cupaged.cli.prompts import Job, Message
from cupaged.cli.settings import Settings
from cupaged.cli.stats import Stats
from cupaged.cli.terminal import ProgressView, error_line, open_llm
from cupaged.errors import CheckpointError, ConfigError, RequestError
from cupaged.outputs import CompletionOutput, RequestOutput
from cupaged.params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from cupaged import LLM

MAX_TOKENS = 256


@click.command()
@click.argument("prompt", required=False)
@click.option("--file", "-f", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path), help="One prompt a line, or JSON lines.")
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template.")
@click.option("--system", metavar="TEXT", help="The system message of --chat.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a prompt.")
@click.option("--stats", is_flag=True, help="Speed and memory on stderr.")
@engine_options
@sampling_options
@answer_options
def command(
    prompt: str | None, file: Path | None, chat: bool, system: str | None, as_json: bool, stats: bool, **options: Any
) -> None:
    """Complete PROMPT, standard input ("-" or no PROMPT) or the prompts of a file.

    A file holds one prompt a line, or one JSON object a line with "prompt", "messages" or "prompt_token_ids" and any
    parameter: {"prompt": "Once", "max_tokens": 20, "seed": 1}

    Options from --model on may also stand in the environment (CUPAGED_BLOCK_SIZE=32) or in a config file
    (block-size = 32).

    \b
    Examples:
      cupaged generate "The three primary colours are"
      cupaged generate --chat "Why is the sky blue?" --temperature 0
      cupaged generate --model ./my-llama --max-tokens 40 < prompt.txt
      cupaged generate "Once upon a time" --n 3
      cupaged generate "Once upon a time" --beam-width 4
      cupaged generate --file prompts.jsonl --json --stats > answers.jsonl
    """
    if prompt is not None and file is not None:
        raise click.UsageError("give a prompt or --file, not both")
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat")
    settings = Settings.of(options, max_tokens=MAX_TOKENS)
    jobs = prompts.from_file(file) if file is not None else [prompts.single(prompt)]
    llm = open_llm(settings)
    watch = Stats(llm.engine)
    batch = Batch(llm, settings, chat, system)
    try:
        if file is None and not as_json and sys.stdout.isatty():
            batch.stream(jobs[0], watch)
        else:
            batch.run(jobs, watch, _json_line if as_json else _plain)
    finally:
        if stats:
            watch.show(as_json)
    if batch.failed:
        raise click.exceptions.Exit(1)


def _json_line(index: int, job: Job, output: RequestOutput) -> None:
    click.echo(json.dumps(as_object(index, job.source, output), ensure_ascii=False))


def _plain(index: int, job: Job, output: RequestOutput) -> None:
    for answer in output.outputs:
        _write(answer, headed=len(output.outputs) > 1)


def _write(answer: CompletionOutput, headed: bool) -> None:
    """A complete answer; one of several stands under a line with its index, and its score if it has one."""
    if headed:
        click.echo(f"[{answer.index}]" if answer.score is None else f"[{answer.index}] score {answer.score:.4f}")
    click.echo(answer.text)


class _Screen:
    """The answers to one prompt: a single one is written as it comes, each of several when it is complete."""

    def __init__(self) -> None:
        self._shown = 0
        self._written: set[int] = set()

    def show(self, output: RequestOutput) -> None:
        if len(output.outputs) == 1:
            text = output.outputs[0].text
            click.echo(text[self._shown :], nl=output.finished)
            self._shown = len(text)
            return
        for answer in output.outputs:
            if answer.finish_reason is not None and answer.index not in self._written:
                self._written.add(answer.index)
                _write(answer, headed=True)


class Batch:
    """Runs jobs on an engine; one that cannot run is told on stderr and counted in `failed`, the others go on."""

    def __init__(self, llm: LLM, settings: Settings, chat: bool, system: str | None) -> None:
        self._llm, self._settings = llm, settings
        self._chat, self._system = chat, system
        self.failed = 0

    def stream(self, job: Job, watch: Stats) -> None:
        """One prompt, answered on a terminal."""
        prompt, params = self._request(job)
        # which answers are the best, beams among them, is only known at the end
        ranked = isinstance(params, BeamSearchParams) or params.num_samples > params.n
        screen = _Screen()
        engine = self._llm.engine
        engine.add_request(prompt, params, cache_salt=self._salt(job))
        while engine.has_unfinished():
            for output in engine.step():
                if output.finished or not ranked:
                    screen.show(output)
                if output.finished:
                    watch.finished(output)

    def run(self, jobs: list[Job], watch: Stats, write: Callable[[int, Job, RequestOutput], None]) -> None:
        """All answers, each written when it and those before it are finished."""
        engine = self._llm.engine
        waiting = self._add(jobs)
        done: dict[str, RequestOutput] = {}
        with ProgressView() as progress:
            while engine.has_unfinished():
                for output in engine.step():
                    if output.finished:
                        done[output.request_id] = output
                        watch.finished(output)
                while waiting and waiting[0] in done:
                    index = int(waiting[0])
                    with progress.paused():
                        write(index, jobs[index], done[waiting.pop(0)])
                if len(jobs) > 1 and sys.stderr.isatty():
                    progress("answering", len(done), len(waiting) + len(done))

    def _add(self, jobs: list[Job]) -> list[str]:
        """Queue the jobs under their place in the list; the ids of those that can run."""
        added = []
        for index, job in enumerate(jobs):
            try:
                if job.error is not None:
                    raise RequestError(job.error)
                prompt, params = self._request(job)
                added.append(self._llm.engine.add_request(prompt, params, str(index), cache_salt=self._salt(job), only_finished=True))
            except (RequestError, ConfigError, CheckpointError) as error:
                if not job.source:
                    raise
                error_line(f"{job.source}: {error}")
                self.failed += 1
        return added

    def _request(self, job: Job) -> tuple[str | list[int], SamplingParams | BeamSearchParams]:
        return self._prompt(job), self._settings.params(self._llm.engine.default_params, **job.params)

    def _salt(self, job: Job) -> str:
        return self._settings.cache_salt if job.salt is None else job.salt

    def _prompt(self, job: Job) -> str | list[int]:
        if isinstance(job.prompt, list) and isinstance(job.prompt[0], dict):
            return self._llm.tokenizer.encode_chat(job.prompt)
        if self._chat and isinstance(job.prompt, str):
            messages: list[Message] = [{"role": "user", "content": job.prompt}]
            if self._system is not None:
                messages.insert(0, {"role": "system", "content": self._system})
            return self._llm.tokenizer.encode_chat(messages)
        return job.prompt
