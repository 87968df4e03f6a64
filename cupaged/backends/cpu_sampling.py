"""Choosing tokens fast on a CPU: what sampling.py defines, as Numba kernels.

The filters need no sort. Read as integers, floats keep their order once the lower bits of negative ones are flipped; so
the floor of top_k or top_p is found by three histograms over 11, 11 and 10 bits of that key, each inside the bin where
the one before found the target. The rest is plain loops over a row that the compiler turns into vector code: hence
the integer comparisons (a maximum of floats does not vectorise, because of NaN) and the exponential written out.

A kernel marks a row that nothing may be chosen from by token -1; the caller then raises what the definition would.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupaged.backends.base import SamplingBatch
from cupaged.backends.cpu_jit import exact_kernel, kernel
from cupaged.backends.cpu_threads import Kernel, Team
from cupaged.backends.sampling import (
    F32,
    F64,
    I32,
    Bools,
    TokenCounts,
    check_batch,
    check_row,
    check_token_ids,
    uniform,
)
from cupaged.errors import InvariantError

CHUNK = 1024
"""Logits that are looked at together: they stay in the first-level cache."""

NEGLIGIBLE = -64.0
"""exp of less than this is taken as 0: a whole vocabulary of such weights vanishes beside the best token's 1."""


# ---- the operations


def sample(logits: F32, batch: SamplingBatch, counts: TokenCounts, team: Team | None = None) -> I32:
    """The same as `sampling.sample`; logits [R, V] are C-contiguous and destroyed."""
    num_rows, vocab_size = logits.shape
    check_batch(batch, num_rows, vocab_size)
    penalised = batch.penalised
    any_penalised = bool(penalised.any())
    if any_penalised:
        counts.prepare(batch.row_ids[penalised], vocab_size)
    if any_penalised or len(batch.bias_ids):
        _run(
            team, _adjust_rows, logits, batch.bias_start, batch.bias_ids, batch.bias_values, penalised, batch.row_ids,
            counts.outputs, counts.in_prompt, batch.repetition, batch.presence, batch.frequency,
        )  # fmt: skip
    tokens = np.empty(num_rows, np.int32)
    if not batch.temperature.any():
        _run(team, _greedy_rows, logits, tokens)
    else:
        uniforms = uniform(batch.seeds, batch.positions, batch.indices)
        _run(team, _sample_rows, logits, batch.temperature, batch.min_p, batch.top_k, batch.top_p, uniforms, tokens)
    _raise_for_refused_rows(logits, tokens)
    if any_penalised:
        counts.add(batch.row_ids[penalised], tokens[penalised])
    return tokens


def token_logprobs(logits: F32, token_ids: I32, k: int, team: Team | None = None) -> tuple[F32, I32, I32, F32]:
    """The same as `sampling.token_logprobs`; logits [R, V] are C-contiguous and not changed."""
    num_rows, vocab_size = logits.shape
    check_token_ids(token_ids, vocab_size)
    logprobs, ranks = np.empty(num_rows, np.float32), np.empty(num_rows, np.int32)
    top_ids, top_logprobs = np.full((num_rows, k), -1, np.int32), np.full((num_rows, k), -np.inf, np.float32)
    best = np.empty(num_rows, np.int32)
    _run(team, _logprob_rows, logits, token_ids, best, logprobs, ranks, top_ids, top_logprobs)
    _raise_for_refused_rows(logits, best)
    return logprobs, ranks, top_ids, top_logprobs


def beam_candidates(logits: F32, k: int, team: Team | None = None) -> tuple[I32, F32]:
    """The same as `sampling.beam_candidates`."""
    _, _, ids, logprobs = token_logprobs(logits, np.zeros(len(logits), np.int32), k, team)
    return ids, logprobs


def _run(team: Team | None, rows_kernel: Kernel, logits: F32, *arguments: Any) -> None:
    if team is None or len(logits) == 1:
        rows_kernel(0, 1, logits, *arguments)
    else:
        team.run(rows_kernel, logits, *arguments)


def _raise_for_refused_rows(logits: F32, tokens: I32) -> None:
    for r in np.flatnonzero(tokens < 0).tolist():
        check_row(r, logits[r])
        raise InvariantError(f"row {r}: no token was chosen from sound logits")


# ---- kernels over the rows part, part + parts, ...


