"""Case: one check with one choice of its values; and the list of them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from cupaged.errors import ConfigError, CupagedError, InvariantError

if TYPE_CHECKING:
    from cupaged.conformance.subject import Subject

C = TypeVar("C", bound=Callable[..., None])

_cases: list[Case] = []


class Mismatch(AssertionError):
    """A backend computed something else than the operation's definition says."""


@dataclass(frozen=True)
class Case:
    """`function` is the check, `values` its arguments beside the subject; `operation` a method of Backend."""

    operation: str
    function: Callable[..., None]
    values: dict[str, Any]

    def __str__(self) -> str:
        chosen = ", ".join(f"{name} {value}" for name, value in self.values.items())
        return f"{self.operation}: {self.function.__name__.replace('_', ' ')}" + (f" ({chosen})" if chosen else "")

    def run(self, subject: Subject) -> None:
        """Raises Mismatch for a wrong result, and lets through what the backend raises."""
        self.function(subject, **self.values)


def check(operation: str, **values: Sequence[Any]) -> Callable[[C], C]:
    """Make a case of the decorated function for every combination of these values."""

    def register(function: C) -> C:
        _cases.extend(Case(operation, function, dict(zip(values, chosen, strict=True))) for chosen in product(*values.values()))
        return function

    return register


def operations() -> list[str]:
    """The names that `cases` knows, sorted."""
    return sorted({case.operation for case in _cases})


def cases(names: Sequence[str] = ()) -> list[Case]:
    """The cases of these operations; of all without a name. Raises ConfigError for an unknown one, naming the known."""
    unknown = [name for name in names if name not in operations()]
    if unknown:
        raise ConfigError(f"there is no operation {', '.join(map(repr, unknown))}; there are {', '.join(operations())}")
    return [case for case in _cases if not names or case.operation in names]


def failure(case: Case, subject: Subject) -> str | None:
    """Run a case: None if it passes, else what went wrong, in a line."""
    try:
        case.run(subject)
    except (Mismatch, CupagedError) as error:
        return str(error).splitlines()[0]
    except Exception as error:  # whatever a backend may do wrong is what the case is there to find
        return f"{type(error).__name__}: {error}"
    return None


# ---- what checks say it with


def expect(condition: object, message: str) -> None:
    if not condition:
        raise Mismatch(message)


def expect_equal(actual: npt.NDArray[Any], expected: npt.NDArray[Any], what: str) -> None:
    """Every bit of two arrays of one shape."""
    expect(actual.shape == expected.shape, f"{what}: shape {list(actual.shape)} instead of {list(expected.shape)}")
    expect(actual.tobytes() == expected.tobytes(), f"{what} differs from what it must be")


def expect_close(actual: npt.NDArray[Any], expected: npt.NDArray[Any], tolerance: float) -> None:
    """Finite numbers, none further off than `tolerance` times the largest expected one."""
    expect(actual.shape == expected.shape, f"shape {list(actual.shape)} instead of {list(expected.shape)}")
    wide = actual.astype(np.float64)
    largest = float(np.abs(expected).max(initial=1e-30))
    wrong = ~(np.abs(wide - expected) <= tolerance * largest)  # a NaN is wrong
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise Mismatch(f"{np.count_nonzero(wrong)} of {wrong.size} numbers are wrong, the first at {list(at)}: {wide[at]:.6g} instead of {expected[at]:.6g}")


@contextmanager
def expect_refusal(word: str) -> Iterator[None]:
    """An InvariantError whose message has the word."""
    try:
        yield
    except InvariantError as error:
        expect(word in str(error), f"the refusal {str(error)!r} does not speak of the {word}")
    else:
        raise Mismatch(f"a wrong {word} is not refused")
