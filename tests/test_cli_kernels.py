"""`cupaged kernels`: the list, the conformance cases, and a kernel of one's own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import ml_dtypes  # noqa: F401  # gives NumPy bfloat16
import numpy as np
import pytest

import kernels_cu
from cupaged.backends import kernel_report, nvrtc
from cupaged.backends.kernel_specs import SPECS, variants
from cupaged.backends.launch import Variant
from cupaged.backends.nvrtc import Resources
from cupaged.cli.main import run
from cupaged.conformance import STORED_TYPES
from cupaged.errors import BackendError
from tests.support.kernels import skip_without_compiler, skip_without_nvrtc

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run `cupaged kernels ARGS`: exit code, stdout, stderr."""

    def call(*args: str) -> tuple[int, str, str]:
        code = run(["kernels", *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


# ---- the list


def test_without_cudas_compiler_the_list_has_no_figures_and_says_how_to_get_them(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "missing", lambda: "no CuPy: pip install it")
    code, out, err = cli()
    assert code == 0
    assert err == "registers, shared memory and occupancy need CUDA's compiler, but no GPU: no CuPy: pip install it\n"
    assert re.findall(r"^(\w+)  ", out, re.MULTILINE) == ["kernel", *SPECS]
    assert "out[r] = table[rows[r]]" in out
    rows = [json.loads(line) for line in cli("--json")[1].splitlines()]
    assert [row["kernel"] for row in rows] == list(SPECS)
    assert all(set(row) == {"kernel", "about", "source", "macros", "block_threads"} for row in rows)


def compiled(variant: Variant, architecture: str) -> Resources:
    """Stands for CUDA's compiler."""
    if variant.kernel == "rms_norm" and architecture == "sm_86":
        raise BackendError("rms_norm.cu does not compile for sm_86:\nrms_norm.cu(3): error: no")
    return Resources(registers=64, local_bytes=8, spilled_bytes=12, shared_bytes=1000)


@pytest.fixture
def _compiler_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "missing", lambda: None)
    monkeypatch.setattr(kernel_report, "compile_variant", compiled)


@pytest.mark.usefixtures("_compiler_of_cuda")
def test_figures_of_a_variant_for_every_architecture(cli: Cli) -> None:
    code, out, _ = cli("--arch", "sm_80", "--arch", "sm_90")
    assert code == 0
    (lines,) = re.findall(r"paged_decode .*\n.*\n", out)
    assert re.sub(" +", " ", lines).splitlines() == [
        "paged_decode sm_80 64 1000+98304 12 1 4/64 shared ",
        "decode attention on sm_90 64 1000+98304 12 2 8/64 shared ",
    ]
    assert "KV_T bf16, HEAD_DIM" in out


@pytest.mark.usefixtures("_compiler_of_cuda")
def test_figures_as_json(cli: Cli) -> None:
    rows = [json.loads(line) for line in cli("--arch", "sm_90", "--json")[1].splitlines()]
    assert [row["kernel"] for row in rows] == list(SPECS)
    (row,) = (row for row in rows if row["kernel"] == "paged_attention_v1")
    assert row == {
        "kernel": "paged_attention_v1",
        "about": SPECS["paged_attention_v1"].about,
        "source": "paged_attention_v1.cu",
        "macros": {"ACT_T": "__nv_bfloat16", "KV_T": "__nv_bfloat16"},
        "block_threads": 128,
        "architecture": "sm_90",
        "registers": 64,
        "static_shared_bytes": 1000,
        "dynamic_shared_bytes": 4 * (2 * 128 + 128),
        "local_bytes": 8,
        "spilled_bytes": 12,
        "blocks_per_multiprocessor": 8,
        "warps_per_multiprocessor": 32,
        "occupancy": 0.5,
        "limited_by": "registers",
    }
    every = [json.loads(line) for line in cli("--arch", "sm_90", "--all", "--json")[1].splitlines()]
    assert len(every) == sum(len(list(variants(spec))) for spec in SPECS.values())


@pytest.mark.usefixtures("_compiler_of_cuda")
def test_a_kernel_that_does_not_compile_is_told_after_the_others(cli: Cli) -> None:
    code, out, err = cli("--arch", "sm_86")
    assert code == 1
    assert re.search(r"rms_norm +sm_86 +-.*does not compile", out)
    assert "silu_mul" in out
    assert err.endswith("error: rms_norm.cu does not compile for sm_86:\nrms_norm.cu(3): error: no\n")


def test_the_typical_variant_is_bfloat16_with_the_largest_heads() -> None:
    assert kernel_report.typical(SPECS["paged_decode"]).options == ("-DKV_T=__nv_bfloat16", "-DHEAD_DIM=128", "-DPAGED=1", "-DSTAGES=3")
    assert kernel_report.typical(SPECS["count_tokens"]).options == ()


def test_figures_of_cudas_own_compiler(cli: Cli) -> None:
    skip_without_nvrtc()
    code, out, err = cli("--arch", "sm_90", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, [row["kernel"] for row in rows]) == (0, list(SPECS)), err
    assert all(0 < row["registers"] <= SPECS[row["kernel"]].registers and row["spilled_bytes"] == 0 for row in rows)
    decode = next(row for row in rows if row["kernel"] == "paged_decode")
    assert decode["blocks_per_multiprocessor"] == 2  # as its grid is planned


def test_options_of_the_list_do_not_go_with_a_command(cli: Cli) -> None:
    code, _, err = cli("--json", "check")
    assert code == 2
    assert "--arch, --all and --json belong to the list; check does not take them" in err


# ---- check


def test_a_device_that_computes_right_passes(cli: Cli) -> None:
    code, out, _ = cli("check", "--device", "reference", "linear", "sample")
    assert code == 0
    assert re.fullmatch(r"\d+ checks of reference in \d+ s: all passed\n", out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("softmax",), r"^error: there is no operation 'softmax'; there are attention, .*, token_logprobs$"),
        (("--device", "tpu"), r"'tpu' is not one of 'reference', 'cpu', 'emu', 'cuda'"),
    ],
)
def test_what_cannot_be_checked_is_wrong_usage(cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = cli("check", *arguments)
    assert (code, out) == (2, "")
    assert re.search(message, err, re.MULTILINE)


def test_a_device_that_is_not_there_is_one_line(cli: Cli) -> None:
    code, out, err = cli("check", "--device", "cuda", "load_vector")
    if code == 0:
        pytest.skip("a GPU is there")
    assert code in (1, 2)
    assert out == ""
    assert re.fullmatch(r"error: .*(cuda|CUDA|CuPy|GPU).*\n", err)


PLANTED = {
    "wrong result": ("silu_mul.cu", "1.0f + expf(-x)", "1.0f + expf(x)", "linear_silu_mul", "numbers are wrong"),
    "one too many": ("rms_norm.cu", "i < width; i += blockDim.x) out[", "i <= width; i += blockDim.x) out[", "rms_norm", "rms_norm: .*out of bounds"),
    "race": ("plain_prefill.cu", "__syncthreads();  // the last tile", "// the last tile", "attention", "races"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_bug_planted_in_a_kernel_is_found(cli: Cli, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_compiler()
    file, good, bad, operation, message = PLANTED[bug]
    honest: Callable[[str], str] = kernels_cu.source
    assert good in honest(file)
    monkeypatch.setattr(kernels_cu, "source", lambda name: honest(name).replace(good, bad) if name == file else honest(name))
    monkeypatch.setitem(STORED_TYPES, "emu", (("float32", "float32"),))
    code, out, _ = cli("check", operation)
    assert code == 1
    *failures, last = out.splitlines()
    assert 0 < len(failures) <= 20
    assert re.search(message, failures[0])
    assert re.fullmatch(r"\d+ checks of emu in \d+ s: \d+ failed", last)


# ---- run

SAXPY = """\
#include "device.cuh"

extern "C" __global__ void saxpy(const float* x, float* y, float a, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i] + y[i];
}
"""
ARGUMENTS = ("--grid", "4", "--block", "256", "--arg", "x=f32[1000]", "--arg", "y=f32[1000]:ones", "--arg", "a=2", "--arg", "n=i32:1000")


@pytest.fixture
def saxpy(tmp_path: Path) -> Path:
    skip_without_compiler()
    path = tmp_path / "saxpy.cu"
    path.write_text(SAXPY, encoding="utf-8")
    return path


def test_a_kernel_shows_and_saves_what_it_wrote(cli: Cli, saxpy: Path, tmp_path: Path) -> None:
    code, out, err = cli("run", str(saxpy), *ARGUMENTS, "--save", str(tmp_path / "out"))
    assert (code, err) == (0, "")
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    y = np.load(tmp_path / "out" / "y.npy")
    assert np.array_equal(y, 2 * x + 1)
    assert not (tmp_path / "out" / "x.npy").exists()
    head, numbers, last = out.splitlines()
    assert head == "y  float32 [1000]"
    assert numbers.startswith(f"  [ {y[0]:.5f}") or f"{y[0]:.4f}" in numbers
    assert last == "saxpy: no rule was broken"


def test_another_seed_gives_other_numbers_and_every_schedule_the_same(cli: Cli, saxpy: Path) -> None:
    def shown(*more: str) -> str:
        code, out, _ = cli("run", str(saxpy), "saxpy", *ARGUMENTS, *more)
        assert code == 0
        return out.splitlines()[1]

    assert shown() != shown("--seed", "1")
    assert len({shown("--schedule", schedule) for schedule in ("forward", "reverse", "depth", "random")} | {shown("--mode", "fast")}) == 1


def test_a_broken_rule_is_one_line_with_its_place(cli: Cli, saxpy: Path) -> None:
    saxpy.write_text(SAXPY.replace("if (i < n) ", ""), encoding="utf-8")
    code, out, err = cli("run", str(saxpy), *ARGUMENTS)
    assert (code, out) == (1, "")
    assert re.fullmatch(r"error: saxpy: 4-byte read out of bounds, .*'x'.* at saxpy\.cu:5.*, block \(3, 0, 0\) thread \(232, 0, 0\)\n", err)


def test_a_text_that_does_not_compile_shows_the_log_and_the_line(cli: Cli, saxpy: Path) -> None:
    saxpy.write_text(SAXPY.replace("float* y", "floot* y"), encoding="utf-8")
    code, _, err = cli("run", str(saxpy), *ARGUMENTS)
    assert code == 1
    assert re.match(r"error: saxpy\.cu does not compile: saxpy\.cu:3: .*floot.*\n     3 \| extern .*floot\* y", err)


def test_elements_that_nobody_wrote_are_counted(cli: Cli, saxpy: Path) -> None:
    saxpy.write_text(SAXPY.replace("+ y[i]", "").replace("float* y", "TYPE* y"), encoding="utf-8")
    for macro, dtype in (("float", "f32"), ("unsigned char", "u8")):
        code, out, _ = cli("run", str(saxpy), "-D", f"TYPE={macro}", "--arg", "x=f32[40]:ones", "--arg", f"y={dtype}[40]:empty", "--arg", "a=1", "--arg", "n=30")
        assert code == 0
        assert "[40], 10 of them never written" in out


def test_arguments_of_every_kind(cli: Cli, tmp_path: Path) -> None:
    skip_without_compiler()
    path = tmp_path / "kinds.cu"
    path.write_text(
        '#include "device.cuh"\n'
        'extern "C" __global__ void other() {}\n'
        'extern "C" __global__ void kinds(const __nv_bfloat16* b, const int64_t* r, const float* nothing, float* out, double d, int n, bool yes) {\n'
        "  DYNAMIC_SHARED(float, room);\n"
        "  room[0] = 1.0f;\n"
        "  out[0] = to_float(b[1]) + r[3] + (nothing == nullptr) + d + n + (yes ? 1 : 0) + room[0];\n"
        "}\n",
        encoding="utf-8",
    )
    np.save(tmp_path / "b.npy", np.array([1, 2.5], np.float32))
    given = {"b": str(tmp_path / "b.npy"), "r": "i64[2,2]:range", "nothing": "none", "out": "f32[1]:empty", "d": "1e2", "n": "-7", "yes": "bool:1"}
    arguments = [word for name, value in given.items() for word in ("--arg", f"{name}={value}")]
    code, out, err = cli("run", str(path), "kinds", "--block", "1", "--shared", "4", *arguments)
    assert (code, err) == (0, "")
    assert out.splitlines()[1] == f"  [{2.5 + 3 + 1 + 100 - 7 + 1 + 1:g}]"
    code, _, err = cli("run", str(path), *arguments)
    assert code == 2
    assert "kinds.cu has several kernels, name one: other, kinds" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--arg", "x=f32[4]"], 2, "--arg y=... is missing; the kernel's parameters: const float32* x, float32* y, float32 a, int32 n"),
        (["--arg", "z=1", *ARGUMENTS], 2, "--arg z=... does not exist"),
        ([*ARGUMENTS, "--arg", "n=x"], 2, "n=x is none of f32[1024]"),
        ([*ARGUMENTS, "--arg", "n=1.5"], 2, "n=1.5: 1.5 is no int32"),
        ([*ARGUMENTS, "--arg", "n=99999999999"], 2, "99999999999 is no int32"),
        ([*ARGUMENTS, "--arg", "x=f31[4]"], 2, "there is no type f31; there are f32, f64"),
        ([*ARGUMENTS, "--arg", "x=f32[4]:full"], 2, "an array can be random, empty, zeros, ones, range; not full"),
        ([*ARGUMENTS, "--arg", "x=none.npy"], 2, "none.npy cannot be read as an array"),
        ([*ARGUMENTS, "--arg", "x=f16[1000]"], 1, "error: saxpy: parameter 'x' wants an array of float32, got an array of float16"),
        ([*ARGUMENTS, "--block", "2000"], 1, "error: saxpy: block (2000,) is not 1 to 3 sizes with a product of 1 to 1024"),
        ([*ARGUMENTS, "--block", "a"], 2, "'a' is not one to three whole numbers"),
        (["other", *ARGUMENTS], 1, "error: saxpy.cu has no kernel 'other'; it has saxpy"),
    ],
)
def test_wrong_arguments_are_named(cli: Cli, saxpy: Path, arguments: list[str], code: int, message: str) -> None:
    ended, out, err = cli("run", str(saxpy), *arguments)
    assert (ended, out) == (code, "")
    assert message in " ".join(err.split())