@exact_kernel
def _greedy_rows(part: int, parts: int, logits: F32, tokens: I32) -> None:
    for r in range(part, len(logits), parts):
        tokens[r] = _best(logits[r])


@exact_kernel
def _sample_rows(part: int, parts: int, logits: F32, temperature: F32, min_p: F32, top_k: I32, top_p: F32, uniforms: F64, tokens: I32) -> None:
    for r in range(part, len(logits), parts):
        best = _best(logits[r])
        if best >= 0 and temperature[r] > 0:
            best = _sample_row(logits[r], best, temperature[r], min_p[r], top_k[r], top_p[r], uniforms[r])
        tokens[r] = best


@exact_kernel
def _adjust_rows(
    part: int, parts: int, logits: F32, bias_start: I32, bias_ids: I32, bias_values: F32, penalised: Bools, row_ids: I32,
    outputs: I32, in_prompt: Bools, repetition: F32, presence: F32, frequency: F32,
) -> None:  # fmt: skip
    for r in range(part, len(logits), parts):
        for i in range(bias_start[r], bias_start[r + 1]):
            logits[r, bias_ids[i]] += bias_values[i]
        if penalised[r]:
            count, prompt = outputs[row_ids[r]], in_prompt[row_ids[r]]
            strengths = np.float64(repetition[r]), np.float64(presence[r]), np.float64(frequency[r])
            _penalise(logits[r], count, prompt, strengths[0], strengths[1], strengths[2])


@exact_kernel
def _logprob_rows(
    part: int, parts: int, logits: F32, token_ids: I32, best: I32, logprobs: F32, ranks: I32, top_ids: I32, top_logprobs: F32
) -> None:
    for r in range(part, len(logits), parts):
        row = logits[r]
        best[r] = _best(row)
        if best[r] >= 0:
            log_total = np.float64(row[best[r]]) + np.log(_total(row, row[best[r]]))
            chosen = row[token_ids[r]]
            logprobs[r] = np.float64(chosen) - log_total
            ranks[r] = 1 + _count_above(row, chosen)
            _top(row, top_ids[r], top_logprobs[r])
            for j in range(top_ids.shape[1]):
                top_logprobs[r, j] = np.float64(top_logprobs[r, j]) - log_total


# ---- one row


@exact_kernel
def _sample_row(
    row: F32, best: int, temperature: np.float32, min_p: np.float32, top_k: np.int32, top_p: np.float32, u: float
) -> int:
    weights = np.empty(len(row))
    total = _fill_weights(row, row[best], 1.0 / np.float64(temperature), min_p, weights)
    if 0 < top_k < len(row):
        total = _drop_below(_floor(row, np.ones(len(row)), np.float64(top_k)), row, weights)
    if top_p < 1:
        total = _drop_below(_floor(row, weights, top_p * total), row, weights)
    return _draw(weights, u * total)


@exact_kernel
def _penalise(row: F32, count: I32, in_prompt: Bools, repetition: float, presence: float, frequency: float) -> None:
    for i in range(len(row)):
        logit = np.float64(row[i])
        if in_prompt[i] or count[i] > 0:
            logit = logit / repetition if logit > 0 else logit * repetition
        row[i] = logit - frequency * count[i] - presence * (count[i] > 0)


@exact_kernel
def _key(bits: np.int32) -> np.int32:
    """float32 bits -> an int32 in the order of the floats; its own inverse."""
    key: np.int32 = np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return key


@exact_kernel
def _extremes(bits: I32) -> tuple[np.int32, np.int32]:
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for i in range(len(bits)):
        key = _key(bits[i])
        low, high = min(low, key), max(high, key)
    return low, high


@exact_kernel
def _as_float(key: np.int32) -> np.float32:
    bits = np.empty(1, np.int32)
    bits[0] = _key(key)
    value: np.float32 = bits.view(np.float32)[0]
    return value


@exact_kernel
def _best(row: F32) -> int:
    """The lowest id of the largest logit; -1 where the row holds NaN or +inf, or nothing but -inf."""
    bits = row.view(np.int32)
    largest, where = np.float32(-np.inf), -1
    for start in range(0, len(row), CHUNK):
        low, high = _extremes(bits[start : start + CHUNK])
        if low < np.int32(-0x7F800001) or high >= np.int32(0x7F800000):  # beyond -inf: NaN; at or beyond +inf
            return -1
        if _as_float(high) > largest:
            largest, where = _as_float(high), start
    if where >= 0:
        while row[where] != largest:
            where += 1
    return where


