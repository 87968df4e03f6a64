"""An engine over the integer model that is checked after every step: for everything that shares, forks and gives way."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupaged.outputs import RequestOutput
from cupaged.params import BeamSearchParams, SamplingParams
from cupaged.step_plan import StepRecord
from tests.support.integer_model import VOCABULARY, IntegerModel, expected_output
from tests.support.scripted import make_engine


class Life:
    """An engine over the integer model: free slots are poisoned and every count is checked after each step."""

    def __init__(self, num_blocks: int, block_size: int = 4, **options: Any) -> None:
        self.model = IntegerModel(num_blocks, block_size)
        self.engine = make_engine(
            self.model, pieces=None, num_blocks=num_blocks, block_size=block_size, max_model_len=200, vocab_size=VOCABULARY,
            eos_token_ids=(), **options,
        )  # fmt: skip
        self.cache = self.engine._scheduler.cache
        self.records: list[StepRecord] = []
        self.engine.observers.append(self.records.append)
        self.done: dict[str, RequestOutput] = {}

    def add(self, prompt: list[int], max_tokens: int = 4, salt: str = "", **params: Any) -> str:
        return self.engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, **params), cache_salt=salt)

    def search(self, prompt: list[int], **params: Any) -> str:
        return self.engine.add_request(prompt, BeamSearchParams(**params))

    def step(self) -> None:
        self.done.update({output.request_id: output for output in self.engine.step() if output.finished})
        self.model.poison(self.cache)
        self.engine._scheduler.check_invariants()

    def finish(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.engine.has_unfinished():
                break
            self.step()
        assert not self.engine.has_unfinished(), "no progress"
        assert self.cache.num_used == 0

    def ask(self, prompt: list[int], max_tokens: int = 4, salt: str = "") -> tuple[int, int]:
        """Serve a prompt alone, and check the answer: (tokens found in the cache, tokens computed)."""
        before = self.model.computed
        name = self.add(prompt, max_tokens, salt)
        self.finish()
        self.check(name)
        return self.done[name].num_cached_tokens, self.model.computed - before

    def check(self, name: str) -> None:
        """All answers of a request are those of a model that never shared anything."""
        output = self.done[name]
        prompt = np.array(output.prompt_token_ids)
        for answer in output.outputs:
            assert answer.token_ids == expected_output(prompt, len(answer.token_ids), answer.index)

    @property
    def preemptions(self) -> int:
        return sum(record.num_preempted for record in self.records)


def text(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))
