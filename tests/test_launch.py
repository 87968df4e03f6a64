"""KernelSpec: what it binds, what it refuses and in which words, and that it says what the .cu file says."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kernels_cu
from cupaged.backends.kernel_specs import SPECS
from cupaged.backends.launch import C_TYPES, MACRO_TYPES, KernelSpec, Parameter, read, scalar, write
from cupaged.errors import InvariantError

SPEC = KernelSpec(
    "scale", "out = factor * x in tiles",
    read("x", "ACT_T", "rows, heads * width"),
    read("weight", "float32", "width"),
    write("out", "KV_T", "rows, heads * width"),
    scalar("rows"),
    scalar("heads"),
    scalar("factor", "float32"),
    grid="ceil_div(rows, 2), heads", block=64, shared="4 * width", macros={"width": (4, 5)},
)  # fmt: skip


def arguments(**changes: Any) -> dict[str, Any]:
    x = np.zeros((5, 12), np.float32)
    return {"x": x, "weight": np.zeros(4, np.float32), "out": x.copy(), "heads": 3, "factor": 2} | changes


def test_shapes_fill_in_the_symbols_and_arguments_come_in_the_kernels_order_and_width() -> None:
    given = arguments(out=np.zeros((5, 12), ml_dtypes.bfloat16))
    launch = SPEC.bind(**given)
    assert launch.grid == (3, 3)
    assert launch.block == (64,)
    assert launch.shared_bytes == 16
    assert launch.variant.options == ("-DACT_T=float", "-DKV_T=__nv_bfloat16", "-DWIDTH=4")
    assert launch.variant.source == "scale.cu"
    assert all(bound is given[name] for bound, name in zip(launch.arguments, ("x", "weight", "out"), strict=False))
    assert [(type(a), a) for a in launch.arguments[3:]] == [(np.int32, 5), (np.int32, 3), (np.float32, 2.0)]
    assert not launch.is_empty


def test_no_rows_are_an_empty_launch() -> None:
    empty = np.zeros((0, 12), np.float32)
    assert SPEC.bind(**arguments(x=empty, out=empty)).is_empty


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.zeros((5, 12), np.float64)}, r"scale wants x ACT_T \[rows, heads \* width\] \(float32 or float16 or bfloat16, .*; got float64 \[5, 12\]"),
        ({"weight": np.zeros(4, np.int32)}, r"scale wants weight float32 \[width\].*; got int32 \[4\]"),
        ({"weight": np.zeros((4, 1), np.float32)}, r"scale wants weight float32 \[width\].*; got float32 \[4, 1\]"),
        ({"weight": np.zeros(5, np.float32)}, r"scale wants x ACT_T \[rows, heads \* width\] .* with heads = 3, rows = 5, width = 5; got float32 \[5, 12\]"),
        ({"out": np.zeros((6, 12), np.float32)}, r"scale wants out KV_T .*float8_e4m3fn.* with heads = 3, rows = 5, width = 4; got float32 \[6, 12\]"),
        ({"out": np.zeros((5, 24), np.float32)[:, ::2]}, r"scale: out KV_T \[rows, heads \* width\] must be contiguous; its strides are \(96, 8\)"),
        ({"weight": [1.0] * 4}, r"scale wants weight float32 \[width\].*; got list"),
        ({"factor": "2"}, r"scale wants factor float32; got '2'"),
        ({"heads": 2**31}, r"scale wants x "),
        ({"bias": 1}, r"scale does not take bias"),
        ({"x": np.zeros((5, 9), np.float32), "out": np.zeros((5, 9), np.float32), "weight": np.zeros(3, np.float32)}, r"scale is built for width 4, 5; not 3$"),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_wanted(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvariantError, match=f"^{message}"):
        SPEC.bind(**arguments(**changes))


def test_a_missing_argument_is_named() -> None:
    given = arguments()
    del given["weight"], given["factor"]
    with pytest.raises(InvariantError, match=r"^scale lacks factor, weight$"):
        SPEC.bind(**given)


def test_numbers_that_do_not_fit_are_refused() -> None:
    spec = KernelSpec("s", "", scalar("n"), scalar("m", "int64"), grid="1", block=32)
    assert spec.bind(n=-(2**31), m=2**40).arguments == (np.int32(-(2**31)), np.int64(2**40))
    for wrong in (2**31, 1.0, None):
        with pytest.raises(InvariantError, match=r"^s wants n int32; got"):
            spec.bind(n=wrong, m=0)


def test_a_grid_that_is_too_large_is_refused() -> None:
    spec = KernelSpec("s", "", scalar("n"), grid="1, n", block=32)
    assert spec.bind(n=65535).grid == (1, 65535)
    with pytest.raises(InvariantError, match=r"^s: n = 65536 blocks, more than the 65535 of a grid$"):
        spec.bind(n=65536)


def test_types_of_one_macro_must_be_the_same() -> None:
    spec = KernelSpec("s", "", read("a", "ACT_T", "n"), read("b", "ACT_T", "n"), grid="n", block=32)
    with pytest.raises(InvariantError, match=r"^s wants b ACT_T \[n\] .*the same wherever it stands"):
        spec.bind(a=np.zeros(2, np.float32), b=np.zeros(2, np.float16))


def test_a_spec_is_its_own_documentation() -> None:
    assert str(SPEC).splitlines() == [
        "scale<<<(ceil_div(rows, 2), heads), 64>>>  out = factor * x in tiles",
        "    reads  x ACT_T [rows, heads * width]",
        "    reads  weight float32 [width]",
        "    writes out KV_T [rows, heads * width]",
        "    scalar rows int32",
        "    scalar heads int32",
        "    scalar factor float32",
    ]


# ---- the declarations against the sources

KERNEL = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(([^)]*)\)')


def spelled(p: Parameter) -> str:
    """The parameter as the .cu file must declare it, without __restrict__."""
    ctype = p.dtype if p.dtype in MACRO_TYPES else C_TYPES[p.dtype]
    if p.shape is None:
        return f"{ctype} {p.name}"
    return f"{ctype}* {p.name}" if p.written else f"const {ctype}* {p.name}"


def test_every_kernel_has_a_spec_and_every_spec_says_what_the_kernel_says() -> None:
    declared = {}
    for file in kernels_cu.names():
        for name, parameters in KERNEL.findall(kernels_cu.source(file)):
            declared[name] = (file, [" ".join(p.replace("__restrict__", "").split()) for p in parameters.split(",")])
    assert {name: (s.source, [spelled(p) for p in s.parameters]) for name, s in SPECS.items()} == declared


def test_blocks_are_as_large_as_the_kernels_promise_to_the_compiler() -> None:
    for spec in SPECS.values():
        text = kernels_cu.source(spec.source)
        bounds = re.search(rf"__launch_bounds__\((\w+)[^)]*\) {spec.name}\(", text)
        if bounds:
            value = bounds[1] if bounds[1].isdigit() else re.search(rf"\b{bounds[1]} = (\d+)", text)[1]
            assert spec.block == int(value)


def test_a_source_has_its_headers_inlined_under_their_own_names() -> None:
    for file in kernels_cu.names():
        lines = kernels_cu.source(file).splitlines()
        assert lines[0] == f'#line 1 "{file}"'
        assert '#line 1 "device.cuh"' in lines
        assert not any(line.startswith('#include "') for line in lines)
        assert sum(line == '#line 1 "device.cuh"' for line in lines) == 1
    with pytest.raises(FileNotFoundError):
        kernels_cu.source("none.cu")


def test_kernels_leave_to_the_header_what_only_the_header_may_say() -> None:
    for file in kernels_cu.names():
        own = kernels_cu.source(file).split(f'"{file}"\n')[-1]
        for word in ("asm", "__shared__", "#include", "#ifdef", "#if ", "reinterpret_cast"):
            assert word not in own, f"{file}: {word}"
