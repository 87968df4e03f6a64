"""Case: one thing to check or to measure. A part is a list of them; a run goes through parts until its seconds are over.

A case that fails stops nobody: it becomes a line of the result, and the next one runs.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cupaged.errors import CupagedError

Figures = dict[str, Any]
Parts = Mapping[str, Callable[[], Iterable["Case"]]]
"""Name -> what lists its cases; listing is cheap, running is not."""


class Failure(Exception):
    """A check found something wrong."""


class Skip(Exception):
    """A case cannot run here; why."""


@dataclass(frozen=True)
class Case:
    """`run` gives figures, or raises: Failure, Skip, or whatever goes wrong."""

    name: str
    run: Callable[[], Figures]


@dataclass
class Result:
    """status: ok, failed, skipped, or cut (the seconds were over)."""

    part: str
    case: str
    status: str
    seconds: float = 0.0
    message: str = ""
    figures: Figures = field(default_factory=dict)

    def as_json(self) -> Figures:
        return asdict(self)


class Budget:
    """Seconds that a run may take; checked before every case, so the last one may pass the end by its own length."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()


def run_parts(parts: Parts, chosen: Iterable[str], budget: Budget) -> list[Result]:
    """Run the cases of the chosen parts, telling what is being done on stderr."""
    results: list[Result] = []
    for part in chosen:
        try:
            cases = list(parts[part]())
        except Skip as reason:
            results.append(Result(part, "all", "skipped", message=str(reason)))
            continue
        except Exception as error:  # a part that cannot even list its cases is one failed case
            results.append(_failed(part, "all", error, 0.0))
            continue
        for done, case in enumerate(cases):
            if budget.left <= 0:
                results.append(Result(part, f"{len(cases) - done} of {len(cases)} cases", "cut", message="the budget was spent"))
                break
            tell(f"{part}: {case.name}")
            results.append(_run(part, case))
    return results


def _run(part: str, case: Case) -> Result:
    started = time.monotonic()
    try:
        figures = case.run()
    except Skip as reason:
        return Result(part, case.name, "skipped", time.monotonic() - started, str(reason))
    except Exception as error:  # the run goes on, whatever a device or a peer raises
        return _failed(part, case.name, error, time.monotonic() - started)
    return Result(part, case.name, "ok", time.monotonic() - started, figures=figures)


def _failed(part: str, name: str, error: Exception, seconds: float) -> Result:
    expected = isinstance(error, (Failure, CupagedError))
    text = str(error) if expected else f"{type(error).__name__}: {error}"
    if not expected:
        traceback.print_exception(error)
    tell(f"FAILED {part}: {name}: {text}")
    return Result(part, name, "failed", seconds, text)


def tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
