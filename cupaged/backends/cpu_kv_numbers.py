"""KvKind: how one number of the paged cache is stored."""

from __future__ import annotations

from dataclasses import dataclass

from cupaged.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KvKind:
    """A width of stored numbers."""

    name: str
    index: int
    element_bytes: int

    @property
    def has_scales(self) -> bool:
        return self.name == "int8"


FLOAT32, BFLOAT16, FLOAT16, INT8 = KINDS = (KvKind("float32", 0, 4), KvKind("bfloat16", 1, 2), KvKind("float16", 2, 2), KvKind("int8", 3, 1))


def kind_of(name: str) -> KvKind:
    """The kind of a --kv-dtype; auto is float32."""
    kinds = {"auto": FLOAT32} | {kind.name: kind for kind in KINDS}
    if name not in kinds:
        raise ConfigError(f"keys and values cannot be kept as {name}: choose one of {', '.join(kinds)}")
    return kinds[name]
