"""An LLM that says "Hello world." to everything ("Hello world.1" as the second of several answers), for the command line's tests; `python -m tests.support.scripted_llm` is
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
        return self.encode(self.render_chat(messages))

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        return "".join(f"<{m['role']}>{m['content']}|" for m in messages)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[i] for i in ids if i != EOS)


class ScriptedLLM:
    """Takes what LLM takes, and keeps it: the last one made is `ScriptedLLM.last`."""

    last: ScriptedLLM

    def __init__(self, model: str, *, progress: Any = None, **options: Any) -> None:
        ScriptedLLM.last = self
        self.model, self.options = model, options
        self.tokenizer = ChatTokenizer(PIECES)
        self.script = ScriptedModel()
        self.script.script = self._script  # type: ignore[method-assign]
        self.script.before_run = _before_step
        sizes = {"num_blocks": 64, "block_size": 4, "max_model_len": 128, "vocab_size": len(PIECES) + 1} | options
        EngineConfig.from_options(**options)
        self.engine = make_engine(self.script, PIECES, **sizes)
        self.engine.tokenizer = self.tokenizer  # type: ignore[assignment]
        self.engine.model_name = model
        self.prompts: list[str] = []
        self.params: list[Any] = []
        self.salts: list[str] = []
        add = self.engine.add_request

        def add_request(prompt: Any, params: Any = None, *args: Any, cache_salt: str = "", **named: Any) -> str:
            request_id = add(prompt, params, *args, cache_salt=cache_salt, **named)
            self.prompts.append(prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt))
            self.params.append(params)
            self.salts.append(cache_salt)
            return request_id

        self.engine.add_request = add_request  # type: ignore[method-assign]

    def _script(self, seq_id: int, index: int) -> list[int]:
        return [*self.tokenizer.encode(ANSWER + (str(index) if index else "")), EOS]


def _before_step(plan: StepPlan) -> None:
    if mark := os.environ.get("SCRIPTED_MARK"):
        Path(mark).touch()
    time.sleep(float(os.environ.get("SCRIPTED_DELAY", "0")))


if __name__ == "__main__":
    cupaged.LLM = ScriptedLLM  # type: ignore[misc,assignment]
    main()
