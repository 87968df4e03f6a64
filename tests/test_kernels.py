"""The CUDA C kernels on the emulator, in its checking mode, in every type: what the conformance tests do not reach.

Those run the whole backend in the fast mode. Here pools come from `empty`, so that a kernel that looks at a slot
nobody wrote is caught in the act, and every access, barrier and shuffle is looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import psutil
import pytest

import kernels_cu
from cupaged.backends import emu, kernel_specs, sampling
from cupaged.backends.base import AttentionBatch
from cupaged.backends.emu_device import EmuDevice
from cupaged.backends.few_rows import SKINNY_ROWS
from cupaged.backends.kernel_sampling import KernelSampler
from cupaged.backends.kernels import KernelBackend
from cupaged.backends.reference import ReferenceBackend
from cupaged.backends.split_plan import plan_decode
from cupaged.conformance.paged import Paged
from cupaged.conformance.steps import Stored, load_batch
from cupaged.conformance.subject import random
from cupaged.errors import InvariantError, KernelError
from tests.support.kernels import skip_without_compiler
from tests.support.sampling import batch_of, random_logits

TYPES = {"float32": (np.float32, 1e-5), "float16": (np.float16, 2e-3), "bfloat16": (ml_dtypes.bfloat16, 1.5e-2)}
"""NumPy's type, and how far a result may be off, as a share of the largest number."""

pytestmark = pytest.mark.usefixtures("_compiler")


@pytest.fixture(scope="module")
def _compiler() -> None:
    skip_without_compiler()


every_type = pytest.mark.parametrize("name", TYPES)


@functools.cache
def checked(name: str = "float32", schedule: emu.Schedule = "forward") -> KernelBackend:
    return KernelBackend(EmuDevice("check", schedule, seed=7), TYPES[name][0])


def close(actual: np.ndarray, expected: np.ndarray, name: str) -> None:
    wide = actual.astype(np.float32)
    assert wide.shape == expected.shape
    assert np.isfinite(wide).all()
    assert np.abs(wide - expected).max(initial=0) <= TYPES[name][1] * np.abs(expected).max(initial=1e-30)


def rounded(array: np.ndarray, name: str) -> np.ndarray:
    """The numbers that the type can hold, in float32."""
    return array.astype(TYPES[name][0]).astype(np.float32)


# ---- rows


@every_type
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 17), (5, 576)])
def test_norms_in_every_type(name: str, rows: int, width: int) -> None:
    dtype, reference, backend = TYPES[name][0], ReferenceBackend(), checked(name)
    x, weight = rounded(random(0, rows, width), name), random(2, width)
    out, expected = emu.empty((rows, width), dtype), np.empty((rows, width), np.float32)
    reference.rms_norm(x, weight, 1e-5, expected)
    backend.rms_norm(emu.array(x, dtype), weight, 1e-5, out)
    close(out, expected, name)


@every_type
def test_other_row_operations_in_every_type(name: str) -> None:
    dtype, reference, backend = TYPES[name][0], ReferenceBackend(), checked(name)
    x, rows = rounded(random(0, 7, 50), name), np.array([6, 0, 3, 3], np.int32)
    out = emu.empty((4, 50), dtype)
    backend.gather_rows(emu.array(x, dtype), rows, out)
    assert np.array_equal(out.astype(np.float32), x[rows])
    out = emu.empty((7, 25), dtype)
    EmuDevice("check").launch(kernel_specs.SILU_MUL.bind(gate_up=emu.array(x, dtype), out=out))
    expected = x[:, :25] / (1 + np.exp(-x[:, :25])) * x[:, 25:]
    close(out, expected, name)
    qkv, weights = emu.array(x[:, :48], dtype), (random(1, 8), random(2, 8))  # 2 query heads, 2 pairs of 8
    wanted = qkv.astype(np.float32)
    backend.head_rms_norm(qkv, *weights, 2, 2, 1e-6)
    reference.head_rms_norm(wanted, *weights, 2, 2, 1e-6)
    close(qkv, wanted, name)


@every_type
def test_a_token_table_of_any_type_gives_activations_of_any_type(name: str) -> None:
    table, ids = rounded(random(0, 9, 20), name), np.array([8, 0], np.int32)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        out = emu.empty((2, 20), dtype)
        launch = kernel_specs.GATHER_ROWS.bind(table=emu.array(table, TYPES[name][0]), rows=ids, out=out)
        EmuDevice("check").launch(launch)
        assert np.array_equal(out, table[ids].astype(dtype))


PRODUCTS = [("float32", "float32", "float32"), ("bfloat16", "bfloat16", "float32"), ("float16", "float32", "float32"), ("float16", "float16", "float16")]
"""Types of weights, activations and results."""

few_rows = pytest.mark.parametrize("rows", [1, 3, 4])
product_types = pytest.mark.parametrize(("weights", "activations", "results"), PRODUCTS)


