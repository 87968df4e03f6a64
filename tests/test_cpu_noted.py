"""The likeliest token behind a product in one program: it is found by what the product's tasks have noted of their logits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cupaged.backends import cpu_noted, cpu_sampling
from cupaged.backends.cpu import CpuBackend
from cupaged.conformance.steps import Stored

pytest.importorskip("numba")

WIDTH = 64
Program = Callable[[int], None]


class Head:
    """A product and the choice behind it, recorded for up to `rows` rows; memory is None where they are not connected."""

    def __init__(self, weights: np.ndarray, rows: int, threads: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.backend = CpuBackend(threads, dtype)
        self.matrix = self.backend.load_matrix([Stored(weights)])
        self.x = np.zeros((rows, WIDTH), np.float32)
        self.logits = self.backend.empty((rows, len(weights)), np.float32)
        self.tokens = np.full(rows, 99, np.int32)
        self.memory: list[np.ndarray] = []

        def connect(*arguments: object) -> list[np.ndarray]:
            self.memory = honest(*arguments)
            return self.memory

        honest = cpu_noted.connect
        monkeypatch.setattr(cpu_noted, "connect", connect)
        self.run: Program = self.backend.record(self.build, rows)
        monkeypatch.setattr(cpu_noted, "connect", honest)

    def build(self, rows: int) -> None:
        self.backend.linear(self.x[:rows], self.matrix, out=self.logits[:rows])
        self.backend.likeliest(self.logits[:rows], out=self.tokens[:rows])


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("vocabulary", [17, 1024, 9001])
def test_it_is_the_lowest_of_the_largest(vocabulary: int, dtype: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(vocabulary)
    weights = rng.standard_normal((vocabulary, WIDTH)).astype(np.float32)
    half = vocabulary // 2
    weights[half : 2 * half] = weights[:half]  # nearly every logit is there twice, mostly in parts of different tasks
    head = Head(weights, 300, threads, dtype, monkeypatch)
    assert len(head.memory) == 1
    noted = head.memory[0]
    for rows in (1, 2, 7, 24, 25, 64, 241, 300):
        head.x[:] = rng.standard_normal(head.x.shape)
        noted[:] = 0x7F000000_7F000000  # what a step before has noted is the larger one
        head.run(rows)
        np.testing.assert_array_equal(head.tokens[:rows], head.logits[:rows].argmax(axis=1))
        assert not ((head.tokens[:rows] >= half) & (head.tokens[:rows] < 2 * half)).any()
        head.tokens[:] = 99


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_that_nothing_may_be_chosen_from_are_marked(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = np.random.default_rng(0).standard_normal((5000, WIDTH)).astype(np.float32)
    head = Head(weights, 40, threads, "float32", monkeypatch)
    for rows in (5, 40):
        head.x[:] = 1
        head.x[1, 3], head.x[2, 60], head.x[4] = np.nan, np.inf, -np.inf
        head.run(rows)
        assert head.tokens[1] == head.tokens[2] == head.tokens[4] == -1
        assert (np.delete(head.tokens[:rows], [1, 2, 4]) == head.logits[0].argmax()).all()


def test_nothing_but_minus_infinity_is_marked_and_minus_zero_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head(np.zeros((3000, WIDTH), np.float32), 2, 2, "float32", monkeypatch)
    head.matrix.parts[0].weight[...] = 0
    head.run(2)
    assert head.tokens.tolist() == [0, 0]
    backend, tokens = CpuBackend(2), np.empty(3, np.int32)
    logits = np.full((3, 3000), -np.inf, np.float32)
    logits[1, 7], logits[1, 2000], logits[2, 2999] = -0.0, 0.0, -1e38
    program = backend.record(lambda rows: backend.likeliest(logits[:rows], out=tokens[:rows]), 3)
    program(3)
    assert tokens.tolist() == [-1, 7, 2999]


def test_only_what_is_right_behind_a_product_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head(np.eye(WIDTH, dtype=np.float32), 4, 2, "float32", monkeypatch)
    other = np.tile(np.arange(WIDTH, dtype=np.float32), (4, 1))
    backend, connected = head.backend, []
    honest = cpu_noted.connect
    monkeypatch.setattr(cpu_noted, "connect", lambda *arguments: connected.extend(honest(*arguments)) or [])

    def of_others(rows: int) -> None:
        backend.linear(head.x[:rows], head.matrix, out=head.logits[:rows])
        backend.likeliest(other[:rows], out=head.tokens[:rows])

    def of_sums(rows: int) -> None:
        backend.linear_add(head.x[:rows], head.matrix, out=head.logits[:rows])
        backend.likeliest(head.logits[:rows], out=head.tokens[:rows])

    backend.record(of_others, 4)(4)
    assert head.tokens.tolist() == [WIDTH - 1] * 4
    head.x[:], head.logits[:] = 0, other
    backend.record(of_sums, 4)(4)
    assert head.tokens.tolist() == [WIDTH - 1] * 4
    assert not connected


def test_tasks_never_have_more_parts_than_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for threads in (1, 2, 5, 8):
        for vocabulary in (1, 32, 33, 1000, 32 * 16 * threads - 1, 32 * 31 * threads, 32 * 128 * threads + 32, 40_000):
            head = Head(np.ones((vocabulary, WIDTH), np.float32), 50, threads, "float32", monkeypatch)
            (noted,) = head.memory
            for rows in (1, 2, 3, 25, 50):
                head.run(rows)
                parts = -(-vocabulary // int(noted[cpu_noted.WIDTH]))
                assert cpu_noted.FIRST_PAIR + parts * rows <= len(noted)
                assert head.tokens[:rows].tolist() == [0] * rows
    assert cpu_sampling.NOTED
