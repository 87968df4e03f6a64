"""The kernels that choose tokens (cpu_sampling.py).

The filters need no sort. Read as integers, floats keep their order once the lower bits of negative ones are flipped; so
the floor of top_k or top_p is found by three histograms over 11, 11 and 10 bits of that key, each inside the bin where
the one before found the target. The rest is plain loops over a row that the compiler turns into vector code: hence
the integer comparisons (a maximum of floats does not vectorise, because of NaN) and the exponential written out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from cupaged.backends.cpu_kernels.arrays import float32s, float64s, int32s, uint8s
from cupaged.backends.cpu_kernels.extremes import as_float, extremes, noted_extremes, order_of, refused
from cupaged.backends.cpu_kernels.ir import (
    pointer_to_float32,
    pointer_to_float64,
    pointer_to_int32,
    pointer_to_uint8,
    word,
)
from cupaged.backends.cpu_kernels.jit import exact_kernel, kernel, operation_kernel
from cupaged.backends.cpu_kernels.program import take_task
from cupaged.backends.cpu_noted import WIDTH
from cupaged.backends.cpu_program import ROWS, SCRATCH
from cupaged.backends.cpu_sampling import (
    BEST,
    BIAS_IDS,
    BIAS_START,
    BIAS_VALUES,
    BINS,
    FREQUENCY,
    IN_PROMPT,
    LOGITS,
    MIN_P,
    NOTED,
    OUTPUTS,
    PENALISED,
    PRESENCE,
    RANKS,
    REPETITION,
    ROW_IDS,
    SAMPLED,
    STRIDE,
    TEMPERATURE,
    TOKEN_IDS,
    TOKENS,
    TOP_IDS,
    TOP_K,
    TOP_LOGITS,
    TOP_P,
    TOTALS,
    UNIFORMS,
    VOCAB,
    K,
)

CHUNK = 1024
"""Logits that are looked at together: they stay in the first-level cache."""

NEGLIGIBLE = -64.0
"""exp of less than this is taken as 0: a whole vocabulary of such weights vanishes beside the best token's 1."""


@kernel
def _row(operation: int, r: int) -> Any:
    """A row's logits, and their bits."""
    vocab = word(operation, VOCAB)
    address = word(operation, LOGITS) + r * word(operation, STRIDE)
    return carray(pointer_to_float32(address), vocab), carray(pointer_to_int32(address), vocab)


# ---- the operations


@operation_kernel
def greedy_rows(member: int, operation: int) -> None:
    rows = word(word(operation, ROWS), 0)
    tokens, noted = int32s(operation, TOKENS, rows), word(operation, NOTED)
    while True:
        r = take_task(member, rows)
        if r < 0:
            return
        row, bits = _row(operation, r)
        tokens[r] = _best(row, bits) if noted == 0 else _best_noted(row, noted, rows, r)


@operation_kernel
def sample_rows(member: int, operation: int) -> None:
    rows, vocab = word(word(operation, ROWS), 0), word(operation, VOCAB)
    temperature, min_p, top_p = float32s(operation, TEMPERATURE, rows), float32s(operation, MIN_P, rows), float32s(operation, TOP_P, rows)
    top_k, uniforms, tokens = int32s(operation, TOP_K, rows), float64s(operation, UNIFORMS, rows), int32s(operation, SAMPLED, rows)
    scratch = word(member, SCRATCH)
    weights, ones = carray(pointer_to_float64(scratch), vocab), carray(pointer_to_float64(scratch + 8 * vocab), vocab)
    above = carray(pointer_to_float64(scratch + 16 * vocab), BINS)
    while True:
        r = take_task(member, rows)
        if r < 0:
            return
        row, bits = _row(operation, r)
        best = _best(row, bits)
        if best >= 0 and temperature[r] > 0:
            best = _sample_row(row, bits, best, temperature[r], min_p[r], top_k[r], top_p[r], uniforms[r], weights, ones, above)
        tokens[r] = best


@operation_kernel
def adjust_rows(member: int, operation: int) -> None:
    rows, vocab = word(word(operation, ROWS), 0), word(operation, VOCAB)
    bias_start, row_ids = int32s(operation, BIAS_START, rows + 1), int32s(operation, ROW_IDS, rows)
    bias_ids, bias_values = int32s(operation, BIAS_IDS, bias_start[rows]), float32s(operation, BIAS_VALUES, bias_start[rows])
    penalised = uint8s(operation, PENALISED, rows)
    repetition, presence, frequency = float32s(operation, REPETITION, rows), float32s(operation, PRESENCE, rows), float32s(operation, FREQUENCY, rows)
    while True:
        r = take_task(member, rows)
        if r < 0:
            return
        row, _ = _row(operation, r)
        for i in range(bias_start[r], bias_start[r + 1]):
            row[bias_ids[i]] += bias_values[i]
        if penalised[r]:
            place = row_ids[r] * vocab
            count = carray(pointer_to_int32(word(operation, OUTPUTS) + 4 * place), vocab)
            in_prompt = carray(pointer_to_uint8(word(operation, IN_PROMPT) + place), vocab)
            _penalise(row, count, in_prompt, np.float64(repetition[r]), np.float64(presence[r]), np.float64(frequency[r]))


