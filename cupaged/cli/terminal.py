"""What the user sees on stderr: progress while a model is fetched and loaded, and bars; and what Ctrl-C means."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

import cupaged
from cupaged.cli.settings import Settings

if TYPE_CHECKING:
    from cupaged import LLM


def error_line(message: object) -> None:
    click.echo(f"error: {message}", err=True)


class Screen(Console):
    """A console that leaves a reader that went away to the command line's door, where rich would end the program."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class ProgressView:
    """Shows progress(stage, done, total) calls: bars on a terminal, else a line for each stage that takes its time.

    A stage without a total is an announcement: it is told at once. Others are told when they last some seconds.
    """

    def __init__(self) -> None:
        self._bars = _bars() if sys.stderr.isatty() else None
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, float] = {}
        self._told: set[str] = set()

    def __enter__(self) -> ProgressView:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bars:
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._bars:
            self._draw(self._bars, stage, done, total)
        elif stage not in self._told:
            started = self._started.setdefault(stage, time.monotonic())
            if not total or time.monotonic() - started > 3:
                self._told.add(stage)
                click.echo(stage, err=True)

    def _draw(self, bars: Progress, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            for task in self._tasks.values():
                bars.update(task, visible=False)
            self._tasks[stage] = bars.add_task(stage, total=total or None)
        bars.update(self._tasks[stage], completed=done)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While a line of the answer is written to the same terminal."""
        if self._bars:
            self._bars.stop()
        try:
            yield
        finally:
            if self._bars:
                self._bars.start()


def _bars() -> Progress:
    """Bars on stderr that go away again. stdout is not touched: it belongs to the answer, and may be a pipe."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)


def open_llm(settings: Settings) -> LLM:
    """Fetch and load the model, telling what takes its time."""
    with ProgressView() as progress:
        return cupaged.LLM(settings.model, progress=progress, **settings.engine)


class Interruptible:
    """Ctrl-C as a question to ask between two steps, so that no step is cut in half; the second one in a row raises."""

    def __init__(self) -> None:
        self.pressed = False

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True

    def __enter__(self) -> Interruptible:
        self._before: Any = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._before)
