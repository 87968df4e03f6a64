"""Every backend computes the same operations: the cases of cupaged.conformance on every device that is here, in every
type that it stores. The checks themselves are checked, too: a backend with a planted bug does not pass.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged import conformance
from cupaged.backends.reference import ReferenceBackend
from cupaged.conformance.case import Case, Mismatch, cases, failure, operations
from cupaged.conformance.paged import Paged
from cupaged.conformance.parts import Part, plan
from cupaged.conformance.subject import Subject
from cupaged.errors import ConfigError, InvariantError
from tests.support.kernels import skip_without_compiler, skip_without_gpu_device

DEVICES = ("reference", "cpu", "cpu crew", "emu")


@contextmanager
def opened(name: str, dtype: str = "float32", kv_dtype: str = "float32") -> Iterator[Subject]:
    """A backend by name; "cpu crew" hands even the smallest work to its three threads."""
    if name == "emu":
        skip_without_compiler()
    if name == "cuda":
        skip_without_gpu_device()
    with pytest.MonkeyPatch.context() as patch:
        if name == "cpu crew":
            patch.setattr("cupaged.backends.cpu.CREW_WORK", 0)
        yield _open(name.split()[0], dtype, kv_dtype, threads=3 if name == "cpu crew" else 1)


_open = functools.cache(conformance.open_subject)


@pytest.fixture(scope="module", autouse=True)
def _no_backend_outlives_the_module() -> Iterator[None]:
    yield
    _open.cache_clear()


EVERYWHERE = [(name, part, case) for name in DEVICES for part in plan(name.split()[0]) for case in part.cases]


@pytest.mark.parametrize(("name", "part", "case"), EVERYWHERE, ids=[f"{name}, {part}: {case}" for name, part, case in EVERYWHERE])
def test_conforms(name: str, part: Part, case: Case) -> None:
    with opened(name, part.dtype, part.kv_dtype) as subject:
        case.run(subject)


ON_A_GPU = [(part, operation) for part in plan("cuda") for operation in dict.fromkeys(case.operation for case in part.cases)]


@pytest.mark.gpu
@pytest.mark.parametrize(("part", "operation"), ON_A_GPU, ids=[f"cuda, {part}: {operation}" for part, operation in ON_A_GPU])
def test_conforms_on_a_gpu(part: Part, operation: str) -> None:
    """All cases of an operation at once: without a GPU there are some dozens of skips and not thousands."""
    with opened("cuda", part.dtype, part.kv_dtype) as subject:
        assert [f"{case}: {what}" for case in part.cases if case.operation == operation and (what := failure(case, subject))] == []


@st.composite
def paged_steps(draw: st.DrawFn) -> tuple[Paged, int]:
    count = draw(st.integers(1, 6))
    contexts = [draw(st.integers(1, 180)) for _ in range(count)]
    chunks = [draw(st.one_of(st.just(1), st.integers(1, c))) for c in contexts]
    paged = Paged(
        contexts, chunks,
        block_size=draw(st.sampled_from([1, 2, 3, 5, 8, 16, 31, 64, 256])),
        kv_heads=draw(st.integers(1, 4)), group=draw(st.integers(1, 16)), head_dim=2 * draw(st.integers(1, 40)),
        seed=draw(st.integers(0, 2**20)), padded=draw(st.integers(0, 2)),
    )  # fmt: skip
    return paged, draw(st.one_of(st.just(0), st.integers(1, 200)))


@pytest.mark.parametrize("name", [*DEVICES, pytest.param("cuda", marks=pytest.mark.gpu)])
def test_attention_on_any_mixed_step(name: str) -> None:
    with opened(name) as subject:

        @settings(max_examples=40, deadline=None, derandomize=True)
        @given(paged_steps())
        def check(step: tuple[Paged, int]) -> None:
            paged, window = step
            paged.check_attention(subject, window)

        check()


# ---- the suite itself


class Wrong(ReferenceBackend):
    """A backend with one bug: after `operation` the last number of one of its arrays is another one."""

    def __init__(self, operation: str, argument: str) -> None:
        super().__init__()
        honest = getattr(self, operation)

        def wrong(*args: object, **kwargs: object) -> object:
            given = inspect.signature(honest).bind(*args, **kwargs).arguments
            answer = honest(*args, **kwargs)
            array = given[argument] if argument else answer[0] if isinstance(answer, tuple) else answer
            if isinstance(array, np.ndarray) and array.size:
                array.reshape(-1)[-1] += 1
            return answer

        setattr(self, operation, wrong)


@pytest.mark.parametrize(
    ("operation", "argument"),
    [
        ("linear", "out"), ("linear", "x"), ("linear_add", "out"), ("linear_silu_mul", "out"), ("embedding", "out"), ("gather_rows", "out"),
        ("rms_norm", "out"), ("rms_norm", "x"), ("norm_linear", "out"), ("norm_linear", "x"), ("norm_linear_silu_mul", "out"), ("head_rms_norm", "qkv"), ("rope_and_cache", "qkv"), ("rope_and_cache", "value_cache"),
        ("attention", "out"), ("attention", "qkv"), ("attention", "key_cache"), ("copy_blocks", "key_cache"), ("load_vector", ""),
        ("sample", ""), ("likeliest", "out"), ("token_logprobs", ""), ("beam_candidates", ""),
    ],
)  # fmt: skip
def test_a_wrong_number_is_found(operation: str, argument: str) -> None:
    subject = Subject(Wrong(operation, argument))
    assert any(failure(case, subject) for case in cases([operation]))


@pytest.mark.parametrize("operation", operations())
def test_an_operation_that_does_nothing_is_found(operation: str) -> None:
    subject = Subject(ReferenceBackend())
    setattr(subject.backend, operation, lambda *_, **__: None)
    found = [failure(case, subject) for case in cases([operation])]
    assert any(found)
    assert all("\n" not in message for message in found if message)


def test_every_operation_of_a_step_has_cases() -> None:
    without = {"memory", "empty", "upload", "download", "download_later", "new_batch", "load_gate_up", "load_embedding", "new_swap_space", "set_history"}  # others use them
    public = {name for name in vars(ReferenceBackend) if not name.startswith("_") and callable(getattr(ReferenceBackend, name))}
    assert set(operations()) == public - without


def test_cases_are_chosen_by_operation_and_an_unknown_one_is_named() -> None:
    assert {case.operation for case in cases(["linear", "sample"])} == {"linear", "sample"}
    assert len({str(case) for case in cases()}) == len(cases()) > 600
    with pytest.raises(ConfigError, match=r"^there is no operation 'softmax'; there are attention, .*copy_blocks, .*token_logprobs$"):
        cases(["softmax"])


def test_a_plan_repeats_no_operation_in_types_that_it_does_not_know() -> None:
    in_types = {str(part): {case.operation for case in part.cases} for part in plan("emu")}
    assert list(in_types) == ["float32", "float16", "bfloat16", "float32, fp8 keys and values"]
    assert in_types["float32"] == set(operations())
    assert set(operations()) - in_types["float16"] == {"beam_candidates", "likeliest", "load_vector", "sample", "set_batch", "token_logprobs"}
    assert in_types["float32, fp8 keys and values"] == {"attention", "copy_blocks", "new_kv_cache", "rope_and_cache", "swap_blocks"}
    assert [str(part) for part in plan("emu", ["sample"])] == ["float32"]


@pytest.mark.parametrize(("error", "line"), [(Mismatch("a\nb"), "a"), (InvariantError("c"), "c"), (IndexError("d"), "IndexError: d")])
def test_a_failure_says_what_is_wrong_in_a_line(error: Exception, line: str) -> None:
    def run(subject: Subject) -> None:
        raise error

    assert failure(Case("linear", run, {}), Subject(ReferenceBackend())) == line
