"""The recorded forward pass on a device: graphs for steps of decode rows, padded lanes, fixed addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupaged import LLM, EngineConfig, SamplingParams
from cupaged.backends import emu
from cupaged.backends.base import AttentionBatch, BatchLimits
from cupaged.backends.emu_device import EmuDevice, EmuGraph
from cupaged.backends.kernel_batch import lanes_for
from cupaged.backends.kernels import KernelBackend
from cupaged.backends.launch import Launch
from cupaged.errors import BackendError
from tests.family_models import ROOT
from tests.support.kernels import skip_without_compiler

HEADS, KV_HEADS, HEAD_DIM, BLOCK, BLOCKS, LANES, WIDTH = 6, 2, 64, 16, 24, 11, 6
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
LIMITS = BatchLimits(
    rows=40, sequences=LANES, table_width=WIDTH, vocab_size=50, positions=WIDTH * BLOCK, num_blocks=BLOCKS, block_size=BLOCK, num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _compiler() -> None:
    skip_without_compiler()


class Watched(EmuDevice):
    """Notes what every launch and product got: addresses, shapes and numbers; and how often it captured and replayed."""

    def __init__(self) -> None:
        super().__init__("check")
        self.seen: list[tuple[Any, ...]] = []
        self.captures = self.allocations = 0

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        self.allocations += 1
        return super().empty(shape, dtype)

    def _run(self, launch: Launch) -> None:
        arguments = [(a.ctypes.data, a.shape) if isinstance(a, np.ndarray) else a for a in launch.arguments]
        self.seen.append((launch.variant, launch.grid, launch.shared_bytes, *arguments))
        super()._run(launch)

    def capture(self, work: Callable[[], None]) -> EmuGraph:
        self.captures += 1
        return super().capture(work)


class Steps:
    """One layer's rope, cache write and attention over a pool, step by step, recorded by a backend."""

    def __init__(self, dtype: Any, graphs: bool) -> None:
        self.device, self.dtype = Watched(), dtype
        self.backend = KernelBackend(self.device, dtype, graphs=graphs)
        self.batch = self.backend.new_batch(LIMITS)
        self.qkv, self.out = (self.backend.empty((LIMITS.rows, width), dtype) for width in (QKV, HEADS * HEAD_DIM))
        self.pool = tuple(cache[0] for cache in self.backend.new_kv_cache(1, BLOCKS, KV_HEADS, BLOCK, HEAD_DIM))
        angle = np.arange(WIDTH * BLOCK)[:, None] / 100 ** (np.arange(HEAD_DIM // 2) / 32)
        self.cos, self.sin = (emu.array(f(angle).astype(np.float32)) for f in (np.cos, np.sin))
        self.run = self.backend.record(self.build, LIMITS.rows)
        self.contexts, self.tables = [0] * LANES, np.random.default_rng(2).permutation(BLOCKS)[: 2 * LANES].reshape(LANES, 2)

    def build(self, rows: int) -> None:
        backend, qkv = self.backend, self.qkv[:rows]
        backend.rope_and_cache(qkv, self.cos, self.sin, self.batch, HEADS, *self.pool)
        backend.attention(qkv, *self.pool, self.batch, HEADS, 0.125, 0, self.out[:rows])

    def step(self, sequences: list[int], lengths: list[int], seed: int) -> np.ndarray:
        """Append tokens to sequences; the attention of the new ones."""
        rows = sum(lengths)
        self.qkv[:rows] = np.random.default_rng(seed).standard_normal((rows, QKV)).astype(self.dtype)
        self.qkv[rows:] = 0  # what lies behind is some earlier step's
        self.backend.set_batch(self.batch, np.zeros(rows, np.int32), self.rows_of(sequences, lengths))
        self.run(rows)
        return np.array(self.out[:rows])

    def rows_of(self, sequences: list[int], lengths: list[int]) -> AttentionBatch:
        positions, slots, contexts = [], [], []
        for s, length in zip(sequences, lengths, strict=True):
            new = range(self.contexts[s], self.contexts[s] + length)
            positions += new
            slots += [int(self.tables[s, p // BLOCK]) * BLOCK + p % BLOCK for p in new]
            self.contexts[s] += length
            contexts.append(self.contexts[s])
        return AttentionBatch(
            np.array(positions, np.int32), np.array(slots, np.int64), self.tables[sequences].astype(np.int32),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), np.array(contexts, np.int32), sum(n == 1 for n in lengths), max(contexts),
        )  # fmt: skip


SCRIPT = [([0, 1, 2], [1, 1, 14]), ([0, 1, 2], [1, 1, 1]), ([2, 0], [1, 1]), ([1, 2, 0], [1, 1, 1]), ([3, 4, 0], [1, 1, 9]), ([0, 1, 2, 3, 4], [1] * 5), ([2, 1, 0], [1] * 3)]
"""Sequences of a step, and how many tokens each gets; decode rows first."""


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_replayed_steps_give_the_bits_of_those_that_run_at_once(dtype: Any) -> None:
    eager, replayed = Steps(dtype, graphs=False), Steps(dtype, graphs=True)
    for seed, (sequences, lengths) in enumerate(SCRIPT):
        expected, got = (steps.step(sequences, lengths, seed) for steps in (eager, replayed))
        assert np.isfinite(got.astype(np.float32)).all()
        if dtype == np.float16:  # a plan of more lanes is cut elsewhere, so sums are taken in another order
            np.testing.assert_allclose(got.astype(np.float32), expected.astype(np.float32), atol=2e-3)
        else:
            assert got.tobytes() == expected.tobytes()
    assert replayed.device.captures == 3  # of 2, 4 and 8 lanes
    assert eager.device.captures == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_replay_sees_the_addresses_and_numbers_of_the_capture(dtype: Any) -> None:
    steps = Steps(dtype, graphs=True)
    steps.step(*SCRIPT[0], 0)
    calls = []
    for seed, (sequences, lengths) in enumerate([([0, 1, 2], [1, 1, 1]), ([1, 2, 0], [1, 1, 1]), ([0, 1, 2, 3], [1] * 4), ([2, 1, 0], [1] * 3)]):
        steps.device.seen.clear()
        before = steps.device.allocations
        steps.step(sequences, lengths, seed)
        calls.append(list(steps.device.seen))
        if seed:
            assert steps.device.allocations == before
    assert all(call == calls[0] for call in calls)
    assert steps.device.captures == 1


def test_padded_lanes_write_nothing() -> None:
    steps = Steps(np.float32, graphs=True)
    for seed in range(3):  # at once, then replayed
        steps.step([0, 1, 2, 3, 4], [1] * 5, seed)
    written = np.zeros((BLOCKS, BLOCK), bool)
    for s in range(5):
        written[steps.tables[s, 0], :3] = True
    for cache in steps.pool:
        assert (np.isnan(cache).all(axis=(1, 3)) == ~written).all()
    assert not steps.out[5:8].any()  # padded lanes attend to nothing
    assert np.isnan(steps.out[8:]).all()


def test_a_captured_region_neither_allocates_nor_copies() -> None:
    device = EmuDevice()
    there, mailbox = device.empty((4,), np.float32), device.mailbox({"x": (4, np.float32)})
    for forbidden in (
        lambda: device.empty((4,), np.float32), lambda: device.empty_host((4,), np.float32), lambda: device.upload(there), lambda: device.fill(there, there),
        lambda: device.download(there), lambda: device.download_later(there), lambda: device.mailbox({}), lambda: mailbox.post({"x": there}),
        lambda: device.capture(lambda: None),
    ):  # fmt: skip
        with pytest.raises(BackendError, match="a captured region"):
            device.capture(forbidden)
    device.empty((4,), np.float32)  # and the device works on


def test_a_graph_runs_nothing_before_its_replay() -> None:
    device, x = EmuDevice(), emu.array(np.eye(4, dtype=np.float32))
    out = device.empty((4, 4), np.float32)
    graph = device.capture(lambda: device.gemm(x, x, out))
    assert np.isnan(out).all()
    graph.replay()
    assert np.array_equal(out, x)
    x *= 2
    graph.replay()
    assert np.array_equal(out, x @ x)


def test_lanes_are_few_and_enough() -> None:
    assert [lanes_for(n, 256) for n in (1, 2, 3, 4, 5, 8, 9, 17, 250, 256)] == [1, 2, 4, 4, 8, 8, 16, 24, 256, 256]
    assert [lanes_for(n, 11) for n in (3, 8, 9, 11)] == [4, 8, 11, 11]
    assert len({lanes_for(n, 256) for n in range(1, 257)}) == 35


@pytest.mark.parametrize("family", ["llama3", "qwen3_window"])
def test_the_engine_chooses_the_same_tokens_with_graphs_and_without(family: str) -> None:
    prompts = [np.random.default_rng(s).integers(3, 100, n).tolist() for s, n in enumerate((3, 9, 20))]
    params = [SamplingParams(temperature=t, seed=5, max_tokens=9, ignore_eos=True) for t in (0.0, 1.0, 0.0)]
    options: dict[str, Any] = {"device": "emu", "num_blocks": 60, "block_size": 4, "max_model_len": 64, "max_num_seqs": 3}
    eager, replayed = (
        [o.outputs[0].token_ids for o in LLM(str(ROOT / family), **options, enforce_eager=choice).generate(prompts, params)] for choice in (True, False)
    )
    assert eager == replayed


def test_enforce_eager_is_a_switch() -> None:
    assert not EngineConfig().enforce_eager
    with pytest.raises(Exception, match="enforce_eager must be true or false"):
        EngineConfig(enforce_eager="yes")  # type: ignore[arg-type]  # the test
