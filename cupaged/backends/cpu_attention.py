"""Paged attention on the CPU, over the block table.

    key, value cache   [B, K, P, D]: the P slots of one head in one block are contiguous

short runs: a sequence's rows in the step are few, above all the one of decode. Row by row: the G query heads that share
        a KV head read each block's keys while they are in the cache; all scores of the context are kept, so the softmax
        is one plain pass. Bound by memory.
long runs: a tile of one sequence's rows and the G heads of one KV head against tiles of keys and values, gathered from
        their blocks into scratch, with a running maximum and sum (online softmax, arXiv 1805.02867). Both products are
        BLAS's, on one thread: every member of the team multiplies tiles of its own. Bound by arithmetic.

Slots outside a row's window or context are never read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupaged.backends.base import AttentionBatch
from cupaged.backends.cpu_jit import kernel
from cupaged.backends.cpu_kernels import F32, I32, I64, ZERO, exp

LONG_RUN = 2048
"""Rows x context of a sequence from which tiles are faster than row by row."""

TILE_KEYS = 512
TILE_ROWS = 192
"""Rows x heads a tile, about: its scores, keys and values together stay in a core's second-level cache."""

LOWEST = np.float32(-3.0e38)
_SIGN = np.int32(31)
_MAGNITUDE = np.int32(0x7FFFFFFF)


@kernel
def _largest(x: F32) -> Any:
    """The maximum, over integers in the order of the numbers (negative ones have their magnitude inverted): it vectorises."""
    bits = x.view(np.int32)
    m = ~_MAGNITUDE
    for i in range(bits.shape[0]):
        m = max(m, bits[i] ^ ((bits[i] >> _SIGN) & _MAGNITUDE))
    return np.int32(m ^ ((m >> _SIGN) & _MAGNITUDE)).view(np.float32)


@kernel
def _exponentiate(x: F32, maximum: Any, scale: Any) -> Any:
    """x = exp((x - maximum) * scale) in place; returns the sum."""
    total = ZERO
    for i in range(x.shape[0]):
        e = exp((x[i] - maximum) * scale)
        x[i] = e
        total += e
    return total


@kernel
def _scores(query: F32, keys: F32, count: int, out: F32) -> None:
    """out[t] = query . keys[t] for t < count; four keys at once share the loads of the query."""
    width = query.shape[0]
    whole = count - count % 4
    for t in range(0, whole, 4):
        k0, k1, k2, k3 = keys[t], keys[t + 1], keys[t + 2], keys[t + 3]
        s0, s1, s2, s3 = ZERO, ZERO, ZERO, ZERO
        for i in range(width):
            q = query[i]
            s0 += q * k0[i]
            s1 += q * k1[i]
            s2 += q * k2[i]
            s3 += q * k3[i]
        out[t], out[t + 1], out[t + 2], out[t + 3] = s0, s1, s2, s3
    for t in range(whole, count):
        k0, s0 = keys[t], ZERO
        for i in range(width):
            s0 += query[i] * k0[i]
        out[t] = s0


@kernel
def _add_product(a: F32, b: F32, count: int, out: F32) -> None:
    """out += a[:count] @ b[:count]: a vector times rows, eight rows at once so that `out` is loaded once for them."""
    width = out.shape[0]
    whole = count - count % 8
    for t in range(0, whole, 8):
        a0, a1, a2, a3, a4, a5, a6, a7 = a[t], a[t + 1], a[t + 2], a[t + 3], a[t + 4], a[t + 5], a[t + 6], a[t + 7]
        b0, b1, b2, b3, b4, b5, b6, b7 = b[t], b[t + 1], b[t + 2], b[t + 3], b[t + 4], b[t + 5], b[t + 6], b[t + 7]
        for i in range(width):
            out[i] += (a0 * b0[i] + a1 * b1[i] + a2 * b2[i] + a3 * b3[i]) + (a4 * b4[i] + a5 * b5[i] + a6 * b6[i] + a7 * b7[i])
    for t in range(whole, count):
        a0, b0 = a[t], b[t]
        for i in range(width):
            out[i] += a0 * b0[i]


