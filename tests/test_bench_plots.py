"""Plots as text, cell by cell, and pictures where matplotlib is."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from cupaged.bench import picture, text_plot
from cupaged.bench.report import Plot, Report, Table, machine, shown_cell
from cupaged.errors import ConfigError


@pytest.mark.parametrize(("cell", "text"), [("a", "a"), (12345, "12,345"), (12345.6, "12,346"), (0.12345, "0.123"), (7, "7"), (45.678, "45.7"), (100.0, "100")])
def test_cells_show_three_digits(cell: str | int | float, text: str) -> None:
    assert shown_cell(cell) == text


def test_bars_are_as_long_as_their_values() -> None:
    lines = text_plot.draw(Plot("bars", "speed", "size", "tokens/s", (4, 16), {"rate": [50.0, 100.0]})).splitlines()
    assert lines == ["speed", " 4 │" + "█" * 25 + " 50.0", "16 │" + "█" * 50 + " 100", "size: tokens/s"]


def test_bars_of_nothing_are_empty() -> None:
    assert text_plot.draw(Plot("bars", "t", "x", "y", ("a",), {"v": [0.0]})).splitlines()[1] == "a │ 0.00"


def test_lines_go_through_their_points() -> None:
    plot = Plot("lines", "latency", "rate", "s", (0, 1, 2), {"a": [0.0, 5.0, 10.0], "b": [10.0, 5.0, 10.0]})
    title, *lines = text_plot.draw(plot).splitlines()
    rows = [line[6:] for line in lines[: text_plot.HEIGHT]]
    assert title == "latency"
    assert rows[0] == "x" + " " * 58 + "■"
    assert [row.find("■") for row in rows[1:] if "■" in row] == [30]
    assert rows[-1] == "o"
    assert lines[-1] == "s: o a   x b   ■ several"
    assert lines[-2].split() == ["0", "1", "2", "rate"]


@pytest.mark.parametrize("top", [2.0, 0.0212, 1234567.0])
def test_a_long_label_moves_the_whole_plot(top: float) -> None:
    lines = text_plot.draw(Plot("lines", "t", "rate", "s", (1, 2), {"a": [0.0, top]})).splitlines()[1:-1]
    frame = [line.find("│") for line in lines[: text_plot.HEIGHT]]
    assert frame == [max(5, len(shown_cell(top)))] * text_plot.HEIGHT
    assert lines[text_plot.HEIGHT].find("└") == frame[0]
    assert lines[text_plot.HEIGHT + 1].find("1") == frame[0] + 1


def test_sizes_that_double_are_spread_evenly() -> None:
    assert text_plot._places([4, 8, 16, 32, 64]) == pytest.approx([0, 15, 30, 44, 59], abs=1)
    assert text_plot._places([1, 2, 3]) == pytest.approx([0, 30, 59], abs=1)
    assert text_plot._places([5]) == [0]


def test_a_stack_fills_its_shares_from_the_bottom() -> None:
    plot = Plot("stack", "pool", "s", "share", (0.0, 1.0), {"tokens": [0.25, 0.5], "internal": [0.25, 0.25], "external": [0.25, 0.25]})
    lines = text_plot.draw(plot).splitlines()[1:]
    columns = ["".join(line[6 + i : 7 + i] or " " for line in lines[:12]) for i in (0, 1)]
    assert columns == [" " * 3 + "▒▒▒▓▓▓███", "▒▒▒▓▓▓" + "█" * 6]
    assert lines[-1] == "share: █ tokens   ▓ internal   ▒ external"


def test_a_long_stack_takes_the_mean_of_its_columns() -> None:
    plot = Plot("stack", "pool", "s", "share", tuple(range(120)), {"tokens": [0.0, 1.0] * 60})
    assert text_plot.draw(plot).splitlines()[-4].count("█") == 60


def test_a_report_is_plain_data() -> None:
    report = Report(True, "fine", (Table("t", ("a",), ((1,),)),), (Plot("bars", "p", "x", "y", (1,), {"v": [2.0]}),), {"gain": 2.0})
    value = report.as_object()
    assert value["holds"] is True
    assert value["tables"] == [{"title": "t", "header": ("a",), "rows": ((1,),)}]
    assert value["plots"][0]["series"] == {"v": [2.0]}
    assert value["figures"] == {"gain": 2.0}
    assert set(machine()) == {"processor", "cores", "system", "load", "cupaged", "date"}


def test_without_matplotlib_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^a picture needs matplotlib: pip install 'cupaged\[plot\]', or leave --plot out[^\n]*$"):
        picture.check()


def test_a_picture_of_every_kind(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots = [
        Plot("bars", "b", "x", "y", ("a", "b"), {"v": [1.0, 2.0]}),
        Plot("lines", "l", "x", "y", (1, 2), {"v": [1.0, 2.0], "w": [2.0, 1.0]}),
        Plot("stack", "s", "x", "y", (1, 2), {"v": [0.1, 0.2], "w": [0.2, 0.1]}),
    ]
    picture.check()
    picture.save(plots, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"p\.odd"):
        picture.save(plots, tmp_path / "p.odd")
