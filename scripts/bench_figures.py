"""What the benchmarks compute from raw figures: ratios of medians, agreement, and tables of text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def ratio_of_medians(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(ours) / statistics.median(theirs)


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Share of tokens before the first difference of each answer; greedy answers part where two logits nearly tie."""
    same = total = 0
    for a, b in zip(ours, theirs, strict=True):
        differs = [x != y for x, y in zip(a, b, strict=True)]
        same += differs.index(True) if True in differs else len(differs)
        total += len(differs)
    return same / total if total else 1.0


def spread(values: Sequence[float], digits: int = 1) -> str:
    """The median, and the range where there is more than one value."""
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} - {max(values):.{digits}f})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its columns aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines)
