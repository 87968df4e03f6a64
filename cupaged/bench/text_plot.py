"""Plots as text: for a terminal, and for a document that a diff can show."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cupaged.bench.report import Cell, Plot, shown_cell

WIDTH, HEIGHT = 60, 12
MARKS = "ox+*#@"
SHADES = "█▓▒░ "
"""Of a stack, from the bottom up."""


def draw(plot: Plot) -> str:
    """A plot as lines of text, its title first."""
    body = {"lines": _lines, "bars": _bars, "stack": _stack}[plot.kind](plot)
    return "\n".join([plot.title, *body])


def _bars(plot: Plot) -> list[str]:
    (values,) = plot.series.values()
    labels = [shown_cell(x) for x in plot.x]
    label_width = max(map(len, labels))
    most = max(*values, 1e-12) if len(values) > 1 else max(values[0], 1e-12)
    rows = [
        f"{label:>{label_width}} │{'█' * round((WIDTH - 10) * max(0.0, value) / most)} {shown_cell(float(value))}"
        for label, value in zip(labels, values, strict=True)
    ]
    return [*rows, f"{plot.x_label}: {plot.y_label}"]


def _lines(plot: Plot) -> list[str]:
    """Points of every series over x, which is a number and spread out by its logarithm where a few of them grow by factors."""
    columns = _places([float(x) for x in plot.x])
    top = max((value for values in plot.series.values() for value in values), default=0.0) or 1.0
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for mark, values in zip(MARKS, plot.series.values(), strict=False):
        for column, value in zip(columns, values, strict=True):
            row = HEIGHT - 1 - round((HEIGHT - 1) * max(0.0, value) / top)
            grid[row][column] = mark if grid[row][column] == " " else "■"
    legend = "   ".join(f"{mark} {name}" for mark, name in zip(MARKS, plot.series, strict=False))
    highest = shown_cell(float(top))
    return [*_framed(grid, highest, "0"), *_axis(plot, columns, _margin(highest)), f"{plot.y_label}: {legend}   ■ several"]


def _places(x: Sequence[float]) -> list[int]:
    """A column for each x."""
    by_factors = 2 < len(x) <= 8 and min(x) > 0 and max(x) / min(x) >= 8
    scaled = [math.log(value) for value in x] if by_factors else list(x)
    low, high = min(scaled), max(scaled)
    return [round((WIDTH - 1) * (value - low) / (high - low)) if high > low else 0 for value in scaled]


def _stack(plot: Plot) -> list[str]:
    """Shares of 0 .. 1 upon each other, a column for a part of the x there are; what is left above is blank."""
    names = list(plot.series)
    steps = len(plot.x)
    columns = min(WIDTH, steps)
    grid = [[" "] * columns for _ in range(HEIGHT)]
    for column in range(columns):
        part = slice(column * steps // columns, max(column * steps // columns + 1, (column + 1) * steps // columns))
        level = 0.0
        for shade, name in zip(SHADES, names, strict=False):
            values = plot.series[name][part]
            share = sum(values) / len(values)
            for row in range(round(HEIGHT * level), round(HEIGHT * (level + share))):
                grid[HEIGHT - 1 - min(row, HEIGHT - 1)][column] = shade
            level += share
    legend = "   ".join(f"{shade} {name}" for shade, name in zip(SHADES, names, strict=False))
    first, last = shown_cell(plot.x[0]), shown_cell(plot.x[-1])
    axis = f"{' ' * _margin('1')} {first}{last:>{max(1, columns - len(first))}}  {plot.x_label}"
    return [*_framed(grid, "1", "0"), axis, f"{plot.y_label}: {legend}"]


def _framed(grid: list[list[str]], top: str, bottom: str) -> list[str]:
    labels = [top, *[""] * (len(grid) - 2), bottom]
    return [f"{label:>{_margin(top)}}│{''.join(row).rstrip()}" for label, row in zip(labels, grid, strict=True)]


def _margin(top: str) -> int:
    """Columns left of a plot, in which its highest value stands."""
    return max(5, len(top))


def _axis(plot: Plot, columns: Sequence[int], margin: int) -> list[str]:
    """The x values under their columns, as far as there is room."""
    line = ""
    for column, x in sorted(zip(columns, plot.x, strict=True), key=lambda pair: pair[0]):
        label = _short(x)
        if column >= len(line) + bool(line):
            line = line.ljust(column) + label
    return [f"{' ' * margin}└{'─' * WIDTH}", f"{' ' * margin} {line}  {plot.x_label}"]


def _short(x: Cell) -> str:
    return x if isinstance(x, str) else f"{x:g}" if isinstance(x, int) else f"{x:.3g}"
