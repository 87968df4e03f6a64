"""Fields: a JSON object's values, read by name with a check of their type. null counts as absent."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, overload

from cupaged.errors import CheckpointError

_LARGEST = 2**63 - 1
"""No count in a model is larger; one that is would not fit where it is used."""


@dataclass(frozen=True)
class Fields:
    """`origin` names the object in errors; every reader raises CheckpointError for a value of the wrong type."""

    origin: str
    values: Mapping[str, Any]

    def whole(self, name: str) -> int | None:
        """A whole number."""
        value = self.number(name)
        if value is None:
            return None
        if value != int(value) or abs(value) > _LARGEST:
            raise CheckpointError(f"{self.origin}: {name} must be a whole number of at most 64 bits, not {value!r}")
        return int(value)

    @overload
    def number(self, name: str) -> float | None: ...

    @overload
    def number(self, name: str, default: float) -> float: ...

    def number(self, name: str, default: float | None = None) -> float | None:
        """A finite number."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
            raise CheckpointError(f"{self.origin}: {name} must be a number, not {value!r}")
        return value

    def flag(self, name: str) -> bool | None:
        """true or false."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{self.origin}: {name} must be true or false, not {value!r}")
        return value

    def required(self, name: str) -> int:
        """A whole number that must be there."""
        value = self.whole(name)
        if value is None:
            raise CheckpointError(f"{self.origin} lacks {name}")
        return value

    def token_ids(self, name: str) -> tuple[int, ...] | None:
        """One token id or a list of them."""
        value = self.values.get(name)
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise CheckpointError(f"{self.origin}: {name} must be a token id or a list of them, not {value!r}")
        return tuple(dict.fromkeys(ids))
