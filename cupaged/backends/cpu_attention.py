"""Paged attention on the CPU, over the block table, with softmax computed on the way.

    key, value cache   [B, K, P, D]: the P slots of one head in one block are contiguous
    a task             one sequence and one KV head (decode), or also a tile of its rows (more rows than one)

decode: one row; the G query heads that share a KV head read each block's keys while they are in the cache; all scores
        of the context are kept, so the softmax is one plain pass. Bound by memory.
prefill: a tile of rows x G heads against tiles of TILE keys, with a running maximum and sum (online softmax,
        arXiv 1805.02867). Keys are transposed into scratch once a tile, so both products are the same small matrix
        product. Bound by arithmetic.

Slots outside a row's window or context are never read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupaged.backends.cpu_jit import kernel, max_kernel
from cupaged.backends.cpu_kernels import F32, I32, ZERO, exp

TILE = 128  # keys a tile
TILE_ROWS = 64  # rows x heads a tile, about

LOWEST = np.float32(-3.0e38)


@max_kernel
def _largest(x: F32, start: int, stop: int) -> Any:
    m = LOWEST
    for i in range(start, stop):
        m = max(m, x[i])
    return m


@kernel
def _exponentiate(x: F32, start: int, stop: int, maximum: Any, scale: Any) -> Any:
    """x = exp((x - maximum) * scale) in place on start .. stop; returns the sum."""
    total = ZERO
    for i in range(start, stop):
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
        total = _exponentiate(scores[h], 0, count, _largest(scores[h], 0, count), scale)
        for i in range(count):
            scores[h, i] /= total
        out[h] = ZERO
    start = oldest
    while start < context:
        block, offset = table[start // block_size], start % block_size
        stop = min(context, start - offset + block_size)
        for h in range(heads):
            _add_product(scores[h, start - oldest :], value_cache[block, first_head + h // group, offset:], stop - start, out[h])
        start = stop


@kernel
def _gather(cache_k: F32, cache_v: F32, table: I32, head: int, first: int, count: int, keys: F32, values: F32) -> None:
    """Slots first .. first + count - 1 of one head: keys[d, t] (transposed) and values[t, d]."""
    block_size, head_dim = cache_k.shape[2], cache_k.shape[3]
    for t in range(count):
        block, offset = table[(first + t) // block_size], (first + t) % block_size
        k, v, row = cache_k[block, head, offset], cache_v[block, head, offset], values[t]
        for i in range(head_dim):
            keys[i, t] = k[i]
            row[i] = v[i]


@kernel
def _prefill(
    query: F32, position: int, table: I32, window: int, key_cache: F32, value_cache: F32, head: int, scale: Any, scratch: Any, out: F32
) -> None:
    """A tile of rows at position, position + 1, ... and the G heads of one KV head; query, out [rows, G, D]."""
    keys, values, scores, maxima, sums, sums_of_rows = scratch
    rows, group = query.shape[0], query.shape[1]
    last = position + rows  # one past
    for r in range(rows):
        for g in range(group):
            maxima[r * group + g] = LOWEST
            sums[r * group + g] = ZERO
            sums_of_rows[r * group + g] = ZERO
    first = max(0, position - window + 1) if window > 0 else 0
    while first < last:
        count = min(TILE, last - first)
        _gather(key_cache, value_cache, table, head, first, count, keys, values)
        for r in range(rows):
            low = max(0, position + r - window + 1 - first) if window > 0 else 0
            high = min(count, position + r + 1 - first)
            if low >= high:
                continue
            for g in range(group):
                n = r * group + g
                s = scores[:high]
                s[:] = ZERO
                _add_product(query[r, g], keys, query.shape[2], s)
                largest = max(maxima[n], _largest(s, low, high))
                shrink = exp((maxima[n] - largest) * scale)
                maxima[n] = largest
                sums[n] = sums[n] * shrink + _exponentiate(s, low, high, largest, scale)
                o = sums_of_rows[n]
                for i in range(o.shape[0]):
                    o[i] *= shrink
                _add_product(s[low:], values[low:], high - low, o)
        first += count
    for r in range(rows):
        for g in range(group):
            n = r * group + g
            for i in range(out.shape[2]):
                out[r, g, i] = sums_of_rows[n, i] / sums[n]


@kernel
def attention(
    part: int,
    parts: int,
    qkv: F32,
    key_cache: F32,
    value_cache: F32,
    positions: I32,
    tables: I32,
    query_start: I32,
    context_lens: I32,
    num_decode: int,
    max_context: int,
    scale: float,
    window: int,
    out: F32,
) -> None:
    """qkv [T, H + 2K, D], out [T, H, D]; the other arrays as in AttentionBatch."""
    num_kv_heads, head_dim = key_cache.shape[1], key_cache.shape[3]
    group = out.shape[1] // num_kv_heads
    scale = np.float32(scale)
    scores = np.empty((out.shape[1], max_context), np.float32)
    # Heads of one block lie side by side in memory: read them together where there are sequences for all threads.
    span = num_kv_heads if num_decode >= 2 * parts else 1
    spans = num_kv_heads // span
    for task in range(part, num_decode * spans, parts):
        s, head = task // spans, task % spans
        heads = slice(head * span * group, (head + 1) * span * group)
        row = query_start[s]
        if context_lens[s] == 0:
            out[row, heads] = ZERO
            continue
        context = positions[row] + 1
        oldest = max(0, context - window) if window > 0 else 0
        _decode(qkv[row, heads], tables[s], oldest, context, key_cache, value_cache, head, scale, scores, out[row, heads])
    if num_decode == context_lens.shape[0]:
        return
    step = max(1, TILE_ROWS // group)
    scratch = (
        np.empty((head_dim, TILE), np.float32),
        np.empty((TILE, head_dim), np.float32),
        np.empty(TILE, np.float32),
        np.empty(step * group, np.float32),
        np.empty(step * group, np.float32),
        np.empty((step * group, head_dim), np.float32),
    )
    task = 0
    for s in range(num_decode, context_lens.shape[0]):
        for row in range(query_start[s], query_start[s + 1], step):
            stop = min(row + step, query_start[s + 1])
            for head in range(num_kv_heads):
                task += 1
                if task % parts != part:
                    continue
                heads = slice(head * group, (head + 1) * group)
                if context_lens[s] == 0:
                    out[row:stop, heads] = ZERO
                else:
                    _prefill(qkv[row:stop, heads], positions[row], tables[s], window, key_cache, value_cache, head, scale, scratch, out[row:stop, heads])


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
