"""An LLM that says "Hello world." to everything, for the command line's tests; `python -m tests.support.scripted_llm` is
the `cupaged` command on top of it. $SCRIPTED_DELAY makes every step take so many seconds; the file $SCRIPTED_MARK appears
when the first one begins."""

from __future__ import annotations

import os
import string
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cupaged
from cupaged.cli.main import main
from cupaged.config import EngineConfig
from cupaged.step_plan import StepPlan
from tests.support.scripted import EOS, PieceTokenizer, ScriptedModel, make_engine

ANSWER = "Hello world."
PIECES = tuple(string.printable)


class ChatTokenizer(PieceTokenizer):
    """One character a token, and a chat template: "<role>content|" for each message."""

    space_prefix = False

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}|" for m in messages))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[i] for i in ids)


class ScriptedLLM:
    """Takes what LLM takes, and keeps it: the last one made is `ScriptedLLM.last`."""

    last: ScriptedLLM

    def __init__(self, model: str, *, progress: Any = None, **options: Any) -> None:
        ScriptedLLM.last = self
        self.model, self.options = model, options
        self.tokenizer = ChatTokenizer(PIECES)
        self.script = ScriptedModel(default=[*self.tokenizer.encode(ANSWER), EOS])
        self.script.before_run = _before_step
        sizes = {"num_blocks": 64, "block_size": 4, "max_model_len": 128, "vocab_size": len(PIECES) + 1} | options
        EngineConfig.from_options(**options)
        self.engine = make_engine(self.script, PIECES, **sizes)
        self.engine.tokenizer = self.tokenizer  # type: ignore[assignment]
        self.engine.model_name = model
        self.params: list[cupaged.SamplingParams] = []
        add = self.engine.add_request

        def add_request(prompt: Any, params: Any = None, *args: Any, **named: Any) -> str:
            self.params.append(params)
            return add(prompt, params, *args, **named)

        self.engine.add_request = add_request  # type: ignore[method-assign]

    @property
    def prompts(self) -> list[str]:
        """What the model was asked, as text, in order."""
        firsts = [item for plan in self.script.plans for item in plan.sequences if item.start == 0]
        return [self.tokenizer.decode(item.token_ids.tolist()) for item in firsts]


def _before_step(plan: StepPlan) -> None:
    if mark := os.environ.get("SCRIPTED_MARK"):
        Path(mark).touch()
    time.sleep(float(os.environ.get("SCRIPTED_DELAY", "0")))


if __name__ == "__main__":
    cupaged.LLM = ScriptedLLM  # type: ignore[misc,assignment]
    main()
