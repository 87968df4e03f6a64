"""What it means to choose a token: the plain NumPy definition of `sample` and `token_logprobs`, row by row.

Every filter keeps an upper set: the tokens whose logit is at or above some floor. So a filter is one number, tokens with
equal logits stay or go together, and the order of the vocabulary decides nothing until the draw.

One row, in this order:

1. Bias: each (id, value) of the row is added to its logit; an id may come twice, and -inf bans the token.
2. Penalties, where `penalised`. A token in the prompt or the output: a positive logit is divided by `repetition`, any
   other is multiplied by it (CTRL, arXiv 1909.05858). Then `frequency * count` and `presence * (count > 0)` are
   subtracted, count being the token's number of occurrences in the output (OpenAI's API reference).
3. Temperature 0: the largest logit, the lowest id among equals; the row is done.
   Else weight = exp((logit - largest logit) / temperature): probabilities up to a factor, 1 for the most likely token.
4. min_p: keeps weight >= min_p.
5. top_k: keeps logits at or above the k-th largest of those left: all of them if fewer than k are, more than k where
   others equal the k-th.
6. top_p: over the distribution renormalised after 4 and 5, keeps the smallest upper set that holds at least top_p.
7. The draw: the first token in id order whose cumulative kept weight exceeds u times their sum.

Bias is added in float32. Penalties are computed in float64 and rounded to float32 once: products of float32 numbers are
exact in float64, so a fused multiply-add gives the same bits, and greedy choices are the same on every backend. The
rest is float64. There backends agree up to float ties: a sum may be added in another order, which matters only where
two numbers are within about 1e-12 of each other.

Nothing is ever chosen from damaged logits: NaN or +inf, and a row whose every token is banned, raise InvariantError.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.backends.base import SamplingBatch
from cupaged.errors import InvariantError

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
U32 = npt.NDArray[np.uint32]
Bools = npt.NDArray[np.bool_]


class TokenCounts:
    """Which tokens each penalised row has seen: the only state of sampling.

    outputs    int32 [rows, V]: how often each token was produced
    in_prompt  bool [rows, V]: whether it is in the prompt

    Rows are named by row id. The arrays grow to the largest id that was penalised, and are empty before the first. All
    rows are forgotten when V changes: another model samples.
    """

    def __init__(self) -> None:
        self.outputs: I32 = np.zeros((0, 0), np.int32)
        self.in_prompt: Bools = np.zeros((0, 0), np.bool_)
        self._counted: set[int] = set()
        self._waiting: dict[int, tuple[I32, I32]] = {}  # until `prepare`, which knows V and who needs counts

    def set_history(self, row_id: int, prompt_ids: I32, output_ids: I32) -> None:
        """Replace all that is known of a row; prompt_ids and output_ids int32 [any], without padding."""
        if row_id < 0:
            raise InvariantError(f"row id {row_id} is negative")
        self._waiting[row_id] = (np.array(prompt_ids, np.int32), np.array(output_ids, np.int32))

    def prepare(self, row_ids: I32, vocab_size: int) -> None:
        """Bring `outputs` and `in_prompt` up to date for these rows. Raises InvariantError for one without history."""
        if row_ids.size and vocab_size != self.outputs.shape[1]:
            self._counted.clear()
            self.outputs, self.in_prompt = np.zeros((0, vocab_size), np.int32), np.zeros((0, vocab_size), np.bool_)
        for row_id in row_ids.tolist():
            history = self._waiting.pop(row_id, None)
            if history is not None:
                self._rebuild(row_id, *history, vocab_size)
            elif row_id not in self._counted:
                raise InvariantError(f"row {row_id} has penalties, but nobody set its history")

    def add(self, row_ids: I32, token_ids: I32) -> None:
        """Count one more produced token of each of these rows; both int32 [n]."""
        np.add.at(self.outputs, (row_ids, token_ids), 1)

    def _rebuild(self, row_id: int, prompt_ids: I32, output_ids: I32, vocab_size: int) -> None:
        check_token_ids(prompt_ids, vocab_size)
        check_token_ids(output_ids, vocab_size)
        self._grow(row_id + 1)
        self._counted.add(row_id)
        self.outputs[row_id] = np.bincount(output_ids, minlength=vocab_size)
        self.in_prompt[row_id] = False
        self.in_prompt[row_id, prompt_ids] = True

    def _grow(self, num_rows: int) -> None:
        old, vocab_size = self.outputs.shape
        if num_rows > old:
            more = (max(num_rows - old, old), vocab_size)
            self.outputs = np.concatenate([self.outputs, np.zeros(more, np.int32)])
            self.in_prompt = np.concatenate([self.in_prompt, np.zeros(more, np.bool_)])


def sample(logits: F32, batch: SamplingBatch, counts: TokenCounts) -> I32:
    """Choose one token a row, as the module's docstring defines it; logits [R, V] are destroyed; returns int32 [R].

    The chosen tokens of penalised rows are added to `counts`. Raises InvariantError; then no count has changed.
    """
    num_rows, vocab_size = logits.shape
    check_batch(batch, num_rows, vocab_size)
    penalised = batch.penalised
    counts.prepare(batch.row_ids[penalised], vocab_size)
    uniforms = uniform(batch.seeds, batch.positions, batch.indices)
    tokens = np.empty(num_rows, np.int32)
    for r, row in enumerate(logits):
        biases = slice(batch.bias_start[r], batch.bias_start[r + 1])
        np.add.at(row, batch.bias_ids[biases], batch.bias_values[biases])
        if penalised[r]:
            seen = counts.outputs[batch.row_ids[r]], counts.in_prompt[batch.row_ids[r]]
            strengths = float(batch.repetition[r]), float(batch.presence[r]), float(batch.frequency[r])
            row[:] = _penalise(row, *seen, *strengths)
        check_row(r, row)
        if batch.temperature[r] == 0:
            tokens[r] = np.argmax(row)
        else:
            kept = _weights(row, batch.temperature[r], batch.min_p[r], batch.top_k[r], batch.top_p[r])
            tokens[r] = _draw(kept, uniforms[r])
    counts.add(batch.row_ids[penalised], tokens[penalised])
    return tokens


def token_logprobs(logits: F32, token_ids: I32, k: int) -> tuple[F32, I32, I32, F32]:
    """log_softmax of the given tokens and of the k likeliest; see `Backend.token_logprobs`.

    Where k exceeds V the last entries are id -1 and logprob -inf. Raises InvariantError for damaged logits.
    """
    num_rows, vocab_size = logits.shape
    check_token_ids(token_ids, vocab_size)
    logprobs, ranks = np.empty(num_rows, np.float32), np.empty(num_rows, np.int32)
    top_ids, top_logprobs = np.full((num_rows, k), -1, np.int32), np.full((num_rows, k), -np.inf, np.float32)
    for r, row in enumerate(logits):
        check_row(r, row)
        distance = row.astype(np.float64) - row.max()
        row_logprobs = distance - np.log(np.exp(distance).sum())
        logprobs[r] = row_logprobs[token_ids[r]]
        ranks[r] = 1 + np.count_nonzero(row > row[token_ids[r]])
        best = np.argsort(-row, kind="stable")[:k]
        top_ids[r, : len(best)] = best
        top_logprobs[r, : len(best)] = row_logprobs[best]
    return logprobs, ranks, top_ids, top_logprobs


def beam_candidates(logits: F32, k: int) -> tuple[I32, F32]:
    """The k likeliest tokens of every row and their log_softmax; see `Backend.beam_candidates`."""
    _, _, ids, logprobs = token_logprobs(logits, np.zeros(len(logits), np.int32), k)
    return ids, logprobs


def uniform(seeds: npt.NDArray[np.uint64], positions: I32, indices: I32) -> F64:
    """One number in (0, 1) a row: key = seed, counter = (position, index, 0, 0), u = ((x0 >> 8) + 0.5) * 2^-24."""
    counter = np.zeros((len(seeds), 4), np.uint32)
    counter[:, 0], counter[:, 1] = positions, indices
    key = np.stack([seeds & np.uint64(0xFFFFFFFF), seeds >> np.uint64(32)], axis=1).astype(np.uint32)
    bits = philox4x32(counter, key)[:, 0] >> np.uint32(8)
    uniforms: F64 = (bits + 0.5) * 2.0**-24
    return uniforms


def philox4x32(counter: U32, key: U32) -> U32:
    """Philox4x32-10 (Salmon et al., SC'11, table 2); counter uint32 [n, 4], key uint32 [n, 2], returns uint32 [n, 4]."""
    c0, c1, c2, c3 = counter.T.astype(np.uint64)
    k0, k1 = key.T.astype(np.uint64)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (product1 >> half) ^ c1 ^ k0, product1 & low, (product0 >> half) ^ c3 ^ k1, product0 & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def check_batch(batch: SamplingBatch, num_rows: int, vocab_size: int) -> None:
    """Raises InvariantError unless the batch describes num_rows rows over this vocabulary."""
    if batch.num_rows != num_rows:
        raise InvariantError(f"{num_rows} rows of logits, but parameters of {batch.num_rows}")
    check_token_ids(batch.bias_ids, vocab_size)


def check_token_ids(token_ids: npt.NDArray[Any], vocab_size: int) -> None:
    """Raises InvariantError for an id outside the vocabulary."""
    if token_ids.size and (token_ids.min() < 0 or token_ids.max() >= vocab_size):
        raise InvariantError(f"token ids {token_ids.min()} .. {token_ids.max()} are not within 0 .. {vocab_size - 1}")


def check_row(r: int, row: F32) -> None:
    """Raises InvariantError for logits that nothing may be chosen from."""
    if np.isnan(row).any() or np.isposinf(row).any():
        raise InvariantError(f"row {r}: the logits hold NaN or infinity; the weights or the KV cache are damaged")
    if np.isneginf(row).all():
        raise InvariantError(f"row {r}: no token is left to choose from, every one is banned")


def _penalise(row: F32, count: I32, in_prompt: Bools, repetition: float, presence: float, frequency: float) -> F32:
    logits: F64 = row.astype(np.float64)
    repeated = np.where(logits > 0, logits / repetition, logits * repetition)
    logits = np.where(in_prompt | (count > 0), repeated, logits)
    logits = logits - frequency * count - presence * (count > 0)
    return logits.astype(np.float32)


def _weights(row: F32, temperature: np.float32, min_p: np.float32, top_k: np.int32, top_p: np.float32) -> F64:
    """Weight of each token, float64 [V]: exp of the scaled distance to the best, or 0 where a filter drops the token."""
    weights: F64 = np.exp((row.astype(np.float64) - row.max()) / float(temperature))
    weights[weights < min_p] = 0
    if 0 < top_k < len(row):
        weights[row < _floor(row, np.ones(len(row)), float(top_k))] = 0
    if top_p < 1:
        weights[row < _floor(row, weights, float(top_p) * weights.sum())] = 0
    return weights


def _floor(row: F32, mass: F64, target: float) -> np.float32:
    """The largest logit such that the tokens at or above it hold at least `target` of `mass`."""
    order = np.argsort(-row)
    reached = np.searchsorted(np.cumsum(mass[order]), target)
    floor: np.float32 = row[order[reached]]
    return floor


def _draw(weights: F64, u: float) -> int:
    """The first token whose cumulative weight exceeds u * total. It has a weight, since u < 1 and the steps are strict."""
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
