"""--stats: what a run cost, from the engine's StepRecords and the requests' own times."""

from __future__ import annotations

import json
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
        self._batch_invariant = engine.config.batch_invariant
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

    def values(self) -> dict[str, float | int | None]:
        """The figures by name; times in seconds, rates and shares as fractions; None: nothing came."""
        seconds = time.perf_counter() - self._started
        prompt = sum(len(output.prompt_token_ids) for output in self._outputs)
        generated = sum(len(answer.token_ids) for output in self._outputs for answer in output.outputs)
        cached = sum(output.num_cached_tokens for output in self._outputs)
        firsts = [o.metrics.first_token - o.metrics.arrival for o in self._outputs if o.metrics.first_token is not None]
        slots = self._blocks * self._block_size
        return {
            "requests": len(self._outputs),
            "steps": self._steps,
            "seconds": seconds,
            "prompt_tokens": prompt,
            "generated_tokens": generated,
            "tokens_per_second": generated / seconds,
            "cached_tokens": cached,
            "hit_rate": cached / prompt if prompt else 0.0,
            "first_token_mean": sum(firsts) / len(firsts) if firsts else None,
            "first_token_worst": max(firsts, default=None),
            "block_size": self._block_size,
            "blocks_total": self._blocks_total,
            "blocks_used_peak": self._peak,
            "slots_wasted": (slots - self._slots) / slots if slots else 0.0,
            "blocks_shared_peak": self._shared,
            "blocks_copied": self._copied,
            "blocks_evicted": self._evicted,
            "preemptions": self._preempted,
            "bytes_swapped": self._swapped,
            "batch_invariant": self._batch_invariant,
        }

    def lines(self) -> list[tuple[str, str]]:
        """Names and values, ready to be read."""
        v = self.values()
        mean, worst = v["first_token_mean"], v["first_token_worst"]
        lines = [
            ("requests", f"{v['requests']} in {v['steps']} steps, {v['seconds']:.2f} s"),
            ("tokens", f"{v['prompt_tokens']} prompt, {v['generated_tokens']} generated"),
            ("cached", f"{v['cached_tokens']} of the prompt tokens, a hit rate of {v['hit_rate']:.1%}".replace("%", " %")),
            ("speed", f"{v['tokens_per_second']:.1f} tokens/s"),
            ("first token", "none" if mean is None or worst is None else f"{1000 * mean:.0f} ms mean, {1000 * worst:.0f} ms worst"),
            ("blocks", f"{v['blocks_used_peak']} of {v['blocks_total']} used at the peak, {v['block_size']} tokens each"),
            ("wasted", f"{v['slots_wasted']:.1%}".replace("%", " %") + " of the used blocks' slots held nothing, over all steps"),
            ("sharing", f"{v['blocks_shared_peak']} blocks saved at the peak, {v['blocks_copied']} copied before a write"),
            ("evicted", f"{v['blocks_evicted']} cached blocks"),
            ("preempted", f"{v['preemptions']} times, {self._swapped / 1e6:.1f} MB swapped"),
        ]
        if self._batch_invariant:  # an engine that could not promise it would not have started
            lines.append(("invariant", "logits are the same bits in any batch, chunks and threads; this device's always are: no cost"))
        return lines

    def show(self, as_json: bool = False) -> None:
        """On stderr; nothing, where nothing was computed."""
        if not self._steps:
            return
        if as_json:
            click.echo(json.dumps(self.values()), err=True)
            return
        for name, value in self.lines():
            click.echo(f"{name:<12} {value}", err=True)
