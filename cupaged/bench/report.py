"""A benchmark's result as values: what was expected, tables and plots of what came, and the verdict."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from typing import Any

from cupaged._version import __version__

Cell = str | int | float


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header; units stand in the header."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def text_rows(self) -> list[list[str]]:
        """Cells as they are shown: whole numbers with their thousands marked, others with three significant digits."""
        return [[shown_cell(cell) for cell in row] for row in self.rows]


def shown_cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int) or abs(cell) >= 1000:
        return f"{cell:,.0f}"
    return f"{cell:#.3g}".rstrip(".")


@dataclass(frozen=True)
class Plot:
    """One picture. `kind`: lines (over x), bars (one series, a bar an x) or stack (series upon each other over x, 0 .. 1)."""

    kind: str
    title: str
    x_label: str
    y_label: str
    x: tuple[Cell, ...]
    series: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Report:
    """What a benchmark found. `holds`: whether its prediction came true; `verdict`: with which figures, in one sentence."""

    holds: bool
    verdict: str
    tables: tuple[Table, ...]
    plots: tuple[Plot, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_object(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        return {
            "holds": self.holds,
            "verdict": self.verdict,
            "tables": [asdict(table) for table in self.tables],
            "plots": [asdict(plot) for plot in self.plots],
            "figures": dict(self.figures),
        }


def machine() -> dict[str, str | int | float]:
    """Where it was measured, and how busy it was before (mean number of processes that ran in a minute): no time means
    anything without it."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "system": f"{platform.system()}, Python {platform.python_version()}",
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else 0.0,
        "cupaged": __version__,
        "date": date.today().isoformat(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:  # not Linux
        names = []
    return (names or [platform.processor() or platform.machine()])[0]
