"""The forward pass's kernels on the CPU: all but the matrices, which are BLAS.

Every kernel is called as kernel(part, parts, ...) and computes the rows (or tasks) part, part + parts, ...; `cpu_jit`
compiles them, `cpu_threads` runs them. Inner loops run over contiguous rows, so that LLVM vectorises them. Nothing
here checks an index: cpu.py does before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.backends.cpu_jit import exact_kernel, kernel

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts, the first exact in few bits, so that x - n ln 2 keeps its precision
LN_2_HIGH = np.float32(0.693359375)
LN_2_LOW = np.float32(-2.12194440e-4)
LOWEST = np.float32(-87.0)
HALF = np.float32(0.5)
ZERO = np.float32(0.0)
ONE = np.float32(1.0)
LINE = 16  # float32 numbers in a cache line


@exact_kernel
def exp(x: Any) -> Any:
    """e^x for x <= 0 within 2 ulp, never below e^-87: 2^n times a Taylor-like polynomial (Cephes' expf coefficients)."""
    x = max(x, LOWEST)
    n = np.floor(x * LOG2_E + HALF)
    r = (x - n * LN_2_HIGH) - n * LN_2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + ONE
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@kernel
def _norm_row(row: F32, weight: F32, eps: Any, out: F32) -> None:
    width = row.shape[0]
    total = ZERO
    for i in range(width):
        total += row[i] * row[i]
    scale = np.float32(ONE / np.sqrt(total / np.float32(width) + np.float32(eps)))
    for i in range(width):
        out[i] = row[i] * scale * weight[i]


@kernel
def rms_norm(part: int, parts: int, x: F32, weight: F32, eps: float, out: F32) -> None:
    for r in range(part, x.shape[0], parts):
        _norm_row(x[r], weight, eps, out[r])


@kernel
def add_rms_norm(part: int, parts: int, x: F32, delta: F32, weight: F32, eps: float, out: F32) -> None:
    for r in range(part, x.shape[0], parts):
        row, add = x[r], delta[r]
        for i in range(row.shape[0]):
            row[i] += add[i]
        _norm_row(row, weight, eps, out[r])


@kernel
def head_rms_norm(part: int, parts: int, qkv: F32, q_weight: F32, k_weight: F32, num_heads: int, num_kv_heads: int, eps: float) -> None:
    head_dim = q_weight.shape[0]
    for r in range(part, qkv.shape[0], parts):
        for h in range(num_heads + num_kv_heads):
            head = qkv[r, h * head_dim : (h + 1) * head_dim]
            _norm_row(head, q_weight if h < num_heads else k_weight, eps, head)


@kernel
def rope_and_cache(
    part: int, parts: int, qkv: F32, cos: F32, sin: F32, positions: I32, slots: I64, num_heads: int, key_cache: F32, value_cache: F32
) -> None:
    num_kv_heads, block_size, head_dim = key_cache.shape[1:]
    half = head_dim // 2
    for r in range(part, qkv.shape[0], parts):
        c, s = cos[positions[r]], sin[positions[r]]
        for h in range(num_heads + num_kv_heads):
            low = qkv[r, h * head_dim : h * head_dim + half]
            high = qkv[r, h * head_dim + half : (h + 1) * head_dim]
            for i in range(half):
                a, b = low[i], high[i]
                low[i] = a * c[i] - b * s[i]
                high[i] = b * c[i] + a * s[i]
        if slots[r] < 0:
            continue
        block, offset = slots[r] // block_size, slots[r] % block_size
        for h in range(num_kv_heads):
            key, value = key_cache[block, h, offset], value_cache[block, h, offset]
            k, v = (num_heads + h) * head_dim, (num_heads + num_kv_heads + h) * head_dim
            for i in range(head_dim):
                key[i] = qkv[r, k + i]
                value[i] = qkv[r, v + i]


@kernel
def silu_mul(part: int, parts: int, gate_up: F32, out: F32) -> None:
    width = out.shape[1]
    for r in range(part, out.shape[0], parts):
        gate, up, row = gate_up[r, :width], gate_up[r, width:], out[r]
        for i in range(width):
            x = gate[i]
            e = exp(-abs(x))  # never overflows
            row[i] = x * ((ONE if x >= ZERO else e) / (ONE + e)) * up[i]


@kernel
def gather_rows(part: int, parts: int, x: F32, rows: I32, out: F32) -> None:
    for r in range(part, out.shape[0], parts):
        source, row = x[rows[r]], out[r]
        for i in range(row.shape[0]):
            row[i] = source[i]


@kernel
def transpose_add(part: int, parts: int, product: F32, bias: F32, out: F32) -> None:
    """out = product.T + bias; product [N, T], bias [N] or [0] for none, out [T, N]; by tiles of one cache line of out."""
    columns = product.shape[0]
    for first in range(part * LINE, columns, parts * LINE):
        last = min(first + LINE, columns)
        for r in range(out.shape[0]):
            row = out[r]
            for i in range(first, last):
                row[i] = product[i, r]
            if bias.shape[0] > 0:
                for i in range(first, last):
                    row[i] += bias[i]


@kernel
def copy_blocks(part: int, parts: int, key_cache: F32, value_cache: F32, pairs: I32) -> None:
    """pairs int32 [n, 2] of blocks, in every layer of [layers, blocks, block's numbers]."""
    layers = key_cache.shape[0]
    for task in range(part, layers * pairs.shape[0], parts):
        layer, pair = task % layers, task // layers
        source, destination = pairs[pair, 0], pairs[pair, 1]
        for cache in (key_cache, value_cache):
            a, b = cache[layer, source], cache[layer, destination]
            for i in range(a.shape[0]):
                b[i] = a[i]


@kernel
def first_outside(indices: Any, low: int, high: int) -> int:
    """The position of the first index that is not within low .. high - 1, or -1."""
    for i in range(indices.shape[0]):
        if indices[i] < low or indices[i] >= high:
            return i
    return -1
