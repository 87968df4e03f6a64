"""Checks of matrices, and of everything else that works on one row by itself."""

from __future__ import annotations

import numpy as np

from cupaged.conformance.case import check, expect, expect_close, expect_equal, expect_refusal
from cupaged.conformance.steps import Stored, load_batch, rows_of_no_sequence
from cupaged.conformance.subject import TOLERANCES, Numbers, Subject, float64, random, rounded

ROWS = (1, 2, 3, 4, 17, 64, 127, 128, 129, 300)


@check("linear", shape=[(5, (7,)), (3, (16, 1)), (64, (33, 1, 16)), (576, (576, 192, 192))], biased=[False, True], rows=ROWS)
def multiplies_by_the_stacked_tensors_and_adds_the_stacked_bias(subject: Subject, rows: int, shape: tuple[int, tuple[int, ...]], biased: bool) -> None:
    inputs, outputs = shape
    weights = [subject.random(n, n, inputs) for n in outputs]
    biases = [10 * random(n, n) for n in outputs]
    matrix = subject.backend.load_matrix([Stored(w) for w in weights], [Stored(b) for b in biases] if biased else None)
    x, out = subject.random(1, rows, inputs), subject.output(rows, sum(outputs))
    uploaded = subject.upload(x)
    subject.backend.linear(uploaded, matrix, out.array)
    out.check(float64(x) @ float64(np.concatenate(weights)).T + (float64(np.concatenate(biases)) if biased else 0))
    expect_equal(subject.download(uploaded).astype(np.float32), x, "the input")


@check("load_matrix")
def reads_a_large_tensor_in_pieces(subject: Subject) -> None:
    source = Stored(subject.random(0, 5000, 1024))
    matrix = subject.backend.load_matrix([source, source])
    if subject.backend.name != "reference":
        expect(source.largest <= 5 << 20, f"{source.largest} bytes of a tensor are read at once")
    x, out = subject.random(1, 3, 1024), subject.output(3, 10000)
    subject.backend.linear(subject.upload(x), matrix, out.array)
    out.check(np.tile(float64(x) @ float64(source.array).T, 2))


@check("load_vector")
def is_loaded_as_it_is_stored(subject: Subject) -> None:
    vector = random(0, 77)
    expect_equal(subject.download(subject.backend.load_vector(Stored(vector))), vector, "the vector")


@check("embedding", tied=[False, True], rows=ROWS)
def gathers_rows_and_a_tied_one_is_also_the_head(subject: Subject, rows: int, tied: bool) -> None:
    backend, table = subject.backend, subject.random(3, 301, 24)
    embedding = backend.load_embedding(Stored(table), tied=tied)
    ids = np.random.default_rng(rows).integers(0, 301, rows, dtype=np.int32)
    ids[0], ids[-1] = 300, 0
    out = subject.output(rows, 24)
    backend.embedding(embedding, load_batch(backend, rows_of_no_sequence(rows), ids, vocab_size=301), out.array)
    out.check(float64(table)[ids], 0)
    if tied:
        logits = subject.output(rows, 301)
        backend.linear(out.array, embedding, logits.array)
        logits.check(float64(table)[ids] @ float64(table).T)


@check("set_batch", bad=[-1, 301, 2**31 - 1, -(2**31)])
def a_token_id_outside_the_table_is_refused(subject: Subject, bad: int) -> None:
    with expect_refusal("token id"):
        load_batch(subject.backend, rows_of_no_sequence(3), np.array([0, bad, 1], np.int32), vocab_size=301)


@check("gather_rows", rows=ROWS)
def takes_any_rows_in_any_order(subject: Subject, rows: int) -> None:
    x, out = subject.random(0, 50, 13), subject.output(rows, 13)
    which = np.random.default_rng(rows).integers(0, 50, rows, dtype=np.int32)
    subject.backend.gather_rows(subject.upload(x), subject.backend.upload(which), out.array)
    out.check(float64(x)[which], 0)


@check("gather_rows", bad=[-1, 50])
def a_row_outside_is_refused(subject: Subject, bad: int) -> None:
    if subject.backend.name == "cuda":
        return  # the host cannot see the rows, and the GPU would read what it is told to
    rows = subject.backend.upload(np.array([1, bad], np.int32))
    with expect_refusal("row"):
        subject.backend.gather_rows(subject.upload(random(0, 50, 3)), rows, subject.output(2, 3).array)


def normed(x: Numbers, weight: Numbers, eps: float) -> Numbers:
    scaled: Numbers = float64(x) / np.sqrt((float64(x) ** 2).mean(-1, keepdims=True) + eps) * float64(weight)
    return scaled


