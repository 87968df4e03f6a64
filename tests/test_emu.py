"""The emulator itself: what it lets pass and what it refuses, its numbers, schedules, crashes, arguments and compilers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import ml_dtypes
import numpy as np
import pytest

from cupaged.backends.emu import (
    Compiler,
    Mode,
    Module,
    Schedule,
    array,
    build,
    compiler,
    empty,
    find_compiler,
    memory,
    wrote,
)
from cupaged.errors import BackendError, ConfigError, KernelError

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
MODES: tuple[Mode, ...] = get_args(Mode)

# The wrappers that these kernels need, as device.cuh would spell them.
PRELUDE = """
#define SHARED(type, name, count) static char name##_key; \\
  type* const name = (type*)simt_shared(&name##_key, sizeof(type) * (count), 16, #name)
static inline void copy16(void* to, const void* from, SIMT_LOC) { simt_copy(to, from, 16, file, line); }
static inline void async16(void* to, const void* from, int valid, SIMT_LOC) { simt_cp_async(to, from, 16, valid, file, line); }
"""


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    try:
        find_compiler()
    except BackendError as error:
        pytest.skip(str(error))


def launch(
    body: str,
    arguments: tuple[Any, ...],
    parameters: str,
    block: int = 32,
    grid: int = 1,
    mode: Mode = "check",
    schedule: Schedule = "forward",
    shared_mem: int = 0,
    by: Compiler | None = None,
) -> None:
    text = f'{PRELUDE}#line 1 "k.cu"\nextern "C" __global__ void k({parameters}) {{\n{body}\n}}\n'
    module = Module(text, name="k.cu", mode=mode, compiler=by)
    module.get_function("k")((grid,), (block,), arguments, shared_mem=shared_mem, schedule=schedule)


def zeros(count: int = 64, dtype: Any = np.float32) -> Any:
    return array(np.zeros(count, dtype))


# ---- kernels that keep the rules, each near to one that does not -----------------------------------------------------------

CLEAN = {
    "a lane that read before others' __syncwarp writes after it": """
        SHARED(float, s, 32);
        s[threadIdx.x] = 1.0f; __syncwarp();
        const float first = s[0]; __syncwarp();
        if (threadIdx.x == 0) { const float again = s[0]; s[0] = again + first; }
        __syncwarp(); out[threadIdx.x] = s[0];""",
    "two halves of a warp synchronise apart, then together": """
        SHARED(float, s, 32);
        const unsigned half = threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u;
        s[threadIdx.x] = (float)threadIdx.x; __syncwarp(half);
        const float near = s[threadIdx.x ^ 1];
        __syncwarp();
        out[threadIdx.x] = near + s[31 - threadIdx.x];""",
    "half masks and full masks take turns": """
        float v = (float)threadIdx.x;
        if (threadIdx.x < 16) v += __shfl_xor_sync(0x0000ffffu, v, 1);
        v += __shfl_xor_sync(0xffffffffu, v, 16);
        out[threadIdx.x] = v;""",
    "a whole block returns early": """
        if (blockIdx.x == 1) return;
        __syncthreads(); out[threadIdx.x] = 1.0f;""",
    "blocks that read the same number": "out[threadIdx.x + blockDim.x * blockIdx.x] = x[0];",
    "the last block merges what the others left": """
        SHARED(int, last, 1);
        if (threadIdx.x < 1) out[blockIdx.x] = 1.0f + (float)blockIdx.x;
        __threadfence();
        if (threadIdx.x == 0) last[0] = atomicAdd((int*)x, 1) == (int)gridDim.x - 1;
        __syncthreads();
        if (last[0]) { simt_fence_order(); if (threadIdx.x == 0) out[63] = out[0] + out[1]; }""",
    "a thread reads what it wrote": "out[threadIdx.x] = 2.0f; out[threadIdx.x] += 1.0f;",
    "hashes wrap": "out[threadIdx.x] = (float)((threadIdx.x * 2654435761u) >> 8);",
    "min and max of built-in variables": "out[min(threadIdx.x, blockDim.x - 1u)] = (float)max((int)threadIdx.x, 3);",
    "cp.async fills with zeros what it is told not to read": """
        SHARED(float, s, 4 * 32);
        async16(s + 4 * threadIdx.x, x, threadIdx.x < 16 ? 8 : 0); simt_cp_commit(); simt_cp_wait(0);
        out[threadIdx.x] = s[4 * threadIdx.x + 1] + s[4 * threadIdx.x + 3];""",
    "shared memory is handed from warp to warp": """
        SHARED(float, s, 64);
        for (int i = 0; i < 3; i++) { s[threadIdx.x] = (float)i; __syncthreads(); out[threadIdx.x] = s[threadIdx.x ^ 32]; __syncthreads(); }""",
    "neighbouring bytes have different writers": """
        SHARED(unsigned char, s, 64);
        s[threadIdx.x] = (unsigned char)threadIdx.x; __syncwarp(); out[threadIdx.x] = (float)s[threadIdx.x ^ 1];""",
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("body", CLEAN.values(), ids=CLEAN)
def test_a_kernel_that_keeps_the_rules_is_not_blamed(body: str, mode: Mode) -> None:
    block, grid = (64 if "^ 32" in body else 32), (2 if "blockIdx" in body else 1)
    results = []
    for schedule in SCHEDULES:
        out, x = zeros(), zeros()
        launch(body, (out, x), "float* out, float* x", block, grid, mode, schedule)
        results.append(out.tobytes())
    assert len(set(results)) == 1


BROKEN = {
    "lanes of one half read the other half's writes": (
        """SHARED(float, s, 32);
        s[threadIdx.x] = 1.0f; __syncwarp(threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u);
        out[threadIdx.x] = s[31 - threadIdx.x];""",
        ("data race", "uninitialised read"),
    ),
    "a shuffle orders no memory": (
        """SHARED(float, s, 32);
        s[threadIdx.x] = 1.0f;
        const float v = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
        out[threadIdx.x] = v + s[31 - threadIdx.x];""",
        ("data race",),
    ),
    "blocks write the same number": ("out[0] = 1.0f;", ("data race",)),
    "a block reads what another wrote": ("if (threadIdx.x == 0) out[blockIdx.x] = 1.0f + out[1 - blockIdx.x];", ("data race",)),
    "a lane writes what all of them read, with nothing but a shuffle between": (
        """SHARED(float, s, 1);
        if (threadIdx.x == 0) s[0] = 1.0f;
        __syncwarp();
        const float v = s[0] + __shfl_xor_sync(0xffffffffu, s[0], 1);
        if (threadIdx.x == 0) s[0] = v;
        out[blockIdx.x * 32 + threadIdx.x] = v;""",
        ("data race",),
    ),
    "a block writes what it and another one read": (
        "if (threadIdx.x == 0) { out[blockIdx.x] = x[0]; if (blockIdx.x == 1) x[0] = out[1] + 1.0f; }",
        ("data race",),
    ),
    "one copy is waited for and the other read": (
        """SHARED(float, s, 8);
        if (threadIdx.x == 0) { async16(s, x, 16); simt_cp_commit(); async16(s + 4, x, 16); simt_cp_commit(); simt_cp_wait(1); out[0] = s[0] + s[4]; }""",
        ("uninitialised read",),
    ),
    "a lane waits for its own copies and reads another's": (
        """SHARED(float, s, 4 * 32);
        async16(s + 4 * threadIdx.x, x, 16); simt_cp_commit(); __syncwarp(); simt_cp_wait(0);
        out[threadIdx.x] = s[4 * (31 - threadIdx.x)];""",
        ("data race", "uninitialised read"),
    ),
    "a copy to a misaligned target": ("copy16(out + 1, x);", ("misaligned",)),
    "a shuffle from a lane out of the mask": (
        "if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1.0f, 20);",
        ("warp mask",),
    ),
    "lanes of one mask want different things": (
        "out[threadIdx.x] = threadIdx.x < 16 ? __shfl_xor_sync(0xffffffffu, 1.0f, 1) : (float)__any_sync(0xffffffffu, 1);",
        ("warp mask",),
    ),
    "a barrier and a shuffle wait for each other": (
        "if (threadIdx.x == 3) __syncthreads(); else out[0] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);\n__syncthreads();",
        ("warp mask",),
    ),
    "a null pointer": ("out[threadIdx.x] = 1.0f + none[threadIdx.x];", ("out of bounds",)),
    "an index past a local array": ("float a[4] = {1, 2, 3, 4}; out[threadIdx.x] = a[threadIdx.x];", ("out of bounds",)),
    "before the start of an array": ("out[threadIdx.x] = x[(int)threadIdx.x - 1];", ("out of bounds",)),
    "a division by zero": ("out[threadIdx.x] = (float)(7 / (int)threadIdx.x);", ("overflow",)),
    "a 64-bit number as an int": ('out[0] = (float)simt_int32((int64_t)1 << 40, "k.cu", 2);', ("overflow",)),
    "more local variables than a stack holds": ("volatile float a[40000]; a[threadIdx.x] = 1.0f; out[threadIdx.x] = a[0];", ("stack overflow",)),
    "more static shared memory than a GPU has": ('SHARED(float, s, 13000);\nout[0] = s[0];', ("shared memory",)),
    "dynamic shared memory past its end": ("((float*)simt_dynamic())[threadIdx.x + 1] = 1.0f;", ("out of bounds",)),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("body", "kinds"), BROKEN.values(), ids=BROKEN)
def test_a_kernel_that_breaks_a_rule_is_blamed(body: str, kinds: tuple[str, ...], schedule: Schedule) -> None:
    with pytest.raises(KernelError) as caught:
        launch(body, (zeros(), zeros(), None), "float* out, float* x, float* none", grid=2, schedule=schedule, shared_mem=128)
    assert caught.value.kind in kinds, str(caught.value)
    assert caught.value.file == "k.cu"
    assert caught.value.line is not None
    first = 1 if kinds == ("stack overflow",) else 2  # a function enters its stack where it begins
    assert first <= caught.value.line <= body.count("\n") + 2


def test_a_write_through_const_is_refused_and_overlapping_arguments_are_one_memory() -> None:
    x = zeros()
    with pytest.raises(KernelError, match="write to the read-only argument 'x'") as caught:
        launch("((float*)x)[threadIdx.x] = 1.0f;", (x,), "const float* x")
    assert caught.value.kind == "read only"
    launch("y[threadIdx.x] = x[threadIdx.x] + 1.0f;", (x, x), "float* y, const float* x")
    assert (x[:32] == 1).all()
    with pytest.raises(KernelError, match="races with a"):
        launch("y[threadIdx.x] = x[threadIdx.x] + 1.0f;", (x[1:33], x[:32]), "float* y, const float* x")
    with pytest.raises(KernelError, match="'y'"):  # a view ends where it ends, not where its memory does
        launch("y[threadIdx.x] = 1.0f;", (x[:31],), "float* y")


# ---- uninitialised values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.int64, np.uint8])
def test_only_a_use_of_an_unwritten_value_is_blamed(dtype: Any) -> None:
    kind = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16", "int32": "int", "int64": "long long", "uint8": "unsigned char"}
    scalar = kind[np.dtype(dtype).name]
    per_copy = 16 // np.dtype(dtype).itemsize
    source, target = empty(2 * per_copy, dtype), empty(2 * per_copy, dtype)
    source[:per_copy] = np.arange(per_copy)  # the host fills the first 16 bytes
    through_shared = f"SHARED({scalar}, s, 64); copy16(s + threadIdx.x * {per_copy}, x + threadIdx.x * {per_copy});"
    use, out = "out[threadIdx.x] = (float)target[threadIdx.x];", zeros()
    use_parameters = f"float* out, const {scalar}* target"
    for copy in (
        f"{through_shared} copy16(y + threadIdx.x * {per_copy}, s + threadIdx.x * {per_copy});",
        f"SHARED({scalar}, s, 64); async16(s + threadIdx.x * {per_copy}, x + threadIdx.x * {per_copy}, 16); simt_cp_commit();"
        f"simt_cp_wait(0); copy16(y + threadIdx.x * {per_copy}, s + threadIdx.x * {per_copy});",
    ):
        target = empty(2 * per_copy, dtype)
        launch(copy, (target, source), f"{scalar}* y, const {scalar}* x", block=2)
        launch(use, (out, target), use_parameters, block=per_copy)
        with pytest.raises(KernelError, match="uninitialised 'target'") as caught:
            launch(use, (out, target), use_parameters, block=per_copy + 1)
        assert caught.value.thread == (per_copy, 0, 0)
    body = f"{through_shared} out[threadIdx.x] = (float)s[threadIdx.x * {per_copy}];"
    with pytest.raises(KernelError, match="uninitialised shared array 's'"):
        launch(body, (out, source), f"float* out, const {scalar}* x", block=2)


def test_bytes_that_were_written_are_known_whatever_they_are() -> None:
    data = empty((2, 64), np.uint8)
    use = "volatile unsigned char used = x[threadIdx.x];"
    poison = np.frombuffer(np.full(32, 0x7FA5, np.uint16).tobytes(), np.uint8)
    with pytest.raises(KernelError, match="uninitialised 'x'"):
        launch(use, (data[1],), "const unsigned char* x", block=64)
    data[1] = poison
    wrote(data[1])
    launch(use, (data[1],), "const unsigned char* x", block=64)
    with pytest.raises(KernelError, match="uninitialised 'x'"):
        launch(use, (data[0],), "const unsigned char* x", block=64)
    launch(use, (array(poison),), "const unsigned char* x", block=64)
    launch("x[threadIdx.x] = threadIdx.x % 2 ? 0x7f : 0xa5;", (data[0],), "unsigned char* x", block=64)
    launch(use, (data[0],), "const unsigned char* x", block=64)


def test_arrays_lie_between_guards_and_release_their_marks() -> None:
    before = len(memory._marks)
    block = empty((3, 5), np.uint8)
    assert len(memory._marks) == before + 1
    assert np.isnan(empty(7, np.float32)).all()
    assert np.isnan(empty(7, ml_dtypes.bfloat16).astype(np.float32)).all()
    assert empty((0, 4)).shape == (0, 4)
    view = block[1]
    del block
    assert len(memory._marks) == before + 1
    del view
    assert len(memory._marks) == before


# ---- numbers -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scalar", "dtype", "bits"),
    [("__half", np.float16, np.uint16), ("__nv_bfloat16", ml_dtypes.bfloat16, np.uint16), ("__nv_fp8_e4m3", ml_dtypes.float8_e4m3fn, np.uint8)],
)
def test_small_floats_convert_as_they_should(scalar: str, dtype: Any, bits: Any) -> None:
    every = array(np.arange(np.iinfo(bits).max + 1).astype(bits)).view(dtype)
    wide = empty(every.size)
    count = every.size // 256
    launch("out[blockIdx.x * 256 + threadIdx.x] = (float)x[blockIdx.x * 256 + threadIdx.x];", (wide, every), f"float* out, const {scalar}* x", 256, count, "fast")
    np.testing.assert_array_equal(wide, every.astype(np.float32))

    rng = np.random.default_rng(1)
    random = (rng.standard_normal(4096) * 10.0 ** rng.integers(-9, 6, 4096)).astype(np.float32)
    finite = np.sort(wide[np.isfinite(wide)]).astype(np.float64)
    halfway = (finite[:-1] + finite[1:]) / 2
    edges = np.array([0.0, -0.0, 448.0, 449.0, 464.0, 480.0, 65519.0, 65520.0, 3.3e38, 2.0**-10, 2.0**-25], np.float32)
    values = np.concatenate([random, halfway, edges, finite]).astype(np.float32)
    x = array(np.resize(values, -(-values.size // 256) * 256))
    narrow = empty(x.size, dtype)
    launch(f"out[blockIdx.x * 256 + threadIdx.x] = {scalar}(x[blockIdx.x * 256 + threadIdx.x]);", (narrow, x), f"{scalar}* out, const float* x", 256, x.size // 256, "fast")
    expected = np.array(x)
    if scalar == "__nv_fp8_e4m3":
        expected = np.clip(expected, -448, 448)  # CUDA saturates
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(narrow.view(bits), expected.astype(dtype).view(bits))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_tensor_core_fragments(dtype: Any) -> None:
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((16, 16), (16, 8)))
    scalar, out = ("__half" if dtype is np.float16 else "__nv_bfloat16"), empty((16, 8))
    body = f"""SHARED({scalar}, sa, 256); SHARED({scalar}, sb, 128);
    for (int i = threadIdx.x; i < 256; i += 32) sa[i] = a[i];
    for (int i = threadIdx.x; i < 128; i += 32) sb[i] = b[i];
    __syncwarp();
    uint32_t ra[4], rb[2]; float c[4] = {{0, 0, 0, 0}};
    const int lane = threadIdx.x;
    simt_ldmatrix(4, 0, ra, sa + lane % 16 * 16 + lane / 16 * 8, "k.cu", 1);
    simt_ldmatrix(2, 1, rb, sb + lane % 16 * 8, "k.cu", 1);
    simt_mma({int(dtype is not np.float16)}, c, ra, rb, c, "k.cu", 1);
    for (int i = 0; i < 4; i++) out[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = c[i];"""
    parameters = f"float* out, const {scalar}* a, const {scalar}* b"
    for schedule in SCHEDULES:
        launch(body, (out, array(a), array(b)), parameters, schedule=schedule)
        np.testing.assert_allclose(out, a.astype(np.float32) @ b.astype(np.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shuffles_votes_and_block_votes(schedule: Schedule) -> None:
    lane = np.arange(32)
    expected = {
        "__shfl_sync(~0u, v, 5, 8)": lane // 8 * 8 + 5,
        "__shfl_xor_sync(~0u, v, 6)": lane ^ 6,
        "__shfl_up_sync(~0u, v, 3)": np.where(lane < 3, lane, lane - 3),
        "__shfl_down_sync(~0u, v, 3, 16)": np.where(lane % 16 + 3 < 16, lane + 3, lane),
        "(int)__popc(__ballot_sync(~0u, v > 20))": np.full(32, 11),
        "__any_sync(~0u, v == 31)": np.full(32, 1),
        "__all_sync(~0u, v == 31)": np.full(32, 0),
        "__syncthreads_count(v < 4)": np.full(32, 8),
        "__syncthreads_or(v == 40)": np.full(32, 0),
        "__syncthreads_and(v < 32)": np.full(32, 1),
    }
    out = empty((len(expected), 64), np.int32)
    lines = "\n".join(f"out[{64 * i} + threadIdx.x] = {e};" for i, e in enumerate(expected))
    launch(f"const int v = threadIdx.x % 32;\n{lines}", (out,), "int* out", 64, schedule=schedule)
    for row, values in zip(out, expected.values(), strict=True):
        np.testing.assert_array_equal(row, np.tile(values, 2))


# ---- schedules -----------------------------------------------------------------------------------------------------------------


def order_of_arrival(schedule: Schedule) -> list[int]:
    """Which warp passes each of three barrier-free rounds when: two warps note themselves, with a shuffle between rounds."""
    out, ticket = zeros(8, np.int32), zeros(1, np.int32)
    body = """for (int i = 0; i < 3; i++) {
      if (threadIdx.x % 32 == 0) out[atomicAdd(ticket, 1)] = (int)threadIdx.x / 32;
      __syncwarp();
    }"""
    launch(body, (out, ticket), "int* out, int* ticket", 64, mode="fast", schedule=schedule)
    return [int(warp) for warp in out[:6]]


def test_schedules_run_fair_backwards_or_ahead() -> None:
    assert order_of_arrival("forward") == [0, 1, 0, 1, 0, 1]
    assert order_of_arrival("reverse") == [1, 0, 1, 0, 1, 0]
    assert order_of_arrival("depth") in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0])
    assert sorted(order_of_arrival("random")) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", MODES)
def test_every_thread_of_every_block_runs_once(schedule: Schedule, mode: Mode) -> None:
    out = zeros(2 * 3 * 2 * 12, np.int32)
    text = """extern "C" __global__ void k(int* out) {
      const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
      const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
      atomicAdd(out + block * 12 + thread, 1);
    }"""
    Module(text, mode=mode).get_function("k")((2, 3, 2), (3, 2, 2), (out,), schedule=schedule, seed=5)
    assert (out == 1).all()


def test_the_fallback_switch_gives_the_same_bits() -> None:
    body = "float v = x[threadIdx.x]; for (int i = 0; i < 5; i++) { __syncthreads(); v += __shfl_xor_sync(~0u, v, 1) * 0.3f; } out[threadIdx.x] = v;"
    x, results = array(np.linspace(0, 1, 96, dtype=np.float32)), []
    found = find_compiler()
    for by in (found, Compiler((*found.command, "-DCUPAGED_EMU_UCONTEXT"), found.version)):
        for schedule in SCHEDULES:
            out = empty(96)
            launch(body, (out, x), "float* out, const float* x", 96, mode="fast", schedule=schedule, by=by)
            results.append(out.tobytes())
    assert len(set(results)) == 1


# ---- fast mode: crashes are errors too -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ("out[64 + threadIdx.x] = 1.0f;", "out of bounds", "past the end of 'out'"),
        ("out[(int)threadIdx.x - 1024] = 1.0f;", "out of bounds", "before the start of 'out'"),
        ("SHARED(float, s, 8); s[threadIdx.x * 100000] = 1.0f; out[0] = s[1];", "out of bounds", "past the end of shared array 's'"),
        ("SHARED(float, s, 8); s[(int)threadIdx.x - 1000] = 1.0f; out[0] = s[1];", "out of bounds", "before every array"),
        ("out[0] = (float)(5 / (int)out[threadIdx.x]);", "overflow", "division by zero"),
        ("if (threadIdx.x > 3) __syncthreads(); else out[0] = __shfl_xor_sync(~0u, 1.0f, 1);", "warp mask", "wait for each other"),
        ("volatile float a[40000]; a[threadIdx.x] = 1.0f; out[0] = a[0];", "stack overflow", "local variables"),
    ],
)
def test_a_crash_in_fast_mode_is_an_error_and_the_next_launch_works(body: str, kind: str, message: str) -> None:
    with pytest.raises(KernelError, match=message) as caught:
        launch(body, (zeros(),), "float* out", mode="fast")
    assert caught.value.kind == kind
    assert caught.value.file in ("k.cu", None)
    out = zeros()
    launch("out[threadIdx.x] = 1.0f;", (out,), "float* out", mode="fast")
    assert out.sum() == 32


# ---- arguments -----------------------------------------------------------------------------------------------------------------

ARGUMENTS = """extern "C" __global__ void k(float* out, const __nv_bfloat16* __restrict__ x, int n, float scale) {
  if (n > 0) out[threadIdx.x] = scale;
}"""


def test_wrong_arguments_are_refused_by_name() -> None:
    kernel = Module(ARGUMENTS).get_function("k")
    out, x, n, scale = zeros(), zeros(64, ml_dtypes.bfloat16), np.int32(1), np.float32(2)
    frozen = zeros()
    frozen.flags.writeable = False
    for arguments, message in [
        ((out, x, n), r"k: 3 arguments for 4 parameters \(out, x, n, scale\)"),
        ((out.astype(np.float64), x, n, scale), "'out' wants an array of float32, got an array of float64"),
        ((frozen, x, n, scale), "'out' is written by the kernel, got a read-only array"),
        ((out[::2], x, n, scale), r"'out' wants a C-contiguous array, got strides \(8,\) for shape \(32,\)"),
        ((out, out, n, scale), "'x' wants an array of bfloat16 or uint16, got an array of float32"),
        ((out, x, 1, scale), "'n' wants a NumPy scalar of int32, got the Python int 1"),
        ((out, x, n, np.float64(2)), "'scale' wants a NumPy scalar of float32, got a scalar of float64"),
    ]:
        with pytest.raises(KernelError, match=message) as caught:
            kernel((1,), (32,), arguments)
        assert caught.value.kind == "argument"
    kernel((1,), (32,), (out, x.view(np.uint16), n, scale))
    kernel((1,), (32,), (out, None, n, scale))
    assert (out[:32] == 2).all()


def test_wrong_launch_shapes_and_names_are_refused() -> None:
    module = Module(ARGUMENTS)
    kernel, arguments = module.get_function("k"), (zeros(), None, np.int32(1), np.float32(2))
    for grid, block, options, message in [
        ((0,), (32,), {}, r"grid \(0,\)"),
        ((1, 70000), (32,), {}, "grid"),
        ((1,), (2048,), {}, r"block \(2048,\)"),
        ((1,), (), {}, r"block \(\)"),
        ((1,), (32,), {"shared_mem": 50000}, "50000 bytes of dynamic shared memory, of 49152 allowed; raise max_dynamic"),
    ]:
        with pytest.raises(KernelError, match=message):
            kernel(grid, block, arguments, **options)
    kernel.max_dynamic_shared_size_bytes = 60000
    kernel((1,), (32,), arguments, shared_mem=50000)
    with pytest.raises(KernelError, match="has no kernel 'f'; it has k"):
        module.get_function("f")
    with pytest.raises(ConfigError, match="schedule 'sideways' does not exist; use forward, reverse, depth, random"):
        kernel((1,), (32,), arguments, schedule="sideways")  # type: ignore[arg-type]  # a wrong value is the point
    with pytest.raises(ConfigError, match="mode 'slow' does not exist"):
        Module(ARGUMENTS, mode="slow")  # type: ignore[arg-type]  # a wrong value is the point


def test_arrays_behind_a_table_of_pointers_are_named_to_the_launch() -> None:
    layers = [zeros(32), zeros(32)]
    table = array(np.array([layer.ctypes.data for layer in layers], np.uint64))
    kernel = Module(
        'extern "C" __global__ void k(const unsigned long long* table) { ((float*)table[blockIdx.x])[threadIdx.x] = 1.0f; }', mode="check"
    ).get_function("k")
    with pytest.raises(KernelError, match="out of bounds"):
        kernel((2,), (32,), (table,))
    kernel((2,), (32,), (table,), reachable=layers)
    assert all(layer.sum() == 32 for layer in layers)


# ---- compilers and the cache ---------------------------------------------------------------------------------------------------


def test_a_kernel_that_does_not_compile_shows_the_log_and_the_line() -> None:
    text = '#line 1 "inner.cuh"\nint one;\nint two = three;\n#line 2 "outer.cu"\nextern "C" __global__ void k(int* x) { x[0] = 1; }\n'
    with pytest.raises(BackendError, match=r"outer\.cu does not compile: inner\.cuh:2: .*three") as caught:
        Module(text, name="outer.cu")
    first, second, *log = str(caught.value).splitlines()
    assert "\n" not in first
    assert second == "     2 | int two = three;"
    assert any("inner.cuh:2" in line for line in log)
    with pytest.raises(BackendError, match=r'bare\.cu has no kernel: the emulator looks for `extern "C" __global__'):
        Module("int x;", name="bare.cu")


def test_no_compiler_is_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("CUPAGED_CXX", "no-such-compiler -x")
    with pytest.raises(BackendError, match="CUPAGED_CXX names 'no-such-compiler -x', which is no program"):
        find_compiler()
    monkeypatch.setenv("CUPAGED_CXX", "")
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"^the emulator needs a C\+\+17 compiler: install g\+\+ or clang\+\+, or `pip install ziglang`"):
        find_compiler()
    compiler._find.cache_clear()


def test_compilers_are_tried_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("own", "shared", "g++", "clang++", "c++"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho I am {name}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUPAGED_CXX", "own -flag")
    monkeypatch.setenv("CXX", "shared")
    assert find_compiler() == Compiler(("own", "-flag"), "I am own\n")
    monkeypatch.delenv("CUPAGED_CXX")
    for name in ("shared", "g++", "clang++", "c++"):
        assert find_compiler().command == (name,)
        (tmp_path / name).unlink()
        monkeypatch.delenv("CXX", raising=False)
        compiler._find.cache_clear()


def test_what_was_compiled_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUPAGED_CACHE", str(tmp_path))
    build._runtime_path.cache_clear()
    text = 'extern "C" __global__ void k(int* x) { x[0] = N; }'
    Module(text, ["-DN=1"])
    files = sorted(tmp_path.rglob("*"))
    assert len([file for file in files if file.suffix == ".so"]) == 2
    assert all(file.suffix == ".so" for file in files if file.is_file())
    with monkeypatch.context() as patch:
        patch.setattr(Compiler, "run", lambda *_: pytest.fail("compiled again"))
        Module(text, ["-DN=1"])
    x = zeros(1, np.int32)
    Module(text, ["-DN=2"]).get_function("k")((1,), (1,), (x,))
    assert x[0] == 2
    build._runtime_path.cache_clear()


def test_processes_that_compile_at_once_agree(tmp_path: Path) -> None:
    code = (
        "import numpy as np\nfrom cupaged.backends.emu import Module, array\n"
        'm = Module(\'extern "C" __global__ void k(int* x) { x[threadIdx.x] = 7; }\')\n'
        "x = array(np.zeros(32, np.int32))\nm.get_function('k')((1,), (32,), (x,))\nprint(x.sum())"
    )
    env = os.environ | {"CUPAGED_CACHE": str(tmp_path)}
    started = [subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0] for process in started] == ["224\n"] * 3
    assert sorted(path.suffix for path in (tmp_path / "emu").iterdir()) == [".so", ".so"]


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPAGED_CACHE", str(tmp_path / "file"))
    build._runtime_path.cache_clear()
    with pytest.raises(BackendError, match=r"cannot write compiled kernels to .*file/emu: .*; set CUPAGED_CACHE"):
        Module('extern "C" __global__ void k(int* x) { x[0] = 3; }')
    build._runtime_path.cache_clear()


def test_without_addr2line_the_rest_is_still_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = 'extern "C" __global__ void k(float* out) { out[threadIdx.x] = 1.0f; }'
    kernel = Module(text, mode="check").get_function("k")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelError, match=r"out of bounds, 0 bytes past the end of 'out'.* \(addr2line, of binutils, would tell") as caught:
        kernel((1,), (33,), (zeros(32),))
    assert (caught.value.line, caught.value.array, caught.value.thread) == (None, "out", (32, 0, 0))


@pytest.mark.slow
def test_the_ziglang_wheel_compiles_both_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ziglang")
    monkeypatch.setenv("CUPAGED_CXX", f"{sys.executable} -m ziglang c++")
    out = zeros()
    for mode in MODES:
        launch("out[threadIdx.x] += 1.0f;", (out,), "float* out", mode=mode)
    assert out.sum() == 64
    with pytest.raises(KernelError, match=r"signed overflow in \*.* at k\.cu:2"):
        launch("out[0] = (float)(n * n);", (out, np.int32(70000)), "float* out, int n")
    with pytest.raises(KernelError, match=r"uninitialised 'x' .* at k\.cu:2"):
        launch("out[threadIdx.x] = x[threadIdx.x];", (out, empty(64)), "float* out, const float* x")
