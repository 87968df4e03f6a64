"""Plots as a picture file, through matplotlib: an optional extra, loaded only where a picture is wanted."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cupaged.bench.report import Plot
from cupaged.errors import ConfigError


def check() -> None:
    """Raises ConfigError, with what to do, where no picture can be made: to be asked before a benchmark runs."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("a picture needs matplotlib: pip install 'cupaged[plot]', or leave --plot out for plots in the terminal")


def save(plots: Sequence[Plot], path: Path) -> None:
    """Write the plots below each other; the file's ending says what kind (.png, .svg, .pdf)."""
    figures: Any = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(7, 4 * len(plots)), layout="constrained")
    for number, plot in enumerate(plots):
        axes = figure.add_subplot(len(plots), 1, number + 1)
        _draw(axes, plot)
        axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
    try:
        figure.savefig(path)
    except ValueError as error:  # an ending that it does not know
        raise ConfigError(f"{path}: {error}") from error


def _draw(axes: Any, plot: Plot) -> None:
    if plot.kind == "bars":
        (values,) = plot.series.values()
        axes.bar([str(x) for x in plot.x], values)
        return
    if plot.kind == "stack":
        axes.stackplot(plot.x, *plot.series.values(), labels=list(plot.series))
        axes.set_ylim(0, 1)
    else:
        for name, values in plot.series.items():
            axes.plot(plot.x, values, marker="o", label=name)
        axes.set_ylim(bottom=0)
    axes.legend()
