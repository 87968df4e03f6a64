"""`--device cuda` end to end on the small CuPy of our own: the engine's whole way over a GPU's calls, kernels emulated."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupaged import LLM, BeamSearchParams, EngineConfig, SamplingParams
from cupaged.backends import cupy_device, find_device, kernels
from cupaged.backends.cupy_device import CupyDevice
from cupaged.backends.kernels import KernelBackend
from cupaged.checkpoint import open_checkpoint
from cupaged.errors import BackendError, ConfigError
from cupaged.model.weights import load_weights
from tests.family_models import ROOT
from tests.support import fake_cupy
from tests.support.kernels import skip_without_compiler

MODEL = str(ROOT / "llama_tied")
ROOMY: dict[str, Any] = {"num_blocks": 60, "block_size": 4, "max_model_len": 64, "max_num_seqs": 3, "max_num_batched_tokens": 32}
PROMPTS = [np.random.default_rng(s).integers(3, 100, n).tolist() for s, n in enumerate((3, 9, 20))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1.0, seed=5, max_tokens=7, ignore_eos=True, repetition_penalty=1.2),
    SamplingParams(temperature=0.8, seed=6, max_tokens=7, ignore_eos=True, top_k=9, top_p=0.9, n=2),
]


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_compiler()
    fake_cupy.install(monkeypatch)


def tokens(llm: LLM) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"num_blocks": 16, "preemption": "swap"}, {"device": "cuda:0", "max_num_batched_tokens": 7}], ids=str)
def test_the_same_tokens_as_the_reference(options: dict[str, Any]) -> None:
    expected = tokens(LLM(MODEL, device="reference", **ROOMY))
    assert tokens(LLM(MODEL, **{"device": "cuda", "dtype": "float32", **ROOMY, **options})) == expected


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=str)
def test_a_step_is_asked_for_while_the_one_before_is_computed(options: dict[str, Any]) -> None:
    """The host waits for nothing between two steps: what the GPU has to do is all still there when it turns to the next."""
    engine = LLM(MODEL, device="cuda", dtype="float32", **ROOMY, **options).engine
    assert engine.config.overlap
    device, submit = engine._runner._backend._device, engine._runner.submit
    waits: list[int] = []

    def watch(plan: Any) -> Any:
        done: list[int] = []
        for work in range(len(device._stream.queue)):
            device._stream.queue[work] = lambda now=device._stream.queue[work]: (done.append(1), now())
        late = submit(plan)
        if any(item.token_source >= 0 for item in plan.sequences):
            waits.append(len(done))
        return late

    engine._runner.submit = watch  # type: ignore[method-assign]
    for params in PARAMS[:2]:
        engine.add_request(PROMPTS[1], replace(params, prompt_logprobs=None))
    while engine.has_unfinished():
        engine.step()
    assert len(waits) >= 5
    assert not any(waits[2:])  # the first ones make what is kept


@pytest.mark.parametrize("overlap", [True, False])
def test_a_fault_while_steps_overlap_leaves_an_engine_that_works(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    llm = LLM(MODEL, device="cuda", dtype="float32", overlap=overlap, **ROOMY)
    expected = tokens(llm)
    kept, calls = CupyDevice.launch, 0

    def launch(self: CupyDevice, work: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 100:
            raise BackendError("CUDA: for once")
        kept(self, work)

    monkeypatch.setattr(CupyDevice, "launch", launch)
    with pytest.raises(BackendError, match="for once"):
        tokens(llm)
    llm.engine._scheduler.check_invariants()
    assert tokens(llm) == expected


def test_beams_and_a_16_bit_checkpoint() -> None:
    """The checkpoint is bfloat16, and so is what auto computes with."""

    llm = LLM(MODEL, device="cuda", **ROOMY)
    assert llm.engine.config.dtype == "bfloat16"
    beams = llm.beam_search([PROMPTS[1]], BeamSearchParams(beam_width=3, max_tokens=4))[0]
    assert len(beams.sequences) == 3


def test_damaged_logits_are_an_error_when_they_are_read() -> None:
    llm = LLM(MODEL, device="cuda", dtype="float32", **ROOMY)
    runner = llm.engine._runner
    norm = runner._model.weights.final_norm
    runner._backend._device.fill(norm, np.full(norm.shape, np.nan, np.float32))
    with pytest.raises(Exception, match="the logits hold NaN or infinity"):
        tokens(llm)


# ---- weights


@pytest.mark.parametrize("model", ["llama_tied", "llama_bias", "llama3.gguf"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_stream_through_pinned_memory_and_say_how_far_they_are(monkeypatch: pytest.MonkeyPatch, model: str, dtype: str) -> None:
    """Every byte of a weight goes from a file through one of a few pinned buffers, in pieces, and reads of the file go on meanwhile."""
    monkeypatch.setattr(cupy_device, "STAGE_BYTES", 5000)
    monkeypatch.setattr(cupy_device, "SMALL_BYTES", 100)
    monkeypatch.setattr(kernels, "CHUNK_BYTES", 4 << 10)
    device, checkpoint, seen = CupyDevice(), open_checkpoint(ROOT / model), list[tuple[int, int]]()
    pinned = {buffer.ctypes.data for stage in (device._stage, device._small) for buffer in stage._pinned}
    sent: list[int] = []
    honest = fake_cupy.memcpyAsync

    def copy(dst: int, src: int, size: int, kind: int, stream: int) -> None:
        assert src in pinned
        assert size <= 5000
        sent.append(size)
        honest(dst, src, size, kind, stream)

    monkeypatch.setattr(fake_cupy.runtime, "memcpyAsync", copy)
    backend = KernelBackend(device, np.dtype(dtype))
    weights = load_weights(checkpoint, backend, lambda *now: seen.append(now))
    assert seen == sorted(seen)
    assert len(seen) > 10
    assert seen[-1][0] == seen[-1][1] > 0
    assert device._stream.queue  # the last pieces are still on their way
    tensors = checkpoint.tensors
    expected = np.concatenate([tensors[f"model.layers.0.self_attn.{name}_proj.weight"].read() for name in "qkv"]).astype(dtype)
    assert np.array_equal(backend.download(weights.layers[0].qkv.weight), expected)
    assert np.array_equal(backend.download(weights.embedding.weight), tensors["model.embed_tokens.weight"].read().astype(dtype))
    assert np.array_equal(backend.download(weights.final_norm), tensors["model.norm.weight"].read())
    total = sum(array.nbytes for layer in weights.layers for array in (layer.qkv.weight, layer.output.weight, layer.gate_up.weight, layer.down.weight))
    assert total + weights.embedding.weight.nbytes <= sum(sent)


@pytest.mark.parametrize(("storage", "dtype", "as_stored"), [("BF16", "bfloat16", True), ("F16", "float16", True), ("F32", "float32", True), ("BF16", "float16", False), ("Q8_0", "bfloat16", False)])
def test_a_matrix_in_the_type_of_the_weights_is_not_converted(storage: str, dtype: str, as_stored: bool) -> None:
    numbers = np.random.default_rng(0).standard_normal((300, 40), np.float32).astype({"BF16": "bfloat16", "F16": "float16"}.get(storage, "float32"))
    calls: list[str] = []

    class Source:
        name, shape = "matrix", numbers.shape

        def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
            calls.append("read")
            return numbers[start:stop].astype(np.float32)

        def read_blocks(self, start: int = 0, stop: int | None = None) -> np.ndarray:
            calls.append("read_blocks")
            return np.ascontiguousarray(numbers[start:stop]).view(np.uint8)

    source: Any = Source()
    source.storage = storage
    backend = KernelBackend(CupyDevice(), np.dtype(dtype))
    matrix = backend.load_matrix([source, source])
    assert set(calls) == {"read_blocks" if as_stored else "read"}
    assert np.array_equal(backend.download(matrix.weight), np.concatenate([numbers, numbers]).astype(dtype))


# ---- the pool's size


def test_the_pool_takes_its_share_of_what_a_step_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_cupy.Device, "total", 400 << 20)
    monkeypatch.setattr(fake_cupy.Device, "free", (390 << 20) - (1 << 20))
    options = {name: value for name, value in ROOMY.items() if name != "num_blocks"}
    engine = LLM(MODEL, device="cuda", dtype="float32", gpu_memory_utilization=0.5, **options).engine
    profiled = 8 * 4 * engine.model_config.kv_bytes_per_token("float32")  # its own pool: 32 rows are 8 blocks of 4
    expected = (200 << 20) - (10 << 20) + profiled
    assert engine.config.num_blocks == expected // (4 * engine.model_config.kv_bytes_per_token("float32"))


def test_the_profiles_memory_is_free_again_at_once() -> None:
    """Not when Python looks for cycles: the pool is made right after it."""
    engine = LLM(MODEL, device="cuda", dtype="float32", **ROOMY).engine
    runner = weakref.ref(engine._runner)
    gc.disable()
    try:
        engine._runner = engine._steps = None  # type: ignore[assignment]  # nobody else has it
        assert runner() is None
    finally:
        gc.enable()


def test_a_gpu_that_is_full_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_cupy.Device, "free", 1 << 30)
    with pytest.raises(ConfigError, match=r"leave nothing of 50% of the GPU's 80.0 GiB .* raise gpu_memory_utilization, or lower max_num_batched_tokens or max_num_seqs"):
        LLM(MODEL, device="cuda", gpu_memory_utilization=0.5)


# ---- which device


def test_auto_takes_a_gpu_whose_kernel_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert find_device() == "cuda"
    said: list[str] = []
    monkeypatch.setattr(fake_cupy.Device, "count", 0)
    assert find_device(said.append) == "cpu"
    assert said == ["computing on the CPU: this machine has no NVIDIA GPU: use device cpu"]
    monkeypatch.setattr(fake_cupy.Device, "count", 1)
    monkeypatch.setattr(CupyDevice, "launch", lambda self, launch: None)  # counted, and computes nothing
    assert find_device(said.append) == "cpu"
    assert said[1:] == ["computing on the CPU: the GPU computes wrong numbers"]


def test_auto_without_cupy_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert find_device(pytest.fail) == "cpu"


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:1", "cuda:1:2", "cuda:9999", "", 3])
def test_a_device_that_does_not_exist_is_refused(device: Any) -> None:
    with pytest.raises(ConfigError, match="device must be one of auto, cpu, reference, emu, cuda or cuda:1 for the second GPU, not"):
        EngineConfig(device=device)


def test_a_gpu_computes_larger_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for count, expected in ((1, ("cuda", 2048, 256)), (0, ("cpu", 512, 64))):
        monkeypatch.setattr(fake_cupy.Device, "count", count)
        engine = LLM(MODEL, num_blocks=60, block_size=4, max_model_len=64).engine
        assert (engine.config.device, engine.config.max_num_batched_tokens, engine.config.max_num_seqs) == expected
        assert (engine._scheduler._max_num_batched_tokens, engine._scheduler._max_num_seqs, len(engine._runner._all.hidden)) == (*expected[1:], expected[1])


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, (512, 64)), ({"device": "cpu"}, (512, 64)), ({"device": "emu"}, (512, 64)), ({"device": "cuda"}, (2048, 256)), ({"device": "cuda:1"}, (2048, 256)),
        ({"device": "cuda", "max_num_seqs": 5}, (2048, 5)), ({"device": "cuda", "max_num_seqs": 5000}, (5000, 5000)),
        ({"max_num_batched_tokens": 9}, (9, 9)), ({"device": "cuda", "max_num_batched_tokens": 300}, (300, 256)),
        ({"device": "cuda", "max_num_batched_tokens": 7, "max_num_seqs": 7}, (7, 7)),
    ],
    ids=str,
)  # fmt: skip
def test_the_size_of_a_step_by_default(options: dict[str, Any], sizes: tuple[int, int]) -> None:
    config = EngineConfig(**options)
    assert (config.step_tokens, config.step_seqs) == sizes


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_num_seqs"])
def test_a_step_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be between 1 and 2147483647, not 0"):
        EngineConfig(**{name: 0})
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(3\) must be at least max_num_seqs \(4\)"):
        EngineConfig(max_num_batched_tokens=3, max_num_seqs=4)


def test_options_that_only_one_kind_of_device_has() -> None:
    for options, message in (
        ({"device": "cuda", "dtype": "int8"}, "device cuda has no dtype int8"),
        ({"device": "cpu", "kv_cache_dtype": "fp8"}, "device cpu has no kv_cache_dtype fp8"),
        ({"device": "cuda", "gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be above 0 and at most 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineConfig(**options)
    with pytest.raises(BackendError, match="there is no GPU 3"):
        LLM(MODEL, device="cuda:3")
