"""--stats: what a run cost, from the engine's StepRecords and the requests' own times."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from cupaged.outputs import RequestOutput

if TYPE_CHECKING:
    from cupaged.engine import Engine
    from cupaged.step_plan import StepRecord


class Stats:
    """Watches an engine from its start."""

    def __init__(self, engine: Engine) -> None:
        self._block_size = engine.config.block_size
        self._started = time.perf_counter()
        self._steps = self._preempted = self._blocks_total = self._peak = 0
        self._shared = self._copied = self._evicted = self._swapped = 0
        self._blocks = self._slots = 0  # summed over the steps
        self._outputs: list[RequestOutput] = []
        engine.observers.append(self._step)

    def _step(self, record: StepRecord) -> None:
        self._steps += 1
        self._preempted += record.num_preempted
        self._blocks_total = record.blocks_total
        self._peak = max(self._peak, record.blocks_used)
        self._shared = max(self._shared, record.blocks_shared)
        self._copied, self._evicted = record.blocks_copied, record.blocks_evicted
        self._swapped = record.bytes_swapped
        self._blocks += record.blocks_used
        self._slots += record.slots_used

    def finished(self, output: RequestOutput) -> None:
        self._outputs.append(output)

    def lines(self) -> list[tuple[str, str]]:
        """Names and values, ready to be shown."""
        seconds = time.perf_counter() - self._started
        prompt = sum(len(output.prompt_token_ids) for output in self._outputs)
        generated = sum(len(answer.token_ids) for output in self._outputs for answer in output.outputs)
        cached = sum(output.num_cached_tokens for output in self._outputs)
        hit_rate = 100 * cached / prompt if prompt else 0.0
        firsts = [o.metrics.first_token - o.metrics.arrival for o in self._outputs if o.metrics.first_token is not None]
        slots = self._blocks * self._block_size
        wasted = 100 * (slots - self._slots) / slots if slots else 0.0
        return [
            ("requests", f"{len(self._outputs)} in {self._steps} steps, {seconds:.2f} s"),
            ("tokens", f"{prompt} prompt, {generated} generated"),
            ("cached", f"{cached} of the prompt tokens, a hit rate of {hit_rate:.1f} %"),
            ("speed", f"{generated / seconds:.1f} tokens/s"),
            ("first token", f"{_milliseconds(sum(firsts) / len(firsts))} mean, {_milliseconds(max(firsts))} worst" if firsts else "none"),
            ("blocks", f"{self._peak} of {self._blocks_total} used at the peak, {self._block_size} tokens each"),
            ("wasted", f"{wasted:.1f} % of the used blocks' slots held nothing, over all steps"),
            ("sharing", f"{self._shared} blocks saved at the peak, {self._copied} copied before a write"),
            ("evicted", f"{self._evicted} cached blocks"),
            ("preempted", f"{self._preempted} times, {self._swapped / 1e6:.1f} MB swapped"),
        ]

    def show(self) -> None:
        """Nothing, where nothing was computed."""
        for name, value in self.lines() if self._steps else ():
            click.echo(f"{name:<12} {value}", err=True)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"
