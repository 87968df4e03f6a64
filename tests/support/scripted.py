"""An engine whose model says what it is told: for everything that happens to text and requests around the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cupaged.cache.eviction import POLICIES
from cupaged.cache.manager import CacheManager
from cupaged.config import EngineConfig, ModelConfig
from cupaged.engine import Engine
from cupaged.scheduler import Scheduler
from cupaged.step_plan import ModelOutput, StepPlan, TokenLogprobs

EOS = 0


class PieceTokenizer:
    """Pieces of text as tokens: token id -> piece. Id 0 is the special token <eos>."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = ["<eos>", *pieces]
        self.special_ids = frozenset([EOS])
        self.space_prefix = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = []
        while text:
            piece = max((p for p in self.pieces if text.startswith(p)), key=len)
            ids.append(self.pieces.index(piece))
            text = text[len(piece) :]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id].encode()

    def token_text(self, token_id: int) -> str:
        return self.pieces[token_id]


class LateScript:
    """A submitted plan of a ScriptedModel: computed when it is collected."""

    def __init__(self, model: ScriptedModel, plan: StepPlan) -> None:
        self.model, self.plan = model, plan

    def collect(self) -> ModelOutput:
        return self.model.run(self.plan)


class ScriptedModel:
    """Answers every sequence with its script, by sequence number (or with `default`), whatever was computed.

    To a beam search it offers in every step the same tokens: 2, 0 (EOS), 3, 4, ..., each less likely than the one before.
    """

    def __init__(self, scripts: Mapping[int, Sequence[int]] | None = None, default: Sequence[int] = (1,)) -> None:
        self.scripts = dict(scripts or {})
        self.default = default
        self.plans: list[StepPlan] = []
        self.before_run: Callable[[StepPlan], None] = lambda plan: None
        self.before_submit: Callable[[StepPlan], None] = lambda plan: None
        self._prompt: dict[int, int] = {}

    def submit(self, plan: StepPlan) -> LateScript:
        self.before_submit(plan)
        return LateScript(self, plan)

    def run(self, plan: StepPlan) -> ModelOutput:
        self.before_run(plan)
        self.plans.append(plan)
        tokens = []
        for item in plan.sequences:
            for spec in item.samples:
                forked = spec.index > 0 and len(item.samples) == 1  # has its first token from its parent's row
                first = self._prompt.setdefault(item.seq_id, item.stop - forked)
                script = self.script(item.seq_id, spec.index)
                tokens.append(script[(item.stop - first) % len(script)])
        ids = np.array(tokens, np.int32)
        reports = {
            item.seq_id: _logprobs(item.prompt_targets)
            for item in plan.sequences
            if item.prompt_targets is not None and len(item.prompt_targets)
        }
        offers = {item.seq_id: _offer(item.num_candidates) for item in plan.sequences if item.num_candidates}
        return ModelOutput(ids, _logprobs(ids), reports, offers)

    def script(self, seq_id: int, index: int) -> Sequence[int]:
        """What answer number `index` of a request says."""
        return self.scripts.get(seq_id, self.default)


def _offer(count: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` tokens and their logprobs, -1/4, -2/4, ..."""
    return np.array([2, EOS, *range(3, count + 1)], np.int32), -np.arange(1, count + 1, dtype=np.float32) / 4


def _logprobs(ids: np.ndarray) -> TokenLogprobs:
    """Each token t: logprob -t, rank 2, and two likelier-looking ones."""
    n = len(ids)
    top = np.tile(np.array([[1, 2]], np.int32), (n, 1))
    return TokenLogprobs(
        ids, -ids.astype(np.float32), np.full(n, 2, np.int32), top, np.full((n, 2), -0.5, np.float32)
    )


DEFAULTS: dict[str, Any] = {}
"""Options of every engine that is made here, unless it is given others."""


def make_engine(
    model: Any,
    pieces: Sequence[str] | None = ("a", "b", "c"),
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 128,
    vocab_size: int = 64,
    eos_token_ids: tuple[int, ...] = (EOS,),
    **options: Any,
) -> Engine:
    config = EngineConfig(num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len, **(DEFAULTS | options))
    model_config = ModelConfig(
        architecture="llama",
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position=max_model_len,
        eos_token_ids=eos_token_ids,
    )
    scheduler = Scheduler(
        CacheManager(num_blocks, block_size, prefix_cache=config.prefix_cache, eviction=POLICIES[config.eviction]),
        max_num_batched_tokens=config.step_tokens,
        max_num_seqs=config.step_seqs,
    )
    tokenizer: Any = None if pieces is None else PieceTokenizer(pieces)
    return Engine(scheduler, model, config, model_config, tokenizer)


def finish(engine: Engine) -> list[Any]:
    """Run until nothing is left; every output in the order it came."""
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    return outputs
