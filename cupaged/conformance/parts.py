"""Which cases run in which types of a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cupaged.conformance.case import Case, cases

_KERNELS = (("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "fp8"))
STORED_TYPES: dict[str, tuple[tuple[str, str], ...]] = {
    "reference": (("float32", "float32"),),
    "cpu": (("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "int8")),
    "emu": _KERNELS,
    "cuda": _KERNELS,
}
"""Of every device the types that are checked: what weights (and a kernel's activations) are kept in, and keys and values."""

_OF_NO_TYPE = {"beam_candidates", "likeliest", "load_vector", "sample", "set_batch", "token_logprobs"}
_OF_THE_CACHE = {"attention", "copy_blocks", "new_kv_cache", "rope_and_cache", "swap_blocks"}


@dataclass(frozen=True)
class Part:
    """Cases to run on a device in one choice of types."""

    dtype: str
    kv_dtype: str
    cases: list[Case]

    def __str__(self) -> str:
        return self.dtype if self.dtype == self.kv_dtype else f"{self.dtype}, {self.kv_dtype} keys and values"


def plan(device: str, names: Sequence[str] = ()) -> list[Part]:
    """The cases of these operations (all without a name) on a device of STORED_TYPES.

    Operations that know neither type run once; where only the type of keys and values is new, those of the cache run.
    Raises ConfigError for an unknown operation.
    """
    parts, seen = [], set[str]()
    for dtype, kv_dtype in STORED_TYPES[device]:
        chosen = cases(names)
        if seen:
            chosen = [c for c in chosen if (c.operation in _OF_THE_CACHE if dtype in seen else c.operation not in _OF_NO_TYPE)]
        seen.add(dtype)
        if chosen:
            parts.append(Part(dtype, kv_dtype, chosen))
    return parts