@kernel
def _decode(
    query: F32, table: I32, oldest: int, context: int, key_cache: F32, value_cache: F32, first_head: int, scale: Any, scores: F32, out: F32
) -> None:
    """One row's query heads of a few KV heads, over slots oldest .. context - 1.

    query, out [heads * G, D], the first of them reads KV head `first_head`; scores [heads * G, >= context].
    """
    block_size = key_cache.shape[2]
    heads = query.shape[0]
    group = scores.shape[0] // key_cache.shape[1]
    start = oldest
    while start < context:
        block, offset = table[start // block_size], start % block_size
        stop = min(context, start - offset + block_size)
        for h in range(heads):
            _scores(query[h], key_cache[block, first_head + h // group, offset:], stop - start, scores[h, start - oldest :])
        start = stop
    count = context - oldest
    for h in range(heads):
        row = scores[h, :count]
        total = _exponentiate(row, _largest(row), scale)
        for i in range(count):
            row[i] /= total
        out[h] = ZERO
    start = oldest
    while start < context:
        block, offset = table[start // block_size], start % block_size
        stop = min(context, start - offset + block_size)
        for h in range(heads):
            _add_product(scores[h, start - oldest :], value_cache[block, first_head + h // group, offset:], stop - start, out[h])
        start = stop


@kernel
def _short_runs(
    part: int,
    parts: int,
    qkv: F32,
    key_cache: F32,
    value_cache: F32,
    sequences: I64,
    positions: I32,
    tables: I32,
    query_start: I32,
    context_lens: I32,
    max_context: int,
    scale: float,
    window: int,
    out: F32,
) -> None:
    """A part of the rows of `sequences`; the other arrays as in `attention`."""
    num_kv_heads = key_cache.shape[1]
    group = out.shape[1] // num_kv_heads
    scale = np.float32(scale)
    scores = np.empty((out.shape[1], max_context), np.float32)
    # Heads of one block lie side by side in memory: read them together where there are sequences for all threads.
    span = num_kv_heads if sequences.shape[0] >= 2 * parts else 1
    task = 0
    for s in sequences:
        for row in range(query_start[s], query_start[s + 1]):
            for head in range(0, num_kv_heads, span):
                task += 1
                if task % parts != part:
                    continue
                heads = slice(head * group, (head + span) * group)
                if context_lens[s] == 0:
                    out[row, heads] = ZERO
                    continue
                context = positions[row] + 1
                oldest = max(0, context - window) if window > 0 else 0
                _decode(qkv[row, heads], tables[s], oldest, context, key_cache, value_cache, head, scale, scores, out[row, heads])


@kernel
def _gather(cache: F32, table: I32, head: int, first: int, out: F32) -> None:
    """out[t] = slot first + t of one head."""
    block_size, count = cache.shape[2], out.shape[0]
    for t in range(count):
        slot, row = cache[table[(first + t) // block_size], head, (first + t) % block_size], out[t]
        for i in range(row.shape[0]):
            row[i] = slot[i]


@kernel
def _weigh(scores: F32, group: int, position: int, first: int, window: int, scale: Any, maxima: F32, sums: F32, total: F32) -> None:
    """In place scores = exp((scores - running maximum) * scale), and 0 where a row does not see a key.

    scores [rows * G, keys]: the rows from `position` on, the keys from `first` on. What stands in maxima, sums
    [rows * G] and total [rows * G, D] is of the tiles of keys before; the latter two are scaled to the new maxima.
    """
    count = scores.shape[1]
    for n in range(scores.shape[0]):
        end = position + n // group + 1 - first
        high = max(0, min(count, end))
        low = min(high, max(0, end - window)) if window > 0 else 0
        scores[n, :low] = ZERO
        scores[n, high:] = ZERO
        if low == high:
            continue
        seen, sum_of_values = scores[n, low:high], total[n]
        largest = max(maxima[n], _largest(seen))
        shrink = exp((maxima[n] - largest) * scale)
        maxima[n] = largest
        sums[n] = sums[n] * shrink + _exponentiate(seen, largest, scale)
        for i in range(sum_of_values.shape[0]):
            sum_of_values[i] *= shrink


class Tile(NamedTuple):
    """Rows start .. stop - 1 of the step, all of one sequence, and the query heads of one KV head."""

    sequence: int
    start: int
    stop: int
    head: int


def share_out(batch: AttentionBatch, num_kv_heads: int, group: int) -> tuple[I64, list[Tile]]:
    """The sequences that are short runs, and the tiles of the long ones; those that see the most keys come last."""
    rows = np.diff(batch.query_start).astype(np.int64)
    long = rows * batch.context_lens >= LONG_RUN
    long[: batch.num_decode] = False
    step = max(1, TILE_ROWS // group)
    tiles = [
        Tile(s, start, min(start + step, int(batch.query_start[s + 1])), head)
        for s in np.flatnonzero(long).tolist()
        for start in range(batch.query_start[s], batch.query_start[s + 1], step)
        for head in range(num_kv_heads)
    ]
    return np.flatnonzero(~long), sorted(tiles, key=lambda tile: int(batch.positions[tile.start]))


def attention(
    part: int,
    parts: int,
    qkv: F32,
    key_cache: F32,
    value_cache: F32,
    batch: AttentionBatch,
    short: I64,
    tiles: list[Tile],
    scale: float,
    window: int,
    out: F32,
) -> None:
    """A part of the short runs, then tiles from the list that all parts share until none is left.

    qkv [T, H + 2K, D], out [T, H, D]; short and tiles from `share_out`.
    """
    _short_runs(
        part, parts, qkv, key_cache, value_cache, short, batch.positions, batch.block_tables, batch.query_start, batch.context_lens,
        batch.max_context, scale, window, out,
    )  # fmt: skip
    if not tiles:
        return
    group, head_dim = out.shape[1] // key_cache.shape[1], out.shape[2]
    keys = min(TILE_KEYS, batch.max_context)
    scratch = np.empty(max(group, TILE_ROWS) * keys, np.float32), np.empty((keys, head_dim), np.float32), np.empty((keys, head_dim), np.float32)
    while True:
        try:
            tile = tiles.pop()
        except IndexError:
            return
        block = slice(tile.start, tile.stop), slice(tile.head * group, (tile.head + 1) * group)
        _long_run(tile, qkv[block], key_cache, value_cache, batch, np.float32(scale), window, scratch, out[block])


def _long_run(
    tile: Tile, qkv: F32, key_cache: F32, value_cache: F32, batch: AttentionBatch, scale: Any, window: int, scratch: tuple[F32, F32, F32], out: F32
) -> None:
    """One tile: qkv, out [rows, G, D]."""
    rows, group, head_dim = out.shape
    query = qkv.reshape(rows * group, head_dim)
    table, position = batch.block_tables[tile.sequence], int(batch.positions[tile.start])
    maxima, sums = np.full(len(query), LOWEST), np.zeros(len(query), np.float32)
    total, product = np.zeros_like(query), np.empty_like(query)
    for first in range(max(0, position - window + 1) if window > 0 else 0, position + rows, TILE_KEYS):
        count = min(TILE_KEYS, position + rows - first)
        scores, keys, values = scratch[0][: len(query) * count].reshape(-1, count), scratch[1][:count], scratch[2][:count]
        _gather(key_cache, table, tile.head, first, keys)
        _gather(value_cache, table, tile.head, first, values)
        np.matmul(query, keys.T, out=scores)
        _weigh(scores, group, position, first, window, scale, maxima, sums, total)
        total += np.matmul(scores, values, out=product)
    np.divide(total.reshape(out.shape), sums.reshape(rows, group, 1), out=out)


@kernel
def first_unsound(
    positions: I32, tables: I32, query_start: I32, context_lens: I32, num_decode: int, max_context: int, window: int, num_blocks: int, block_size: int
) -> int:
    """The first sequence that would make `attention` read or write outside its arrays, or -1."""
    if query_start[0] != 0 or query_start.shape[0] != context_lens.shape[0] + 1 or tables.shape[0] < context_lens.shape[0]:
        return 0
    for s in range(context_lens.shape[0]):
        first, last, context = query_start[s], query_start[s + 1], context_lens[s]
        if last < first or last > positions.shape[0] or (s < num_decode and last != first + 1):
            return s
        if context < 0 or context > max_context or context > tables.shape[1] * block_size:
            return s
        if context == 0 or last == first:
            continue
        for row in range(first, last):
            if positions[row] != positions[first] + row - first:
                return s
        if positions[first] < 0 or positions[last - 1] >= context:
            return s
        oldest = max(0, positions[first] - window + 1) if window > 0 else 0
        for i in range(oldest // block_size, positions[last - 1] // block_size + 1):
            if tables[s, i] < 0 or tables[s, i] >= num_blocks:
                return s
    return -1