@few_rows
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 1), (264, 19), (576, 8)])
@product_types
@pytest.mark.parametrize(("biased", "add"), [(True, False), (False, False), (True, True), (False, True)])
@pytest.mark.parametrize("normed", [0, 1])
def test_products_of_few_rows(rows: int, inputs: int, outputs: int, weights: str, activations: str, results: str, biased: bool, add: bool, normed: int) -> None:
    x, weight, bias = rounded(random(0, rows, inputs), activations), rounded(random(1, outputs, inputs), weights), 10 * random(2, outputs)
    norm, eps, residual = random(4, inputs), 0.5, rounded(random(3, rows, outputs), results)
    out = emu.empty((rows, outputs), TYPES[results][0])
    launch = kernel_specs.SKINNY_MATMUL.bind(
        x=emu.array(x, TYPES[activations][0]), norm=norm if normed else emu.empty((0,)), eps=eps, weight=emu.array(weight, TYPES[weights][0]),
        bias=bias if biased else emu.empty((0,)), out=out, add=add, normed=normed,
    )  # fmt: skip
    out[...] = residual if add else np.nan
    EmuDevice("check").launch(launch)
    read = normalised(x, norm, eps) if normed else x.astype(np.float64)
    expected = read @ weight.astype(np.float64).T + (bias if biased else 0) + (residual if add else 0)
    close(out, expected.astype(np.float32), results)


def normalised(x: np.ndarray, norm: np.ndarray, eps: float) -> np.ndarray:
    wide = x.astype(np.float64)
    return np.asarray(wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * norm)


@few_rows
@pytest.mark.parametrize(("inputs", "width"), [(8, 1), (264, 19), (576, 8)])
@product_types
@pytest.mark.parametrize("biased", [False, True])
def test_gates_of_few_rows(rows: int, inputs: int, width: int, weights: str, activations: str, results: str, biased: bool) -> None:
    x, weight, bias = rounded(random(0, rows, inputs), activations), rounded(random(1, 2 * width, inputs), weights), 10 * random(2, 2 * width)
    norm, eps = random(4, inputs), 0.5
    out = emu.empty((rows, width), TYPES[results][0])
    launch = kernel_specs.SKINNY_GATE_UP.bind(
        x=emu.array(x, TYPES[activations][0]), norm=norm, eps=eps, weight=emu.array(weight, TYPES[weights][0]), bias=bias if biased else emu.empty((0,)), out=out
    )
    EmuDevice("check").launch(launch)
    gate, up = np.split(normalised(x, norm, eps) @ weight.astype(np.float64).T + (bias if biased else 0), 2, axis=1)
    close(out, (gate / (1 + np.exp(-gate)) * up).astype(np.float32), results)


@pytest.mark.parametrize("scale", [2.0**-50, 2.0**-10, 2.0**13, 2.0**50])
def test_a_norm_in_a_product_is_as_exact_for_small_and_large_rows(scale: float) -> None:
    x, weight, norm, out = np.float32(scale) * random(0, 2, 264), random(1, 19, 264), random(2, 264), emu.empty((2, 19))
    EmuDevice("check").launch(
        kernel_specs.SKINNY_MATMUL.bind(x=emu.array(x), norm=norm, eps=0.0, weight=emu.array(weight), bias=emu.empty((0,)), out=out, add=False, normed=1)
    )
    close(out, (normalised(x, norm, 0.0) @ weight.astype(np.float64).T).astype(np.float32), "float32")


def test_few_rows_are_normalised_multiplied_and_gated_in_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    honest = EmuDevice.launch
    monkeypatch.setattr(EmuDevice, "launch", lambda self, launch: (launched.append(launch.variant.kernel), honest(self, launch))[1])
    backend = checked()
    norm, qkv, gate_up = random(0, 16), backend.load_matrix([Stored(random(1, 5, 16))]), backend.load_gate_up(Stored(random(2, 6, 16)), Stored(random(3, 6, 16)))
    for rows in (SKINNY_ROWS, SKINNY_ROWS + 1):
        x, normed, out, work, activated = emu.array(random(4, rows, 16)), *(emu.empty((rows, width)) for width in (16, 5, 12, 6))
        backend.norm_linear(x, norm, 1e-5, qkv, normed, out)
        backend.norm_linear_silu_mul(x, norm, 1e-5, gate_up, normed, work, activated)
    assert launched == ["skinny_matmul", "skinny_gate_up", "rms_norm", "rms_norm", "silu_mul"]


# ---- the paged cache


