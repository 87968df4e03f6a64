"""Swaps beside the steps: who waits for whom, and that the bytes are right however late or early either of the two gets on."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged import LLM, SamplingParams
from cupaged.backends import cupy_device, emu
from cupaged.backends.base import AttentionBatch, Backend, BatchLimits
from cupaged.backends.cupy_device import CupyDevice
from cupaged.backends.emu_device import EmuDevice
from cupaged.backends.kernel_swaps import runs_of
from cupaged.backends.kernels import KernelBackend
from cupaged.backends.reference import ReferenceBackend
from cupaged.config import ModelConfig
from cupaged.errors import BackendError, KernelError
from cupaged.model.kv_store import KVStore
from cupaged.step_plan import ScheduledSequence, StepPlan, StepRecord
from tests.family_models import ROOT
from tests.support import fake_cupy
from tests.support.kernels import skip_without_compiler

LAYERS, BLOCKS, SPACE, SIZE, HEAD_DIM = 2, 8, 6, 4, 8
LIMITS = BatchLimits(rows=4, sequences=2, table_width=4, vocab_size=9, positions=16, num_blocks=BLOCKS, block_size=SIZE, head_dim=HEAD_DIM)


@pytest.fixture(autouse=True)
def _compiler() -> None:
    skip_without_compiler()


class Pools:
    """A pool, a swap space and steps of one row, which writes its last block and attends to all blocks of its table."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.pool, self.space = backend.new_kv_cache(LAYERS, BLOCKS, 1, SIZE, HEAD_DIM), backend.new_swap_space(LAYERS, SPACE, 1, SIZE, HEAD_DIM)
        self.batch, random = backend.new_batch(LIMITS), np.random.default_rng(3)
        for cache in self.pool:
            content = random.standard_normal(cache.shape).astype(np.float32)
            if isinstance(backend, KernelBackend):
                backend._device.fill(cache, content)
            else:
                cache[...] = content
        self.cos, self.sin = (backend.upload(np.full((16, HEAD_DIM // 2), of_zero, np.float32)) for of_zero in (1, 0))
        self.swap_out([(i, i) for i in range(SPACE)])
        self.seen: list[Any] = []

    def step(self, table: list[int], number: int) -> None:
        backend, position = self.backend, len(table) * SIZE - 1
        rows = AttentionBatch(
            np.array([position], np.int32), np.array([table[-1] * SIZE + SIZE - 1], np.int64), np.array([table], np.int32), np.array([0, 1], np.int32),
            np.array([position + 1], np.int32), 1, position + 1,
        )  # fmt: skip
        backend.set_batch(self.batch, np.zeros(1, np.int32), rows)
        for layer in range(LAYERS):
            qkv = backend.upload(np.random.default_rng(number).standard_normal((1, 3 * HEAD_DIM)).astype(np.float32))
            out = backend.empty((1, HEAD_DIM), np.float32)
            caches = [cache[layer] for cache in self.pool]
            backend.rope_and_cache(qkv, self.cos, self.sin, self.batch, 1, *caches)
            backend.attention(qkv, *caches, self.batch, 1, 1.0, 0, out)
            self.seen.append(backend.download_later(out))

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        self.backend.swap_blocks(self.pool, self.space, np.array(pairs, np.int32).reshape(-1, 2))

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        self.backend.swap_blocks(self.space, self.pool, np.array(pairs, np.int32).reshape(-1, 2))

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        self.backend.copy_blocks(*self.pool, np.array(pairs, np.int32).reshape(-1, 2))

    def live(self, seed: int, length: int = 40) -> list[np.ndarray]:
        """What the steps of a random life saw, and what is left."""
        random = np.random.default_rng(seed)
        for number in range(length):
            blocks, space = random.permutation(BLOCKS).tolist(), random.permutation(SPACE).tolist()
            count, what = int(random.integers(1, 4)), random.random()
            if what < 0.5:
                self.step(blocks[:count], number)
            elif what < 0.7:
                self.swap_out(list(zip(blocks[:count], space, strict=False)))
            elif what < 0.9:
                self.swap_in(list(zip(space[:count], blocks, strict=False)))
            else:
                self.copy([(blocks[0], blocks[1])])
        return [download.wait() for download in self.seen] + [self.backend.download(cache) for cache in (*self.pool, *self.space)]


# ---- the order


class Recording(EmuDevice):
    """Notes marks, swaps and who waits."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.names: dict[int, str] = {}
        self.kept: list[Any] = []
        self.work = 0

    def _named(self, mark: Any, name: str) -> Any:
        self.kept.append(mark)
        self.names[id(mark)] = name
        return mark

    def mark(self) -> Any:
        return self._named(NotYet(), f"work {self.work}")

    def swap(self, source: Any, target: Any, pairs: Any, after: Any) -> Any:
        super().swap(source, target, pairs, after)
        name = f"swap {' '.join(f'{a}-{b}' for a, b in pairs.tolist())}"
        self.log.append(f"{name} after {self.names[id(after)]}")
        return self._named(NotYet(), name)

    def wait_for(self, mark: Any) -> None:
        self.log.append(f"wait for {self.names[id(mark)]}")

    def launch(self, launch: Any) -> None:
        if launch.variant.kernel in ("rope_and_cache", "copy_blocks"):
            self.work += 1
            self.log.append("step" if launch.variant.kernel[0] == "r" else "copy")
        super().launch(launch)


class NotYet:
    done = False


def test_each_way_waits_where_both_touch_a_block_and_nowhere_else() -> None:
    device = Recording()
    pools = Pools(KernelBackend(device))
    pools.step([7, 6], 0)
    pools.backend.download(pools.pool[0])  # after that nothing is under way
    device.log.clear()
    pools.swap_out([(5, 0)])  # the step does not touch it
    pools.swap_out([(6, 1), (4, 2)])  # it writes block 6
    pools.step([6, 4, 3], 1)  # reads what is on its way out
    pools.step([7, 5], 2)  # writes the first that went out
    pools.step([4, 6], 3)
    pools.swap_in([(0, 2)])  # the step before is not disturbed
    pools.step([7, 5], 4)
    pools.step([2, 7], 5)  # reads what has come in
    pools.step([7, 2], 6)
    pools.swap_in([(0, 1)])
    pools.copy([(7, 0)])
    pools.copy([(1, 3)])
    pools.swap_out([(3, 4)])  # a copy is work, too
    step = ["step"] * LAYERS
    assert device.log == [
        "swap 5-0 after work 0", "swap 6-1 4-2 after work 2", *step, "wait for swap 5-0", *step, "wait for swap 6-1 4-2", *step,
        "swap 0-2 after work 6", *step, "wait for swap 0-2", *step, *step,
        "swap 0-1 after work 12", "copy", "wait for swap 0-1", "copy", "swap 3-4 after work 16",
    ]  # fmt: skip


def test_a_backend_without_swap_space_marks_nothing() -> None:
    device = Recording()
    backend = KernelBackend(device)
    space = backend.new_swap_space(LAYERS, 0, 1, SIZE, HEAD_DIM)
    pool, batch = backend.new_kv_cache(LAYERS, BLOCKS, 1, SIZE, HEAD_DIM), backend.new_batch(LIMITS)
    backend.swap_blocks(pool, space, np.empty((0, 2), np.int32))
    rows = AttentionBatch(*(np.array(x, t) for x, t in (([0], np.int32), ([0], np.int64), ([[0]], np.int32), ([0, 1], np.int32), ([1], np.int32))), 1, 1)
    backend.set_batch(batch, np.zeros(1, np.int32), rows)
    assert not device.kept


def test_what_the_step_overwrites_goes_out_first() -> None:
    device = Recording()
    config = ModelConfig("llama", 9, 8, 8, LAYERS, 1, 1, HEAD_DIM, 16)
    store = KVStore(KernelBackend(device), config, BLOCKS, SIZE, SPACE)
    for cache in (store.key, store.value):
        cache[...] = 1
    computed = ScheduledSequence(0, 6, np.zeros(3, np.int32), np.array([1, 5, 2, 3], np.int32))  # positions 6 to 8
    pairs = np.array([[1, 0], [2, 1], [3, 2], [4, 3], [5, 4]], np.int32)
    store.move_blocks(StepPlan(0, SIZE, (computed,), swap_out=pairs, copies=np.array([[0, 4]], np.int32)))
    assert device.log == ["swap 2-1 4-3 5-4 after work 0", "swap 1-0 3-2 after work 0", "wait for swap 2-1 4-3 5-4", "copy"]


def test_neighbours_travel_together() -> None:
    assert runs_of(np.array([[5, 9], [3, 0], [4, 8], [1, 2], [0, 1]], np.int32)) == [(0, 1, 2), (3, 0, 1), (4, 8, 2)]
    assert runs_of(np.array([[2, 5], [1, 6]], np.int32)) == [(1, 6, 1), (2, 5, 1)]
    assert runs_of(np.empty((0, 2), np.int32)) == []


def test_emulated_bytes_that_nobody_wrote_stay_so() -> None:
    backend = KernelBackend(EmuDevice("check"), np.float16, ml_dtypes.float8_e4m3fn)
    (keys, values), space = backend.new_kv_cache(1, 3, 1, 2, 4), backend.new_swap_space(1, 3, 1, 2, 4)
    backend._device.fill(keys[0, 1, 0, 0], np.ones(4, ml_dtypes.float8_e4m3fn))
    backend.swap_blocks((keys, values), space, np.array([[1, 2]], np.int32))
    backend.swap_blocks(space, (keys, values), np.array([[2, 0]], np.int32))
    unwritten = emu.never_written(keys)[0, :, 0, :, 0]
    assert unwritten.tolist() == [[False, True], [False, True], [True, True]]


# ---- the bytes

WAYS = {"both late": (False, False), "swaps early": (False, True), "steps early": (True, False)}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy.install(monkeypatch)


def device_of(way: str) -> CupyDevice:
    device = CupyDevice()
    device._stream.hasty, device._swapping.hasty = WAYS[way]
    return device


def right(seed: int, way: str) -> bool:
    expected = Pools(ReferenceBackend()).live(seed)
    try:
        got = Pools(KernelBackend(device_of(way))).live(seed)
    except KernelError:  # a step came upon what nobody had written yet
        return False
    return all(np.allclose(a, b, atol=1e-5) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("way", WAYS)
def test_a_random_life_has_the_bytes_of_one_thing_after_the_other(gpu: None, way: str, seed: int) -> None:
    assert right(seed, way)


def test_steps_that_do_not_wait_for_swaps_have_wrong_bytes(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CupyDevice, "wait_for", lambda self, mark: None)
    assert not right(0, "both late")
    assert not right(0, "steps early")


def test_swaps_that_do_not_wait_for_steps_have_wrong_bytes(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = fake_cupy.Stream.wait_event

    def careless(self: fake_cupy.Stream, event: fake_cupy.Event) -> None:
        if not self.non_blocking:
            honest(self, event)

    monkeypatch.setattr(fake_cupy.Stream, "wait_event", careless)
    assert not right(0, "swaps early")


def test_a_swap_that_is_interrupted_half_way_is_waited_for(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CupyDevice()
    pools, honest, calls = Pools(KernelBackend(device)), fake_cupy.memcpy2DAsync, 0
    pools.step([6, 7], 0)

    def interrupted(*arguments: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:  # keys are on their way, values are not
            raise KeyboardInterrupt
        honest(*arguments)

    monkeypatch.setattr(fake_cupy.runtime, "memcpy2DAsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pools.swap_in([(0, 1)])
    pools.step([2, 1], 1)
    assert device._swapping.queue
    assert np.isfinite(pools.seen[-1].wait()).all()
    assert not device._swapping.queue


def test_a_pool_whose_layers_are_too_far_apart_is_copied_layer_by_layer(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_device, "LARGEST_PITCH", 100)
    monkeypatch.setattr(fake_cupy.runtime, "memcpy2DAsync", None)
    assert right(0, "both late")


def test_there_are_two_streams_and_the_host_waits_for_neither(gpu: None) -> None:
    device = CupyDevice()
    assert (device._stream.non_blocking, device._swapping.non_blocking) == (False, True)
    pools = Pools(KernelBackend(device))
    for number in range(3):
        pools.step([6, 7], number)
        pools.swap_out([(7, 0)])
        pools.swap_in([(1, 7)])
    assert len(device._swapping.queue) > 6
    assert len(device._stream.queue) > 6
    for work in (device.mark, lambda: device.wait_for(device.mark()), lambda: device.swap(pools.pool, pools.space, np.zeros((1, 2), np.int32), None)):
        with pytest.raises(BackendError, match="captured region"):
            device.capture(work)


# ---- the engine

MODEL = str(ROOT / "llama_tied")
TIGHT: dict[str, Any] = {"num_blocks": 16, "block_size": 4, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32, "preemption": "swap"}


def answers(engine_way: str | None, device: str) -> tuple[list[list[int]], int]:
    llm = LLM(MODEL, device=device, dtype="float32", **TIGHT)
    if engine_way is not None:
        gpu = llm.engine._runner._backend._device
        gpu._stream.hasty, gpu._swapping.hasty = WAYS[engine_way]
    records: list[StepRecord] = []
    llm.engine.observers.append(records.append)
    prompts = [np.random.default_rng(s).integers(3, 100, n).tolist() for s, n in enumerate((9, 11, 12, 3))]
    params = [SamplingParams(temperature=t, seed=5, max_tokens=20, ignore_eos=True) for t in (0.0, 1.0, 0.0, 0.7)]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)], records[-1].bytes_swapped


@pytest.mark.parametrize("way", WAYS)
def test_the_engine_chooses_the_reference_tokens_while_it_swaps(gpu: None, way: str) -> None:
    expected, swapped = answers(None, "reference")
    assert swapped > 0
    assert answers(way, "cuda") == (expected, swapped)


def test_emulated_too() -> None:
    assert answers(None, "emu") == answers(None, "reference")