@operation_kernel
def logprob_rows(member: int, operation: int) -> None:
    """A token's rank, the largest logits, and what a logarithm is taken of: the sum of exp(logit - best)."""
    rows, k = word(word(operation, ROWS), 0), word(operation, K)
    token_ids, best, ranks = int32s(operation, TOKEN_IDS, rows), int32s(operation, BEST, rows), int32s(operation, RANKS, rows)
    totals = float64s(operation, TOTALS, rows)
    while True:
        r = take_task(member, rows)
        if r < 0:
            return
        row, bits = _row(operation, r)
        best[r] = _best(row, bits)
        if best[r] >= 0:
            totals[r] = _total(row, row[best[r]])
            ranks[r] = 1 + _count_above(row, row[token_ids[r]])
            ids = carray(pointer_to_int32(word(operation, TOP_IDS) + 4 * r * k), k)
            _top(row, bits, ids, carray(pointer_to_float32(word(operation, TOP_LOGITS) + 4 * r * k), k))


# ---- one row


@exact_kernel
def _sample_row(
    row: Any, bits: Any, best: int, temperature: np.float32, min_p: np.float32, top_k: np.int32, top_p: np.float32, u: float, weights: Any, ones: Any, above: Any
) -> int:
    total = _fill_weights(row, row[best], 1.0 / np.float64(temperature), min_p, weights)
    if 0 < top_k < len(row):
        for i in range(len(row)):
            ones[i] = 1.0
        total = _drop_below(_floor(bits, ones, np.float64(top_k), above), row, weights)
    if top_p < 1:
        total = _drop_below(_floor(bits, weights, top_p * total, above), row, weights)
    return _draw(weights, u * total)


@exact_kernel
def _penalise(row: Any, count: Any, in_prompt: Any, repetition: float, presence: float, frequency: float) -> None:
    for i in range(len(row)):
        logit = np.float64(row[i])
        if in_prompt[i] or count[i] > 0:
            logit = logit / repetition if logit > 0 else logit * repetition
        row[i] = logit - frequency * count[i] - presence * (count[i] > 0)


@exact_kernel
def _best(row: Any, bits: Any) -> int:
    """The lowest id of the largest logit; -1 where the row holds NaN or +inf, or nothing but -inf."""
    largest, where = np.float32(-np.inf), -1
    for start in range(0, len(row), CHUNK):
        low, high = extremes(bits[start : start + CHUNK])
        if refused(low, high):
            return -1
        if as_float(high) > largest:
            largest, where = as_float(high), start
    return _first(row, largest, where)


@exact_kernel
def _best_noted(row: Any, noted: int, rows: int, r: int) -> int:
    """The same from what a product has noted of its rows (extremes.py)."""
    largest, where = np.float32(-np.inf), -1
    width = word(noted, WIDTH)
    for part in range((len(row) + width - 1) // width):
        low, high = noted_extremes(noted, part * rows + r)
        if refused(low, high):
            return -1
        if as_float(high) > largest:
            largest, where = as_float(high), part * width
    return _first(row, largest, where)


@exact_kernel
def _first(row: Any, number: np.float32, where: int) -> int:
    """The first place from `where` on that holds the number; -1 stays -1."""
    if where >= 0:
        while row[where] != number:
            where += 1
    return where


@exact_kernel
def _floor(bits: Any, mass: Any, target: float, above: Any) -> np.float32:
    """The largest logit such that the tokens at or above it hold at least `target` of `mass`, and some."""
    prefix, shift = 0, 32  # of the key counted from the smallest: `prefix` are its bits from `shift` on
    for width in (11, 11, 10):
        for i in range(BINS):
            above[i] = 0.0
        mask = (1 << width) - 1
        for i in range(len(bits)):
            key = np.int64(order_of(bits[i])) + 0x80000000
            if key >> shift == prefix:
                above[(key >> (shift - width)) & mask] += mass[i]
        digit = mask
        while digit > 0 and (above[digit] < target or above[digit] == 0):  # a top_p may round to 0
            target -= above[digit]
            digit -= 1
        prefix, shift = (prefix << width) | digit, shift - width
    return as_float(np.int32(prefix - 0x80000000))


@exact_kernel
def _draw(weights: Any, target: float) -> int:
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
def _top(row: Any, bits: Any, ids: Any, values: Any) -> None:
    """Fill `ids` and `values` [k] with the largest logits, largest first, the lower id first among equals."""
    size, k = 0, len(ids)
    for start in range(0, len(row), CHUNK):
        _, high = extremes(bits[start : start + CHUNK])
        if k == 0 or (size == k and as_float(high) <= values[k - 1]):
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
def _fill_weights(row: Any, best: np.float32, scale: float, min_p: np.float32, weights: Any) -> float:
    total = 0.0
    for i in range(len(row)):
        weight = _exp((np.float64(row[i]) - np.float64(best)) * scale)
        if weight < min_p:
            weight = 0.0
        weights[i] = weight
        total += weight
    return total


@kernel
def _drop_below(floor: np.float32, row: Any, weights: Any) -> float:
    total = 0.0
    for i in range(len(row)):
        if row[i] < floor:
            weights[i] = 0.0
        total += weights[i]
    return total


@kernel
def _sum(weights: Any) -> float:
    total = 0.0
    for i in range(len(weights)):
        total += weights[i]
    return total


@kernel
def _total(row: Any, best: np.float32) -> float:
    """Sum of exp(logit - best)."""
    total = 0.0
    for i in range(len(row)):
        total += _exp(np.float64(row[i]) - np.float64(best))
    return total


@exact_kernel
def _count_above(row: Any, value: np.float32) -> int:
    count = 0
    for i in range(len(row)):
        count += row[i] > value
    return count
