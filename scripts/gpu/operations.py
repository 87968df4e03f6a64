"""Every operation of a backend on the device, in every type, against the plain NumPy definition of it.

A handful of shapes for each, chosen for their edges; `cupaged kernels check` has many more. Inputs are numbers that the types
hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np

from cupaged.backends.base import AttentionBatch, Backend, BatchLimits, SamplingBatch
from cupaged.backends.device import Array, Device
from gpu import attention
from gpu.both import TOLERANCES, Both, Stored, rounded
from gpu.cases import Case, Failure, Figures


def cases(device: Device) -> Iterator[Case]:
    for dtype in TOLERANCES:
        both = Both(device, dtype)
        for title, check in OPERATIONS.items():
            yield Case(f"{title}, {dtype}", partial(check, both))
    yield Case("sample, token_logprobs and beam_candidates", partial(_sampling, Both(device, "float32")))
    yield from attention.cases(device)


# ---- rows


def _products(both: Both) -> Figures:
    worst = 0.0
    for rows, inputs, outputs in ((1, 64, 40), (3, 576, 33), (4, 264, 19), (5, 40, 24), (17, 64, 33), (130, 576, 192)):
        weight, bias, x, start = (rounded(i, both.dtype, *s) for i, s in enumerate(((outputs, inputs), (outputs,), (rows, inputs), (rows, outputs))))
        for biased in (None, [Stored(bias)]):

            def linear(backend: Backend, upload: Any, out: Array, add: bool, weight: Any = weight, x: Any = x, biased: Any = biased) -> None:
                matrix = backend.load_matrix([Stored(weight[:1]), Stored(weight[1:])], biased and [Stored(biased[0].read(0, 1)), Stored(biased[0].read(1))])
                (backend.linear_add if add else backend.linear)(upload(x), matrix, out)

            def normed(backend: Backend, upload: Any, out: Array, weight: Any = weight, x: Any = x, biased: Any = biased) -> None:
                norm, matrix = backend.load_vector(Stored(1 + x[0])), backend.load_matrix([Stored(weight)], biased)
                backend.norm_linear(upload(x), norm, 1e-5, matrix, backend.empty(x.shape, backend.activations), out)

            worst = max(worst, both.compare((rows, outputs), partial(linear, add=False)), both.compare((rows, outputs), partial(linear, add=True), start))
            worst = max(worst, both.compare((rows, outputs), normed))
    return {"largest error": worst}


def _gate(both: Both) -> Figures:
    worst = 0.0
    for rows, inputs, width in ((1, 64, 40), (3, 264, 19), (4, 576, 33), (7, 40, 1030), (130, 64, 32)):
        gate, up, x = (rounded(i, both.dtype, *s) for i, s in enumerate(((width, inputs), (width, inputs), (rows, inputs))))

        def run(backend: Backend, upload: Any, out: Array, gate: Any = gate, up: Any = up, x: Any = x) -> None:
            work = backend.empty((len(x), 2 * len(up)), backend.activations)
            backend.linear_silu_mul(upload(x), backend.load_gate_up(Stored(gate), Stored(up)), work, out)

        def normed(backend: Backend, upload: Any, out: Array, gate: Any = gate, up: Any = up, x: Any = x) -> None:
            norm, matrix = backend.load_vector(Stored(1 + x[0])), backend.load_gate_up(Stored(gate), Stored(up))
            memory = (backend.empty((len(x), n), backend.activations) for n in (x.shape[1], 2 * len(up)))
            backend.norm_linear_silu_mul(upload(x), norm, 1e-5, matrix, *memory, out)

        # the products are rounded to the type before they are multiplied
        worst = max(worst, both.compare((rows, width), run), both.compare((rows, width), normed))
    return {"largest error": worst}


def _norms(both: Both) -> Figures:
    worst = 0.0
    for rows, width in ((1, 1), (3, 17), (5, 576), (2, 4096)):
        x, weight = rounded(0, both.dtype, rows, width), rounded(1, "float32", width)

        def norm(backend: Backend, upload: Any, out: Array, x: Any = x, weight: Any = weight) -> None:
            backend.rms_norm(upload(x), backend.load_vector(Stored(weight)), 1e-5, out)

        worst = max(worst, both.compare((rows, width), norm))
    qkv, weights = rounded(2, both.dtype, 5, 15 * 64), [rounded(i, "float32", 64) for i in (3, 4)]

    def heads(backend: Backend, upload: Any, out: Array) -> None:
        backend.head_rms_norm(out, *(backend.load_vector(Stored(w)) for w in weights), 9, 3, 1e-6)

    return {"largest error": max(worst, both.compare(qkv.shape, heads, qkv))}


def _rows(both: Both) -> Figures:
    table, chosen = rounded(0, both.dtype, 50, 1030), np.array([6, 0, 3, 3, 49], np.int32)

    def gather(backend: Backend, upload: Any, out: Array) -> None:
        backend.gather_rows(upload(table), backend.upload(chosen), out)

    def embed(backend: Backend, upload: Any, out: Array) -> None:
        batch = backend.new_batch(BatchLimits(5, 1, 1, 50, 1, 1, 16))
        nothing = AttentionBatch(np.zeros(5, np.int32), np.full(5, -1), np.full((1, 1), -1, np.int32), np.zeros(2, np.int32), np.zeros(1, np.int32), 0, 0)
        backend.set_batch(batch, chosen, nothing)
        backend.embedding(backend.load_embedding(Stored(table), tied=False), batch, out)

    error = max(both.compare((5, 1030), run) for run in (gather, embed))
    if error:
        raise Failure(f"copied rows are {error:.2g} off")
    return {"largest error": error}


def _blocks(both: Both) -> Figures:
    shape = (3, 7, 2, 4, 64)
    pool = tuple(both.upload(rounded(i, both.dtype, *shape)) for i in range(2))
    space = both.backend.new_swap_space(shape[0], 4, *shape[2:])
    before = [np.array(both.backend.download(cache)) for cache in pool]
    both.backend.copy_blocks(*pool, np.array([[5, 0], [5, 2], [1, 6]], np.int32))
    both.backend.swap_blocks(pool, space, np.array([[3, 1], [4, 0]], np.int32))
    both.backend.swap_blocks(space, pool, np.array([[1, 4]], np.int32))
    for cache, was in zip(pool, before, strict=True):
        got = both.backend.download(cache)
        for target, source in ((0, 5), (2, 5), (6, 1), (4, 3), (1, 1), (3, 3), (5, 5)):
            if got[:, target].tobytes() != was[:, source].tobytes():
                raise Failure(f"block {target} does not hold what block {source} held")
    return {"largest error": 0.0}


# ---- sampling

SAMPLED: dict[str, list[Any]] = {
    "temperature": [0, 1, 0.7, 1.7, 0.9, 0, 1], "top_k": [0, 0, 5, 0, 50, 0, 1], "top_p": [1, 0.7, 1, 1, 0.9, 1, 0.01], "min_p": [0, 0, 0, 0.05, 0.01, 0, 0],
    "repetition": [1, 1, 1, 1, 1.3, 1.5, 1], "presence": [0, 0, 0, 0, 0.2, 0, 0], "frequency": [0, 0, 0, 0, 0.1, 0, 0.5],
    "seeds": [0, 1, 2, 3, 4, 5, 2**63], "positions": [0, 9, 8, 7, 6, 5, 4], "indices": [0, 0, 1, 2, 0, 0, 0],
}  # fmt: skip
"""A row each: greedy, every filter alone, everything together, penalties."""


def _sampling_batch() -> SamplingBatch:
    kinds = {f.name: np.dtype(np.float32) for f in fields(SamplingBatch)} | dict.fromkeys(("top_k", "positions", "indices"), np.dtype(np.int32))
    arrays: dict[str, Any] = {name: np.array(values, np.uint64 if name == "seeds" else kinds[name]) for name, values in SAMPLED.items()}
    rows = len(SAMPLED["seeds"])
    starts = np.array([0, 0, 0, 2, 2, 2, 3, 3], np.int32)
    penalised = (arrays["repetition"] != 1) | (arrays["presence"] != 0) | (arrays["frequency"] != 0)
    return SamplingBatch(
        **arrays, row_ids=np.arange(rows, dtype=np.int32), bias_start=starts, bias_ids=np.array([3, 40, 7], np.int32),
        bias_values=np.array([4.0, -np.inf, 2.0], np.float32), penalised=penalised,
    )  # fmt: skip


def _sampling(both: Both) -> Figures:
    batch, vocabulary, k = _sampling_batch(), 1000, 5
    logits = 3 * np.random.default_rng(0).standard_normal((batch.num_rows, vocabulary), np.float32)
    backends: tuple[Backend, ...] = (both.backend, both.reference)
    for backend in backends:
        for row in range(batch.num_rows):
            backend.set_history(row, np.array([3, 5, row], np.int32), np.array([7, 7, row], np.int32))
    for turn in range(5):  # later ones count the tokens of the first ones
        ours, expected = (b.download(b.sample(b.upload(logits.copy()), batch)).tolist() for b in backends)
        if ours != expected:
            raise Failure(f"turn {turn} chose {ours} instead of {expected}")
    chosen = np.array(expected, np.int32)
    worst = 0.0
    reports = [[*b.token_logprobs(b.upload(logits), b.upload(chosen), k), *b.beam_candidates(b.upload(logits), k)] for b in backends]
    for ours_, wanted in zip(*reports, strict=True):
        got = both.backend.download(ours_)
        if got.dtype == np.int32 and not np.array_equal(got, wanted):
            raise Failure("other tokens, or ranks, are reported")
        worst = max(worst, both.close(got, wanted.astype(np.float32)))
    return {"largest error": worst}


OPERATIONS: dict[str, Callable[[Both], Figures]] = {
    "linear, linear_add and norm_linear": _products, "linear_silu_mul and norm_linear_silu_mul": _gate, "rms_norm and head_rms_norm": _norms, "embedding and gather_rows": _rows,
    "rope_and_cache": attention.rope, "copy_blocks and swap_blocks": _blocks,
}  # fmt: skip