@check("rms_norm", width=[1, 17, 576], scale=[2.0**-10, 1.0, 2.0**13], rows=ROWS)
def normalises_each_row(subject: Subject, rows: int, width: int, scale: float) -> None:
    x, weight = (scale * subject.random(0, rows, width)).astype(np.float32), random(1, width)
    uploaded, out = subject.upload(x), subject.output(rows, width)
    x = subject.download(uploaded).astype(np.float32)
    subject.backend.rms_norm(uploaded, subject.backend.load_vector(Stored(weight)), 1e-5, out.array)
    out.check(normed(x, weight, 1e-5))
    expect_equal(subject.download(uploaded).astype(np.float32), x, "the input")


@check("linear_add", shape=[(5, 7), (3, 17), (64, 50), (576, 200)], biased=[False, True], rows=ROWS)
def adds_to_what_is_there(subject: Subject, rows: int, shape: tuple[int, int], biased: bool) -> None:
    inputs, outputs = shape
    weight, bias, x = subject.random(0, outputs, inputs), 10 * random(1, outputs), subject.random(2, rows, inputs)
    before = subject.random(3, rows, outputs)
    out = subject.in_place(before)
    subject.backend.linear_add(subject.upload(x), subject.backend.load_matrix([Stored(weight)], [Stored(bias)] if biased else None), out.array)
    out.check(float64(before) + float64(x) @ float64(weight).T + (float64(bias) if biased else 0))


@check("head_rms_norm", heads=[(9, 3, 64), (4, 4, 32), (16, 1, 128), (2, 1, 6)], rows=ROWS)
def normalises_queries_and_keys_by_head(subject: Subject, rows: int, heads: tuple[int, int, int]) -> None:
    queries, pairs, head_dim = heads
    content = subject.random(0, rows, (queries + 2 * pairs) * head_dim)
    expected = float64(content).reshape(rows, -1, head_dim)
    q_weight, k_weight = random(1, head_dim), random(2, head_dim)
    expected[:, :queries] = normed(expected[:, :queries], q_weight, 1e-6)
    expected[:, queries : queries + pairs] = normed(expected[:, queries : queries + pairs], k_weight, 1e-6)
    qkv = subject.in_place(content)
    q_loaded, k_loaded = (subject.backend.load_vector(Stored(weight)) for weight in (q_weight, k_weight))
    subject.backend.head_rms_norm(qkv.array, q_loaded, k_loaded, queries, pairs, 1e-6)
    qkv.check(expected.reshape(rows, -1))


@check("linear_silu_mul", shape=[(1, 1), (7, 17), (40, 96), (576, 100)], biased=[False, True], rows=ROWS)
def multiplies_gates_with_the_other_half(subject: Subject, rows: int, shape: tuple[int, int], biased: bool) -> None:
    inputs, width = shape
    gate, up, x = subject.random(0, width, inputs), subject.random(1, width, inputs), subject.random(2, rows, inputs)
    biases = [random(3, width), random(4, width)]
    matrix = subject.backend.load_gate_up(Stored(gate), Stored(up), [Stored(b) for b in biases] if biased else None)
    work, out = subject.output(rows, 2 * width), subject.output(rows, width)
    subject.backend.linear_silu_mul(subject.upload(x), matrix, work.array, out.array)
    g, u = (float64(x) @ float64(w).T + (float64(b) if biased else 0) for w, b in zip((gate, up), biases, strict=True))
    out.check(g / (1 + np.exp(-g)) * u, 2 * subject.tolerance)  # the work may be rounded, too
    work.numbers()  # has its rim


@check("linear_silu_mul")
def silu_is_right_number_by_number_and_neither_overflows_nor_loses_a_sign(subject: Subject) -> None:
    extremes = [-1e4, -200.0, 200.0, 1e4, 0.0]
    gate = rounded(np.concatenate([np.linspace(-60, 60, 4001), extremes]), subject.dtype)
    matrix, out = subject.backend.load_gate_up(Stored(gate[:, None]), Stored(np.ones_like(gate)[:, None])), subject.output(1, len(gate))
    with np.errstate(over="raise"):
        subject.backend.linear_silu_mul(subject.upload(np.ones((1, 1))), matrix, subject.output(1, 2 * len(gate)).array, out.array)
    expected = float64(gate) / (1 + np.exp(-np.clip(float64(gate), -700, None)))
    name = subject.activations.name
    near = np.isclose(out.numbers()[0], expected, rtol=2e-6 if name == "float32" else TOLERANCES[name], atol=6e-8 if name == "float16" else 1e-30)
    expect(near.all(), f"silu is wrong at {gate[~near][:3]}")


NORM_SHAPES = [(5, 7), (8, 1), (64, 50), (264, 19), (576, 200)]
"""(in, out): the kernels for few rows take widths of whole vectors, a multiple of 8."""

NORM_ROWS = (1, 2, 3, 4, 5, 130)


