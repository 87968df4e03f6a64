"""Choosing tokens fast on a CPU: what sampling.py defines, as operations of a program (cpu_kernels/sampling.py).

A kernel marks a row that nothing may be chosen from by token -1; here what the definition would raise is raised.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter, is_
from typing import Any

import numpy as np

from cupaged.backends.base import SamplingBatch
from cupaged.backends.cpu_code import address
from cupaged.backends.cpu_program import FIRST, Words, numbers, operation
from cupaged.backends.cpu_threads import Crew
from cupaged.backends.sampling import F32, F64, I32, TokenCounts, check_batch, check_row, check_token_ids, uniform
from cupaged.errors import InvariantError

BINS = 2048
"""Of a histogram."""

_PARAMETERS = attrgetter(*(field.name for field in fields(SamplingBatch) if field.name != "positions"))

# words of all operations; a task is one row
LOGITS, STRIDE, VOCAB = range(FIRST, FIRST + 3)
TOKENS, NOTED = FIRST + 3, FIRST + 4  # greedy_rows; see cpu_noted
TEMPERATURE, MIN_P, TOP_K, TOP_P, UNIFORMS, SAMPLED = range(FIRST + 3, FIRST + 9)  # sample_rows
BIAS_START, BIAS_IDS, BIAS_VALUES, PENALISED, ROW_IDS, OUTPUTS, IN_PROMPT, REPETITION, PRESENCE, FREQUENCY = range(FIRST + 3, FIRST + 13)  # adjust_rows
TOKEN_IDS, BEST, TOTALS, RANKS, K, TOP_IDS, TOP_LOGITS = range(FIRST + 3, FIRST + 10)  # logprob_rows


_Place = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Of an array: address, shape and strides."""


@dataclass(frozen=True)
class _Ready:
    """An operation that chooses tokens, for logits in one place and parameters that do not change but for the positions."""

    place: _Place
    parameters: tuple[Any, ...]
    adjusted: bool
    penalised: bool
    table: Words
    tokens: I32
    uniforms: F64 | None
    kept: list[Any]
    """Whose addresses are in the table."""


class Sampler:
    """`sampling.sample` by a crew. Decode steps choose by the same parameters from logits in the same place again and again: the
    operation is made ready once for all of them."""

    def __init__(self, crew: Crew, counts: TokenCounts) -> None:
        self._crew, self._counts = crew, counts
        self._ready: _Ready | None = None

    def sample(self, logits: F32, batch: SamplingBatch) -> I32:
        """The same as `sampling.sample`; logits [R, V] are destroyed."""
        logits = _side_by_side(logits)
        place, parameters = (logits.ctypes.data, logits.shape, logits.strides), _PARAMETERS(batch)
        ready = self._ready
        if ready is None or place != ready.place or not all(map(is_, parameters, ready.parameters)):
            check_batch(batch, *logits.shape)
            ready = self._ready = self._make_ready(logits, batch, place, parameters)
        if ready.penalised:
            self._counts.prepare(batch.row_ids[batch.penalised], logits.shape[1])
        if ready.adjusted:
            self._adjust(logits, batch)
        if ready.uniforms is not None:
            ready.uniforms[:] = uniform(batch.seeds, batch.positions, batch.indices)
        self._crew.run(ready.table, alone=len(logits) == 1)
        tokens: I32 = ready.tokens.copy()
        raise_for_refused_rows(logits, tokens)
        if ready.penalised:
            self._counts.add(batch.row_ids[batch.penalised], tokens[batch.penalised])
        return tokens

    def _make_ready(self, logits: F32, batch: SamplingBatch, place: _Place, parameters: tuple[Any, ...]) -> _Ready:
        num_rows, vocab_size = logits.shape
        penalised = bool(batch.penalised.any())
        tokens, uniforms = np.empty(num_rows, np.int32), None
        if not batch.temperature.any():
            table, kept = _operation("greedy_rows", logits, tokens)
        else:
            self._crew.reserve(8 * (2 * vocab_size + BINS))
            uniforms = np.empty(num_rows)
            table, kept = _operation("sample_rows", logits, batch.temperature, batch.min_p, batch.top_k, batch.top_p, uniforms, tokens)
        return _Ready(place, parameters, penalised or len(batch.bias_ids) > 0, penalised, table, tokens, uniforms, kept)

    def _adjust(self, logits: F32, batch: SamplingBatch) -> None:
        counts = self._counts
        _run(
            self._crew, "adjust_rows", logits, batch.bias_start, batch.bias_ids, batch.bias_values, batch.penalised, batch.row_ids,
            counts.outputs, counts.in_prompt, batch.repetition, batch.presence, batch.frequency,
        )  # fmt: skip


def token_logprobs(logits: F32, token_ids: I32, k: int, crew: Crew) -> tuple[F32, I32, I32, F32]:
    """The same as `sampling.token_logprobs`; logits [R, V] are not changed."""
    logits = _side_by_side(logits)
    num_rows, vocab_size = logits.shape
    check_token_ids(token_ids, vocab_size)
    best, ranks, totals = np.empty(num_rows, np.int32), np.empty(num_rows, np.int32), np.empty(num_rows)
    top_ids, top_logits = np.full((num_rows, k), -1, np.int32), np.full((num_rows, k), -np.inf, np.float32)
    _run(crew, "logprob_rows", logits, np.ascontiguousarray(token_ids, np.int32), best, totals, ranks, k, top_ids, top_logits)
    raise_for_refused_rows(logits, best)
    rows = np.arange(num_rows)
    log_totals = logits[rows, best].astype(np.float64) + np.log(totals)
    logprobs = (logits[rows, token_ids] - log_totals).astype(np.float32)
    return logprobs, ranks, top_ids, (top_logits - log_totals[:, None]).astype(np.float32)


def beam_candidates(logits: F32, k: int, crew: Crew) -> tuple[I32, F32]:
    """The same as `sampling.beam_candidates`."""
    _, _, ids, logprobs = token_logprobs(logits, np.zeros(len(logits), np.int32), k, crew)
    return ids, logprobs


def _run(crew: Crew, name: str, logits: F32, *words: Any) -> None:
    """Run an operation over the rows of logits."""
    table, _kept = _operation(name, logits, *words)
    crew.run(table, alone=len(logits) == 1)


def _operation(name: str, logits: F32, *words: Any) -> tuple[Words, list[Any]]:
    """An operation over the rows of logits, and what must live as long as it."""
    given = [np.ascontiguousarray(word) if isinstance(word, np.ndarray) else word for word in words]
    rows = np.array([len(logits)], np.int64)
    table = operation(address(name), rows, numbers([logits, logits.strides[0], logits.shape[1], *given]))
    return table[None], [rows, *given]


def _side_by_side(logits: F32) -> F32:
    """Logits whose rows may be apart from each other, but not a row's numbers."""
    return logits if logits.strides[1] == logits.itemsize else np.ascontiguousarray(logits)


def raise_for_refused_rows(logits: F32, tokens: I32) -> None:
    """Raises InvariantError, as the definition does, for the first row that a kernel has chosen nothing from."""
    if tokens.min(initial=0) == 0:
        return
    for r in np.flatnonzero(tokens < 0).tolist():
        check_row(r, logits[r])
        raise InvariantError(f"row {r}: no token was chosen from sound logits")
