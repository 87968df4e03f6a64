"""LLM: the engine for scripts. Prompts in, finished outputs back, in the order of the prompts."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from cupaged.artefact import Progress
from cupaged.config import EngineConfig
from cupaged.door import Prompt
from cupaged.engine import Engine
from cupaged.errors import ConfigError, RequestError, shown
from cupaged.hub import DEFAULT_MODEL
from cupaged.model_loader import open_engine
from cupaged.outputs import BeamSearchOutput, RequestOutput
from cupaged.params import BeamSearchParams, SamplingParams
from cupaged.text.tokenizer import Tokenizer

Conversation = Sequence[Mapping[str, str]]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A loaded model: a folder, a GGUF file, a built-in alias or a hub id. `options` are EngineConfig's fields, by name.

        llm = LLM("smollm2-135m-instruct", max_num_seqs=16)
        llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text
    """

    def __init__(self, model: str | os.PathLike[str] = DEFAULT_MODEL, *, progress: Progress | None = None, **options: Any) -> None:
        if not isinstance(model, (str, os.PathLike)):
            raise ConfigError(f"model must be a name or a path, not {shown(model)}")
        self.engine: Engine = open_engine(os.fspath(model), EngineConfig.from_options(**options), progress)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises RequestError where the model has none."""
        if self.engine.tokenizer is None:
            raise RequestError(f"{self.engine.model_name} has no tokenizer")
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts together; one finished output each, in their order.

        A prompt is a string or a list of token ids; params are one for all, or one a prompt; None: the model's
        defaults. `on_output` is called with every growing output. Raises RequestError for a prompt that cannot be
        served, before any is run. When it raises (or is interrupted), none of these requests is left behind.
        """
        many = _as_prompts(prompts)
        return self._run(many, _as_params(params, len(many)), on_output)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams | None = None
    ) -> list[BeamSearchOutput]:
        """Search the likeliest answers to all prompts, batched like everything else; one result each, in their order."""
        many = _as_prompts(prompts)
        outputs = self._run(many, [params or BeamSearchParams()] * len(many))
        return [BeamSearchOutput.of(output) for output in outputs]

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | BeamSearchParams | None],
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        ids: list[str] = []
        mailbox: deque[RequestOutput] = deque()  # fed by everybody's steps and aborts: the engine may have other callers
        finished: dict[str, RequestOutput] = {}
        try:
            for prompt, each in zip(prompts, params, strict=True):
                ids.append(self.engine.new_id())  # known before it is used, so that an interrupt leaves none behind
                self.engine.add_request(prompt, each, ids[-1], mailbox, only_finished=on_output is None)
            while len(finished) < len(ids):
                self.engine.step()
                while mailbox:
                    output = mailbox.popleft()
                    if output.finished:
                        finished[output.request_id] = output
                    if on_output is not None:
                        on_output(output)
        finally:
            for request_id in ids:
                self.engine.abort(request_id)
        return [finished[request_id] for request_id in ids]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params = None,
        *,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}), or several, through the model's chat template."""
        if not isinstance(messages, (list, tuple)) or not messages:
            raise RequestError("a conversation is a list of at least one message, {'role': ..., 'content': ...}")
        many = cast(Sequence[Conversation], [messages] if isinstance(messages[0], Mapping) else messages)
        prompts = [self.tokenizer.encode_chat(conversation) for conversation in many]
        return self.generate(prompts, params, on_output=on_output)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many -> many. A list of integers is one prompt."""
    if isinstance(prompts, str) or not isinstance(prompts, (Sequence, np.ndarray)):
        return [prompts]  # what is no prompt at all, the engine refuses
    if getattr(prompts, "ndim", 1) == 0:
        return [cast(Prompt, prompts)]  # an array of no dimension has no length
    if len(prompts) and all(isinstance(p, (int, np.integer)) for p in prompts):
        return [prompts]  # type: ignore[list-item]  # just checked: token ids
    return list(prompts)  # type: ignore[arg-type]


def _as_params(params: Params, count: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, (list, tuple)):
        raise ConfigError(f"sampling parameters must be a SamplingParams, or a list of one a prompt, not {type(params).__name__}")
    if len(params) != count:
        raise ConfigError(f"{len(params)} sampling parameters were given for {count} prompts: give one, or one a prompt")
    return list(params)