@check("norm_linear", shape=NORM_SHAPES, biased=[False, True], rows=NORM_ROWS)
def multiplies_the_normalised_rows(subject: Subject, rows: int, shape: tuple[int, int], biased: bool) -> None:
    inputs, outputs = shape
    weight, bias, x, norm = subject.random(0, outputs, inputs), random(1, outputs), subject.random(2, rows, inputs), 1 + random(3, inputs)
    matrix = subject.backend.load_matrix([Stored(weight)], [Stored(bias)] if biased else None)
    uploaded, work, out = subject.upload(x), subject.output(rows, inputs), subject.output(rows, outputs)
    subject.backend.norm_linear(uploaded, subject.backend.load_vector(Stored(norm)), 0.25, matrix, work.array, out.array)
    out.check(normed(x, norm, 0.25) @ float64(weight).T + (float64(bias) if biased else 0))
    work.numbers()  # has its rim
    expect_equal(subject.download(uploaded).astype(np.float32), x, "the input")


@check("norm_linear", scale=[2.0**-10, 2.0**13], rows=[1, 4, 5])
def a_factor_of_the_row_does_not_reach_the_product(subject: Subject, rows: int, scale: float) -> None:
    x, weight, norm = (scale * subject.random(0, rows, 64)).astype(np.float32), subject.random(1, 30, 64), random(2, 64)
    uploaded, out = subject.upload(x), subject.output(rows, 30)
    x = subject.download(uploaded).astype(np.float32)
    loaded = subject.backend.load_vector(Stored(norm)), subject.backend.load_matrix([Stored(weight)])
    subject.backend.norm_linear(uploaded, loaded[0], 1e-5, loaded[1], subject.output(rows, 64).array, out.array)
    out.check(normed(x, norm, 1e-5) @ float64(weight).T)


@check("norm_linear_silu_mul", shape=NORM_SHAPES, biased=[False, True], rows=NORM_ROWS)
def gates_of_normalised_rows(subject: Subject, rows: int, shape: tuple[int, int], biased: bool) -> None:
    inputs, width = shape
    gate, up, x, norm = subject.random(0, width, inputs), subject.random(1, width, inputs), subject.random(2, rows, inputs), 1 + random(3, inputs)
    biases = [random(4, width), random(5, width)]
    matrix = subject.backend.load_gate_up(Stored(gate), Stored(up), [Stored(b) for b in biases] if biased else None)
    uploaded, work, both, out = subject.upload(x), subject.output(rows, inputs), subject.output(rows, 2 * width), subject.output(rows, width)
    subject.backend.norm_linear_silu_mul(uploaded, subject.backend.load_vector(Stored(norm)), 0.25, matrix, work.array, both.array, out.array)
    g, u = (normed(x, norm, 0.25) @ float64(w).T + (float64(b) if biased else 0) for w, b in zip((gate, up), biases, strict=True))
    out.check(g / (1 + np.exp(-g)) * u, 2 * subject.tolerance)  # the work may be rounded, too
    for memory in (work, both):
        memory.numbers()  # has its rim
    expect_equal(subject.download(uploaded).astype(np.float32), x, "the input")


@check("norm_linear_silu_mul", rows=[1, 5])
def silu_of_a_normalised_row_does_not_overflow(subject: Subject, rows: int) -> None:
    numbers = rounded(np.array([-1e4, -200.0, -60.0, -1.0, 0.0, 1.0, 60.0, 200.0, 1e4]), subject.dtype)
    gate, up = np.zeros((2, len(numbers), 8), np.float32)
    gate[:, 3], up[:, 5] = numbers, 1
    matrix, ones = subject.backend.load_gate_up(Stored(gate), Stored(up)), subject.backend.load_vector(Stored(np.ones(8, np.float32)))
    work, both, out = subject.output(rows, 8), subject.output(rows, 2 * len(numbers)), subject.output(rows, len(numbers))
    with np.errstate(over="raise"):
        subject.backend.norm_linear_silu_mul(subject.upload(np.ones((rows, 8))), ones, 0.0, matrix, work.array, both.array, out.array)
    expected = float64(numbers) / (1 + np.exp(-np.clip(float64(numbers), -700, None)))
    near = np.isclose(out.numbers(), expected, rtol=subject.tolerance, atol=1e-6).all(0)
    expect(near.all(), f"silu is wrong at {numbers[~near]}")


@check("record")
def a_program_runs_its_operations_for_any_number_of_rows(subject: Subject) -> None:
    backend, weight, other = subject.backend, subject.random(0, 40, 24), subject.random(1, 24, 40)
    first, second = backend.load_matrix([Stored(weight)]), backend.load_matrix([Stored(other)])
    x, hidden = backend.empty((50, 24), subject.activations), backend.empty((50, 40), subject.activations)

    def build(rows: int) -> None:
        backend.linear(x[:rows], first, hidden[:rows])
        backend.linear_add(hidden[:rows], second, x[:rows])

    run = backend.record(build, 50)
    for rows in (50, 1, 17, 50, 8):
        content = subject.random(rows, 50, 24)
        x[:] = subject.upload(content)
        expected = float64(content)
        expected[:rows] += float64(content[:rows]) @ float64(weight).T @ float64(other).T
        run(rows)
        expect_close(subject.download(x), expected, 2 * subject.tolerance)