@exact_kernel
def _floor(row: F32, mass: F64, target: float) -> np.float32:
    """The largest logit such that the tokens at or above it hold at least `target` of `mass`, and some."""
    bits = row.view(np.int32)
    above = np.empty(2048)
    prefix, shift = 0, 32  # of the key counted from the smallest: `prefix` are its bits from `shift` on
    for width in (11, 11, 10):
        above[:] = 0
        mask = (1 << width) - 1
        for i in range(len(row)):
            key = np.int64(_key(bits[i])) + 0x80000000
            if key >> shift == prefix:
                above[(key >> (shift - width)) & mask] += mass[i]
        digit = mask
        while digit > 0 and (above[digit] < target or above[digit] == 0):  # a top_p may round to 0
            target -= above[digit]
            digit -= 1
        prefix, shift = (prefix << width) | digit, shift - width
    return _as_float(np.int32(prefix - 0x80000000))


@exact_kernel
def _draw(weights: F64, target: float) -> int:
    """The first token whose cumulative weight exceeds the target."""
    passed, start = 0.0, 0
    while start < len(weights):
        chunk = _sum(weights[start : start + CHUNK])
        if passed + chunk > target:
            break
        passed += chunk
        start += CHUNK
    for i in range(start, len(weights)):
        passed += weights[i]
        if passed > target:
            return i
    return -1


@exact_kernel
def _top(row: F32, ids: I32, values: F32) -> None:
    """Fill `ids` and `values` [k] with the largest logits, largest first, the lower id first among equals."""
    size, k = 0, len(ids)
    bits = row.view(np.int32)
    for start in range(0, len(row), CHUNK):
        _, high = _extremes(bits[start : start + CHUNK])
        if k == 0 or (size == k and _as_float(high) <= values[k - 1]):
            continue
        for i in range(start, min(start + CHUNK, len(row))):
            if size == k and row[i] <= values[k - 1]:
                continue
            size = min(size + 1, k)
            j = size - 1
            while j > 0 and values[j - 1] < row[i]:
                ids[j], values[j] = ids[j - 1], values[j - 1]
                j -= 1
            ids[j], values[j] = i, row[i]


# ---- loops that vectorise


@kernel
def _exp(x: float) -> float:
    """exp(x) for x <= 0 within 1e-13 of itself, 0 below NEGLIGIBLE: Taylor's series at x / 256, squared eight times."""
    y = max(x, NEGLIGIBLE) / 256
    # sum of y^k / k! up to k = 11
    e = 1 / 362880 + y * (1 / 3628800 + y * (1 / 39916800))
    e = 1 / 720 + y * (1 / 5040 + y * (1 / 40320 + y * e))
    e = 1 / 6 + y * (1 / 24 + y * (1 / 120 + y * e))
    e = 1 + y * (1 + y * (1 / 2 + y * e))
    e *= e
    e *= e
    e *= e
    e *= e
    e *= e
    e *= e
    e *= e
    e *= e
    return e if x >= NEGLIGIBLE else 0.0


@kernel
def _fill_weights(row: F32, best: np.float32, scale: float, min_p: np.float32, weights: F64) -> float:
    total = 0.0
    for i in range(len(row)):
        weight = _exp((np.float64(row[i]) - np.float64(best)) * scale)
        if weight < min_p:
            weight = 0.0
        weights[i] = weight
        total += weight
    return total


@kernel
def _drop_below(floor: np.float32, row: F32, weights: F64) -> float:
    total = 0.0
    for i in range(len(row)):
        if row[i] < floor:
            weights[i] = 0.0
        total += weights[i]
    return total


@kernel
def _sum(weights: F64) -> float:
    total = 0.0
    for i in range(len(weights)):
        total += weights[i]
    return total


@kernel
def _total(row: F32, best: np.float32) -> float:
    """Sum of exp(logit - best)."""
    total = 0.0
    for i in range(len(row)):
        total += _exp(np.float64(row[i]) - np.float64(best))
    return total


@exact_kernel
def _count_above(row: F32, value: np.float32) -> int:
    count = 0
    for i in range(len(row)):
        count += row[i] > value
    return count