def poisoned_pool(paged: Paged, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Key and value cache in memory that nobody wrote, but for the slots of the contexts."""
    pools = []
    for content in paged.pool():
        pool, written = emu.empty(content.shape, TYPES[name][0]), ~np.isnan(content)
        pool[written] = content[written]
        pools.append(pool)
    return pools[0], pools[1]


def paged_of(name: str, contexts: list[int], chunks: list[int], block_size: int, kv_heads: int, group: int, head_dim: int, padded: int = 0) -> Paged:
    paged = Paged(contexts, chunks, block_size, kv_heads, group, head_dim, padded=padded)
    paged.qkv = rounded(paged.qkv, name)
    paged.keys, paged.values = ([rounded(a, name) for a in arrays] for arrays in (paged.keys, paged.values))
    return paged


def attention(backend: KernelBackend, paged: Paged, name: str, window: int = 0) -> np.ndarray:
    out = emu.empty((paged.rows, paged.heads * paged.head_dim), TYPES[name][0])
    key, value = poisoned_pool(paged, name)
    backend.attention(emu.array(paged.qkv, TYPES[name][0]), key, value, paged.load(backend, window), paged.heads, 0.3, window, out)
    return out


@every_type
@pytest.mark.parametrize(("head_dim", "group"), [(6, 2), (16, 3), (32, 16), (64, 3), (128, 1), (128, 8), (64, 17)])
def test_attention_in_every_type_reads_written_slots_only(name: str, head_dim: int, group: int) -> None:
    paged = paged_of(name, [15, 33, 16, 40, 70], [1, 1, 1, 7, 70], 16, 2, group, head_dim, padded=1)
    close(attention(checked(name), paged, name), paged.attention(0.3, 0), name)


@pytest.mark.parametrize("window", [0, 1, 8, 31, 33, 64, 65, 500])
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_partitions_of_the_context_join_at_every_edge(window: int, block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupaged.backends.kernel_attention.PART_SIZE", 32)
    paged = paged_of("float32", [1, 31, 32, 33, 63, 64, 65, 129], [1] * 8, block_size, 1, 3, 16, padded=2)
    close(attention(checked(), paged, "float32", window), paged.attention(0.3, window), "float32")


@pytest.mark.parametrize("window", [0, 1, 5, 17, 40])
def test_tiles_of_a_prompt_join_at_every_edge(window: int) -> None:
    paged = paged_of("float32", [9, 10, 11, 20, 32, 75], [9, 10, 11, 20, 31, 33], 8, 2, 3, 32)
    close(attention(checked(), paged, "float32", window), paged.attention(0.3, window), "float32")


def test_the_readable_kernel_and_the_tiled_ones_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = paged_of("float32", [40, 7, 100, 64], [1, 1, 33, 64], 16, 2, 4, 64)
    tiled = attention(checked(), paged, "float32", window=20)
    monkeypatch.setattr("cupaged.backends.kernel_attention.TILED_HEAD_DIMS", ())
    close(attention(checked(), paged, "float32", window=20), tiled, "float32")


def test_blocks_that_a_window_has_left_may_be_gone() -> None:
    paged = paged_of("float32", [100, 90], [1, 20], 8, 1, 2, 16)
    expected = paged.attention(0.3, 24)
    key, value = poisoned_pool(paged, "float32")
    paged.tables[0, : (99 - 23) // 8] = -1
    paged.tables[1, : (70 - 23) // 8] = -1
    out = emu.empty((paged.rows, 32))
    checked().attention(paged.qkv, key, value, paged.load(checked(), 24), 2, 0.3, 24, out)
    close(out, expected, "float32")


@every_type
def test_rope_and_cache_in_every_type(name: str) -> None:
    dtype, paged = TYPES[name][0], paged_of(name, [20, 3, 9], [1, 3, 9], 4, 2, 2, 16, padded=1)
    angles = np.arange(21)[:, None] / 1e4 ** (np.arange(8) / 8)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    qkv, key, value = emu.array(paged.qkv, dtype), emu.empty(paged.shape, dtype), emu.empty(paged.shape, dtype)
    expected, wanted = paged.qkv.copy(), [np.full(paged.shape, np.nan, np.float32) for _ in range(2)]
    reference = ReferenceBackend()
    checked(name).rope_and_cache(qkv, cos, sin, paged.load(checked(name)), 4, key, value)
    reference.rope_and_cache(expected, cos, sin, paged.load(reference), 4, *wanted)
    close(qkv, expected, name)
    for cache, want in ((key, wanted[0]), (value, wanted[1])):
        written = ~np.isnan(want)
        close(cache[written], want[written], name)
        assert np.isnan(cache[~written].astype(np.float32)).all()


@pytest.mark.parametrize("shape", [(2, 6, 2, 4, 8), (1, 6, 1, 1, 2)])
@every_type
def test_a_partly_written_block_is_copied_without_complaint(name: str, shape: tuple[int, ...]) -> None:
    dtype, backend = TYPES[name][0], checked(name)
    pool, space = (emu.empty(shape, dtype), emu.empty(shape, dtype)), backend.new_swap_space(shape[0], 3, *shape[2:])
    for array in pool:
        array[:, 5, :, 0] = 3
    backend.copy_blocks(*pool, np.array([[5, 0], [5, 2]], np.int32))
    backend.swap_blocks(pool, space, np.array([[2, 1]], np.int32))
    for array, swapped in zip(pool, space, strict=True):
        for copy in (array[:, 0], array[:, 2], swapped[:, 1]):
            assert np.array_equal(copy.view(np.uint8), array[:, 5].view(np.uint8))


def test_a_slot_beyond_two_to_the_31st_number_has_its_own_address() -> None:
    code = (
        kernels_cu.source("add_bias.cu").replace("ACT_T", "float")
        + 'extern "C" __global__ void addresses(int64_t* out, int block) { out[0] = kv_offset(block, 7, 15, 8, 16, 128); }'
    )
    out = emu.empty(1, np.int64)
    emu.Module(code, mode="check").get_function("addresses")((1,), (1,), (out, np.int32(2**31 - 1)))
    assert out[0] == (((2**31 - 1) * 8 + 7) * 16 + 15) * 128


# ---- keys and values in 8 bits

E4M3 = ml_dtypes.float8_e4m3fn


@every_type
@pytest.mark.parametrize(("head_dim", "group"), [(6, 2), (16, 3), (64, 3), (128, 16)])
def test_attention_over_keys_and_values_in_eight_bits(name: str, head_dim: int, group: int) -> None:
    """Written by rope_and_cache, read by every kernel that takes them; what the cache holds is the rounded number."""
    paged = paged_of(name, [15, 33, 40, 70], [1, 1, 7, 70], 16, 2, group, head_dim)
    paged.keys, paged.values = ([a.astype(E4M3).astype(np.float32) for a in arrays] for arrays in (paged.keys, paged.values))
    backend = KernelBackend(EmuDevice("check"), TYPES[name][0], E4M3)
    key, value = (cache[0] for cache in backend.new_kv_cache(1, *paged.shape))
    no_rotation = np.ones((71, head_dim // 2), np.float32), np.zeros((71, head_dim // 2), np.float32)
    for s, context in enumerate(paged.contexts):  # every token of the contexts, as one prompt each
        rows = np.concatenate([np.zeros((context, paged.heads, head_dim)), paged.keys[s], paged.values[s]], axis=1)
        positions = np.arange(context, dtype=np.int32)
        slots = np.array([paged.slot(s, p) for p in range(context)])
        step = AttentionBatch(positions, slots, paged.tables[s : s + 1], np.array([0, context], np.int32), np.array([context], np.int32), 0, context)
        batch = load_batch(backend, step, num_blocks=paged.num_blocks, block_size=16)
        backend.rope_and_cache(emu.array(rows.reshape(context, -1), TYPES[name][0]), *no_rotation, batch, paged.heads, key, value)
    out = emu.empty((paged.rows, paged.heads * head_dim), TYPES[name][0])
    backend.attention(emu.array(paged.qkv, TYPES[name][0]), key, value, paged.load(backend), paged.heads, 0.3, 0, out)
    close(out, paged.attention(0.3, 0), name)


def test_numbers_too_large_for_eight_bits_become_the_largest() -> None:
    key, value = emu.empty((1, 1, 1, 2), E4M3), emu.empty((1, 1, 1, 2), E4M3)
    qkv = emu.array(np.array([[0, 0, 1e6, -1e6, 0.3, 1e-9]], np.float32))
    one = np.ones((1, 1), np.float32)
    step = AttentionBatch(np.zeros(1, np.int32), np.zeros(1, np.int64), np.zeros((1, 1), np.int32), np.arange(2, dtype=np.int32), np.ones(1, np.int32), 1, 1)
    backend = KernelBackend(EmuDevice("check"))
    backend.rope_and_cache(qkv, one, 0 * one, load_batch(backend, step, block_size=1), 1, key, value)
    assert key.astype(np.float32).ravel().tolist() == [448.0, -448.0]
    assert value.astype(np.float32).ravel().tolist() == [0.3125, 0.0]


# ---- sampling

ROWS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_k": 5, "seeds": 1},
    {"top_p": 0.7, "seeds": 2, "positions": 9},
    {"min_p": 0.05, "temperature": 1.7, "seeds": 3, "indices": 2},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition": 1.3, "presence": 0.2, "frequency": 0.1, "seeds": 4},
    {"temperature": 0.0, "repetition": 1.5, "bias": [(3, 4.0), (3, 1.0), (40, -np.inf)]},
]


def test_sampling_under_the_checks() -> None:
    logits = np.stack([random_logits(s, 300, 3.0) for s in range(len(ROWS))])
    counts, sampler = sampling.TokenCounts(), KernelSampler(EmuDevice("check"))
    for state in (counts, sampler):
        for row in range(len(ROWS)):
            state.set_history(row, np.array([3, 5, row], np.int32), np.array([7, 7, row], np.int32))
    for _ in range(3):
        expected = sampling.sample(logits.copy(), batch_of(ROWS), counts)
        assert sampler.sample(emu.array(logits), batch_of(ROWS)).tolist() == expected.tolist()
    got = sampler.token_logprobs(emu.array(logits), np.arange(6, dtype=np.int32), 4)
    for array, want in zip(got, sampling.token_logprobs(logits, np.arange(6, dtype=np.int32), 4), strict=True):
        np.testing.assert_allclose(array, want, rtol=1e-6)
    for array, want in zip(sampler.beam_candidates(emu.array(logits), 4), got[2:], strict=True):
        assert np.array_equal(array, want)


def test_the_random_number_is_exact_to_its_last_bit() -> None:
    """Two tokens, the first of which weighs a little less, or a little more, than the random number asks for."""
    positions = np.arange(2000, dtype=np.int32)
    numbers = sampling.uniform(np.full(2000, 5, np.uint64), positions, np.zeros(2000, np.int32))
    position = int(np.argmin(np.abs(numbers - 0.5)))
    u = numbers[position]
    assert abs(u - 0.5) < 2e-3  # there float32 logits are fine enough
    shares = np.array([u - 2.0**-27, u + 2.0**-27])
    logits = np.stack([np.zeros(2), np.log((1 - shares) / shares)], axis=1).astype(np.float32)
    rows = [{"seeds": 5, "positions": position}] * 2
    assert KernelSampler(EmuDevice()).sample(logits, batch_of(rows)).tolist() == [1, 0]


def test_a_repetition_makes_positive_logits_smaller_and_negative_ones_too() -> None:
    sampler, row = KernelSampler(EmuDevice()), {"temperature": 0.0, "repetition": 2.0}
    logits = np.array([[0.5, 0.3], [-0.5, -0.9], [0.0, -0.1]], np.float32)  # halved; doubled; zero stays
    for row_id in range(3):
        sampler.set_history(row_id, np.array([0], np.int32), np.zeros(0, np.int32))
    assert sampler.sample(logits, batch_of([row] * 3)).tolist() == [1, 1, 0]


@pytest.mark.parametrize(("value", "message"), [(np.nan, "NaN or infinity"), (np.inf, "NaN or infinity"), (-np.inf, "every one is banned")])
def test_nothing_is_chosen_from_damaged_logits_and_nothing_is_counted(value: float, message: str) -> None:
    sampler, rows = KernelSampler(EmuDevice()), [{"temperature": 0.0, "repetition": 2.0}] * 2
    for row in range(2):
        sampler.set_history(row, np.array([1], np.int32), np.array([], np.int32))
    logits = np.zeros((2, 5), np.float32)
    logits[1] = value
    with pytest.raises(InvariantError, match=f"^row 1: .*{message}"):
        sampler.sample(logits.copy(), batch_of(rows))
    assert not sampler._counts.outputs.any()
    with pytest.raises(InvariantError, match=f"^row 1: .*{message}"):
        sampler.token_logprobs(logits, np.zeros(2, np.int32), 1)
    with pytest.raises(InvariantError, match=f"^row 1: .*{message}"):
        sampler.beam_candidates(logits, 1)


@pytest.mark.parametrize("nothing", [-1, -2])
def test_the_rank_of_a_token_that_could_not_be_chosen_says_so(nothing: int) -> None:
    """On a device that nobody sees into it is read before the choice is."""
    results = {"logprobs": emu.empty((2,)), "ranks": emu.empty((2,), np.int32), "top_ids": emu.empty((2, 1), np.int32), "top_logprobs": emu.empty((2, 1))}
    ids = emu.array(np.array([nothing, 1], np.int32))
    EmuDevice("check").launch(kernel_specs.TOKEN_LOGPROBS.bind(logits=emu.array(np.zeros((2, 4), np.float32)), token_ids=ids, **results))
    assert results["ranks"].tolist() == [nothing, 1]


def test_the_likeliest_of_a_large_vocabulary_may_lie_in_one_threads_share() -> None:
    """A share is every 256th token; 256 threads search it in more than one round."""
    logits = np.zeros((1, 150_000), np.float32)
    likely = 7 + 256 * np.array([585, 3, 300, 256, 257, 0, 584], np.int32)
    logits[0, likely] = np.arange(9, 2, -1)
    found, _ = KernelSampler(EmuDevice()).beam_candidates(emu.array(logits), 7)
    assert found[0].tolist() == likely.tolist()


def test_penalties_without_history_and_negative_row_ids_are_refused() -> None:
    sampler = KernelSampler(EmuDevice())
    with pytest.raises(InvariantError, match="row 0 has penalties, but nobody set its history"):
        sampler.sample(np.zeros((1, 5), np.float32), batch_of([{"presence": 1.0}]))
    with pytest.raises(InvariantError, match="row id -1 is negative"):
        sampler.set_history(-1, np.zeros(0, np.int32), np.zeros(0, np.int32))


def test_another_vocabulary_forgets_all_rows() -> None:
    sampler, row = KernelSampler(EmuDevice()), [{"temperature": 0.0, "presence": 1.0, "row_id": 3}]
    sampler.set_history(3, np.zeros(0, np.int32), np.array([1], np.int32))
    chosen = [sampler.sample(np.array([[0.5, 1.0]], np.float32), batch_of(row)).tolist() for _ in range(2)]
    assert chosen == [[0], [1]]  # 0.5 against 1 - 1, then 0.5 - 1 against 1 - 1
    with pytest.raises(InvariantError, match="row 3"):
        sampler.sample(np.zeros((1, 4), np.float32), batch_of(row))


# ---- every schedule gives the same bits


def everything(name: str, schedule: emu.Schedule) -> list[np.ndarray]:
    """Results of kernels that reduce, tile, partition or draw."""
    backend, dtype = checked(name, schedule), TYPES[name][0]
    paged = paged_of(name, [70, 33, 129, 50], [1, 1, 1, 21], 16, 2, 3, 64)
    results = [attention(backend, paged, name)]
    norm, product = emu.empty((3, 576), dtype), emu.empty((3, 40), dtype)
    x = emu.array(random(0, 3, 576), dtype)
    backend.rms_norm(x, random(1, 576), 1e-5, norm)
    gated, weight, gate_up = emu.empty((3, 21), dtype), emu.array(random(2, 40, 576), dtype), emu.array(random(3, 42, 576), dtype)
    same: dict[str, Any] = {"x": x, "norm": random(1, 576), "eps": 1e-5, "bias": emu.empty((0,))}
    for launch in (
        kernel_specs.SKINNY_MATMUL.bind(weight=weight, out=product, add=False, normed=1, **same),
        kernel_specs.SKINNY_GATE_UP.bind(weight=gate_up, out=gated, **same),
    ):
        EmuDevice("check", schedule, seed=7).launch(launch)
    logits = np.stack([random_logits(s, 500, 3.0) for s in range(4)])
    reports = backend.token_logprobs(emu.array(logits), np.zeros(4, np.int32), 3)
    return [*results, norm, product, gated, backend.sample(emu.array(logits), batch_of(ROWS[:4])), *reports, *backend.beam_candidates(emu.array(logits), 8)]


@every_type
def test_results_do_not_depend_on_the_schedule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """float32: the kernels for any type; 16 bits: those on tensor cores."""
    monkeypatch.setattr("cupaged.backends.kernel_attention.PART_SIZE", 48)
    bits = [[a.tobytes() for a in everything(name, schedule)] for schedule in ("forward", "reverse", "depth", "random")]
    assert bits[1:] == bits[:1] * 3


def test_a_large_pool_takes_no_memory_until_it_is_used() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    pool = EmuDevice().empty((1 << 28,), np.float32)
    assert process.memory_info().rss - before < pool.nbytes / 10
    assert np.isnan(EmuDevice().empty((1 << 18,), np.float32)).all()  # a small array is poisoned


# ---- and the checks are awake: bugs planted in our own kernels are named

V2, PREFILL = "paged_attention_v2.cu", "plain_prefill.cu"


@pytest.mark.parametrize(
    ("file", "good", "bad", "message"),
    [
        (V2, "__syncthreads();\n#pragma", "#pragma", r"uninitialised shared array 'keys'"),
        (V2, "__syncthreads();  // the next tile", "// the next tile", r"shared array 'keys'.* races"),
        (V2, "__syncwarp();\n", "\n", r"shared array 'weights'"),
        (V2, "table[position / block_size] :", "table[position / block_size + 1] :", r"key_cache"),
        (V2, "position <= last) {", "position <= last + 1) {", r"uninitialised .*key_cache"),
        (V2, "keys + row * KEY_STRIDE + d, key", "keys + row * (KEY_STRIDE + 1) + d, key", r"misaligned|not aligned"),
        (PREFILL, "__syncthreads();  // the last tile", "// the last tile", r"shared array '(keys|values)'.* races"),
        (PREFILL, "__syncwarp();", "", r"shared array 'weights'.* races"),
        (PREFILL, "tile.num_rows - 1] : -1", "tile.num_rows - 1] + 1 : -1", r"uninitialised .*key_cache|key_cache"),
    ],
)
def test_a_bug_planted_in_a_kernel_is_named(file: str, good: str, bad: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest: Callable[[str], str] = kernels_cu.source
    assert good in honest(file)
    monkeypatch.setattr(kernels_cu, "source", lambda name: honest(name).replace(good, bad, 1) if name == file else honest(name))
    paged = paged_of("float32", [70, 33, 300, 50], [1, 1, 1, 19], 16, 2, 3, 64)
    with pytest.raises(KernelError, match=message):
        attention(KernelBackend(EmuDevice("check", "depth")), paged, "float32")


# ---- decode on tensor cores

half_types = pytest.mark.parametrize("name", ["float16", "bfloat16"])


class Capable(EmuDevice):
    """An emulated GPU of some size."""

    def __init__(self, multiprocessors: int, capability: tuple[int, int], schedule: emu.Schedule = "depth") -> None:
        super().__init__("check", schedule)
        self.multiprocessors, self.capability = multiprocessors, capability


@half_types
@pytest.mark.parametrize("group", range(1, 17))
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tensor_core_decode_for_every_group(name: str, group: int, head_dim: int) -> None:
    paged = paged_of(name, [1, 15, 16, 17, 100, 230], [1] * 6, 16, 2, group, head_dim, padded=1)
    close(attention(checked(name), paged, name), paged.attention(0.3, 0), name)


@pytest.mark.parametrize("window", [0, 1, 15, 16, 17, 40, 1000])
@pytest.mark.parametrize("block_size", [16, 48, 256])
def test_tensor_core_decode_under_a_window(window: int, block_size: int) -> None:
    paged = paged_of("float16", [1, 16, 17, 47, 48, 49, 130], [1] * 7, block_size, 1, 3, 64, padded=1)
    close(attention(checked("float16"), paged, "float16", window), paged.attention(0.3, window), "float16")


def test_an_item_that_a_layers_window_hides_wholly_weighs_nothing() -> None:
    """Where other layers see everything, the plan does, too."""
    backend = checked("float16")
    paged = paged_of("float16", [200, 90], [1, 1], 16, 1, 3, 64)
    batch, out = paged.load(backend, 0), emu.empty((2, paged.heads * 64), np.float16)
    backend.attention(emu.array(paged.qkv, np.float16), *poisoned_pool(paged, "float16"), batch, paged.heads, 0.3, 17, out)
    close(out, paged.attention(0.3, 17), "float16")
    sums = batch.scratch["partial_sum"][: batch.rows.plan.item_start[-1] * 3]
    assert np.isfinite(sums).all()
    assert (sums == 0).any()


@pytest.mark.parametrize("multiprocessors", [1, 3, 60])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
def test_tensor_core_decode_on_devices_of_any_size(multiprocessors: int, capability: tuple[int, int]) -> None:
    paged = paged_of("bfloat16", [200, 3, 90, 31], [1] * 4, 32, 2, 4, 128)
    backend = KernelBackend(Capable(multiprocessors, capability), ml_dtypes.bfloat16)
    close(attention(backend, paged, "bfloat16"), paged.attention(0.3, 0), "bfloat16")


def test_a_plan_under_a_window_has_the_windows_tiles_only() -> None:
    paged = paged_of("float16", [100, 95], [1, 1], 16, 1, 3, 64)
    plan = paged.load(checked("float16"), 20).rows.plan
    spans = {(int(s), int(first), int(end)) for s, _, first, end in plan.items if end}
    assert {(s, tile) for s, first, end in spans for tile in range(first, end)} == {(0, 5), (0, 6), (1, 4), (1, 5)}


def test_wide_activations_over_narrow_keys_and_values() -> None:
    """The tensor cores want one type: then the other kernels compute."""
    backend = KernelBackend(EmuDevice("check"), np.float32, np.float16)
    paged = paged_of("float16", [33, 40, 70], [1, 1, 30], 16, 2, 3, 64)
    out = emu.empty((paged.rows, paged.heads * 64), np.float32)
    backend.attention(emu.array(paged.qkv), *poisoned_pool(paged, "float16"), paged.load(backend), paged.heads, 0.3, 0, out)
    close(out, paged.attention(0.3, 0), "float32")


@half_types
@pytest.mark.parametrize("group", range(1, 17))
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 5), (128, 16)])
def test_tensor_core_prefill_for_every_group(name: str, group: int, head_dim: int, block_size: int) -> None:
    paged = paged_of(name, [1, 20, 64, 65, 150], [1, 20, 33, 65, 70], block_size, 1, group, head_dim, padded=1)
    close(attention(checked(name), paged, name), paged.attention(0.3, 0), name)


@pytest.mark.parametrize("window", [1, 16, 63, 64, 65, 100])
def test_tensor_core_prefill_under_a_window(window: int) -> None:
    paged = paged_of("float16", [64, 65, 180], [64, 2, 140], 16, 1, 3, 64)
    close(attention(checked("float16"), paged, "float16", window), paged.attention(0.3, window), "float16")


def test_tensor_core_prefill_gives_zeros_to_rows_of_no_sequence() -> None:
    paged = paged_of("float16", [5, 30], [5, 30], 16, 1, 2, 64)
    out, qkv = emu.empty((paged.rows + 70, 128), np.float16), np.concatenate([paged.qkv, paged.qkv, paged.qkv[:35]])
    batch = AttentionBatch(
        np.concatenate([paged.batch.positions, np.zeros(70, np.int32)]), np.concatenate([paged.batch.slots, np.full(70, -1)]),
        paged.batch.block_tables, paged.batch.query_start, paged.batch.context_lens, 0, 30,
    )  # fmt: skip
    loaded = load_batch(checked("float16"), batch, num_blocks=paged.num_blocks, block_size=16)
    checked("float16").attention(emu.array(qkv, np.float16), *poisoned_pool(paged, "float16"), loaded, 2, 0.3, 0, out)
    close(out[:35], paged.attention(0.3, 0), "float16")
    assert not out[35:].any()


DECODE, PREFILL_16 = "paged_decode.cu", "paged_prefill.cu"


@pytest.mark.parametrize(
    ("file", "good", "bad", "message"),
    [
        (PREFILL_16, "__syncthreads();  // everybody's", "// everybody's", "uninitialised shared"),
        (PREFILL_16, "__syncthreads();  // the tile", "// the tile", "races"),
        (PREFILL_16, "copy_async_wait<0>();", "copy_async_wait<1>();", "uninitialised shared"),
        (DECODE, "copy_async_wait<STAGES - 2>();", "copy_async_wait<STAGES - 1>();", "uninitialised|in flight|cp.async"),
        (DECODE, "__syncwarp();  // every lane's", "// every lane's", "uninitialised shared"),
        (DECODE, "__syncthreads();  // all rings", "// all rings", "races"),
        (DECODE, "position <= newest ? 16 : 0", "position <= newest + 1 ? 16 : 0", "uninitialised"),
        (DECODE, "const int row = warp * TILE + lane / 4 + 8 * half;", "const int row = warp * TILE + lane / 4 + 7 * half;", "races"),
    ],
)
def test_a_bug_planted_in_a_tensor_core_kernel_is_named(file: str, good: str, bad: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest: Callable[[str], str] = kernels_cu.source
    assert good in honest(file)
    monkeypatch.setattr(kernels_cu, "source", lambda name: honest(name).replace(good, bad, 1) if name == file else honest(name))
    paged = paged_of("float16", [300, 150, 200], [1, 1, 40], 16, 2, 3, 64)
    with pytest.raises(KernelError, match=message):
        attention(KernelBackend(Capable(1, (8, 0)), np.float16), paged, "float16")


# ---- the twins without block tables


@pytest.mark.parametrize("spec", ["v2", "tensor cores"])
def test_the_contiguous_twin_computes_the_same(spec: str) -> None:
    """Sequence s has block s of a pool whose blocks are as large as the longest context."""
    device, paged = EmuDevice("check"), paged_of("float16", [33, 64, 5], [1] * 3, 64, 2, 3, 64)
    paged.tables[:, 0] = np.arange(3)
    key, value = poisoned_pool(paged, "float16")
    results = []
    for is_paged in (1, 0):
        tables = paged.batch.block_tables if is_paged else np.full((3, 1), 10**6, np.int32)
        same = {"qkv": emu.array(paged.qkv, np.float16), "key_cache": key, "value_cache": value, "block_tables": tables}
        same |= {"positions": paged.batch.positions, "num_heads": 6, "scale": 0.3, "window": 0, "paged": is_paged}
        out = emu.empty((3, 6 * 64), np.float16)
        if spec == "v2":
            partial = {"partial_out": emu.empty((3, 6, 2, 64)), "partial_max": emu.empty((3, 6, 2)), "partial_sum": emu.empty((3, 6, 2))}
            device.launch(kernel_specs.ATTENTION_PARTITION.bind(part_size=32, context_lens=paged.batch.context_lens, **same, **partial))
            device.launch(kernel_specs.MERGE_PARTITIONS.bind(out=out, num_heads=6, head_dim=64, **partial))
        else:
            plan = plan_decode(paged.batch.context_lens, 2, 4)
            most = len(plan.items)
            partial = {"partial_out": emu.empty((most, 3, 64)), "partial_max": emu.empty((most, 3)), "partial_sum": emu.empty((most, 3))}
            device.launch(kernel_specs.PAGED_DECODE.bind(items=plan.items, item_start=plan.item_start, stages=2, **same, **partial))
            merge = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64}
            device.launch(kernel_specs.MERGE_ITEMS.bind(part_start=plan.part_start, out=out, **merge, **partial))
        results.append(out)
    close(results[0], paged.attention(0.3, 0), "float16")
    assert np.array_equal(results[0], results[1])
