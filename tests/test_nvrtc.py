"""The kernels compile for every GPU, without one, and none is slow by construction: no spills, no surprise in registers."""

from __future__ import annotations

import functools
from itertools import combinations

import pytest

from cupaged.backends import nvrtc
from cupaged.backends.kernel_specs import SPECS, variants
from cupaged.backends.launch import KernelSpec, Variant, scalar
from cupaged.backends.nvrtc import ARCHITECTURES, Resources
from cupaged.errors import BackendError
from tests.support.kernels import skip_without_nvrtc


@pytest.fixture(scope="module")
def _nvrtc() -> None:
    skip_without_nvrtc()


compiles = pytest.mark.usefixtures("_nvrtc")


Choice = tuple[str, str, Variant]


def pairs(choice: Choice) -> set[frozenset[object]]:
    """Every two of a variant's architecture and macros; the architecture alone where there are no macros."""
    name, architecture, variant = choice
    return {frozenset((name, *pair)) for pair in combinations([architecture, *variant.macros], 2)} or {frozenset((name, architecture))}


def everything(spec: KernelSpec) -> list[Choice]:
    return [(spec.name, architecture, variant) for variant in variants(spec) for architecture in ARCHITECTURES]


@functools.cache
def chosen() -> list[Choice]:
    """Few variants of each kernel in which every two of architecture and macros meet."""
    cases: list[Choice] = []
    for spec in SPECS.values():
        candidates = everything(spec)
        missing = set().union(*map(pairs, candidates))
        while missing:
            best = max(candidates, key=lambda choice: len(pairs(choice) & missing))
            missing -= pairs(best)
            cases.append(best)
    return cases


def test_every_kernel_has_variants_and_none_twice() -> None:
    for spec in SPECS.values():
        all_of_it = list(variants(spec))
        assert 0 < len(set(all_of_it)) == len(all_of_it)
    assert len(list(variants(SPECS["gather_rows"]))) == 9
    assert len(list(variants(SPECS["rope_and_cache"]))) == 6  # keys and values as activations are, or in 8 bits


def test_the_choice_is_pairwise_and_small() -> None:
    wanted = set().union(*(pairs(choice) for spec in SPECS.values() for choice in everything(spec)))
    assert set().union(*map(pairs, chosen())) == wanted
    assert len(chosen()) < sum(len(everything(spec)) for spec in SPECS.values()) / 2


@compiles
@pytest.mark.parametrize(("name", "architecture", "variant"), chosen(), ids=lambda value: value if isinstance(value, str) else "-".join(v for _, v in value.macros))
def test_a_variant_compiles_and_keeps_to_its_registers(name: str, architecture: str, variant: Variant) -> None:
    used = nvrtc.compile_variant(variant, architecture)
    assert nvrtc.complaints(SPECS[name], used) == [], variant


@compiles
def test_an_error_of_the_compiler_names_file_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels_cu.source", lambda name: '#line 7 "bad.cu"\nextern "C" __global__ void k() { int x = y; }\n')
    with pytest.raises(BackendError, match=r'(?s)^bad.cu does not compile for sm_80:\nbad.cu\(7\): error: identifier "y" is undefined'):
        nvrtc.compile_variant(Variant("bad.cu", "k", ()), "sm_80")


def test_complaints_name_spills_and_registers() -> None:
    spec = KernelSpec("k", "", scalar("n"), grid="n", block=32, registers=40)
    assert nvrtc.complaints(spec, Resources(40, 0, 0, 100)) == []
    assert nvrtc.complaints(spec, Resources(41, 16, 8, 0)) == ["16 bytes of local memory, 8 spilled", "41 registers, 40 declared"]


def test_without_cupy_there_is_a_reason_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "nvrtc", None)
    reason = nvrtc.missing()
    assert reason is not None
    assert reason.startswith("no CuPy: pip install cupy-cuda12x")
