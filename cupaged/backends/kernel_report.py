"""What a kernel takes of a GPU, and how many of its blocks a multiprocessor runs at once. No GPU is needed."""

from __future__ import annotations

from dataclasses import dataclass

from cupaged.backends.kernel_specs import variants
from cupaged.backends.launch import C_TYPES, KernelSpec, Variant
from cupaged.backends.nvrtc import Resources, compile_variant
from cupaged.backends.occupancy import Occupancy, occupancy

ASSUMED = {"head_dim": 128}
"""For dynamic shared memory that depends on what is no macro of the kernel's."""


@dataclass(frozen=True, slots=True)
class Report:
    """A variant compiled for an architecture. `dynamic_bytes`: of shared memory, beside the static of `used`."""

    variant: Variant
    architecture: str
    used: Resources
    dynamic_bytes: int
    occupancy: Occupancy


def typical(spec: KernelSpec) -> Variant:
    """The variant that most large models want: bfloat16 wherever that is a choice, and the largest number of every macro."""

    def rank(variant: Variant) -> tuple[int, list[int]]:
        return sum(value == C_TYPES["bfloat16"] for _, value in variant.macros), list(numbers(variant).values())

    return max(variants(spec), key=rank)


def numbers(variant: Variant) -> dict[str, int]:
    """The macros that are numbers, under the names of the declaration's symbols."""
    return {name.lower(): int(value) for name, value in variant.macros if value.isdigit()}


def report(spec: KernelSpec, variant: Variant, architecture: str) -> Report:
    """Compile and count. Raises BackendError with the compiler's log."""
    used = compile_variant(variant, architecture)
    dynamic = spec.shared_bytes(ASSUMED | numbers(variant))
    return Report(variant, architecture, used, dynamic, occupancy(architecture, spec.block, used.registers, used.shared_bytes + dynamic))
