"""`cupaged bench`: measurements that begin with a prediction and end with a verdict."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table as RichTable

import cupaged
from cupaged.bench import picture, text_plot
from cupaged.bench.catalogue import BENCHMARKS, Benchmark
from cupaged.bench.lab import Choices, Lab
from cupaged.bench.report import Report, Table, machine
from cupaged.cli.options import engine_options
from cupaged.cli.settings import Settings
from cupaged.cli.terminal import ProgressView, Screen
from cupaged.workloads import generators

if TYPE_CHECKING:
    from cupaged.engine import Engine


def numbers(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[float, ...] | None:
    """Comma-separated numbers."""
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a list of numbers such as 4,16,64") from error


BENCH_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--requests", type=int, help="How many requests (of `overhead`: turns)."),
    click.option("--rate", type=float, help="Arrivals a second, Poisson (where the benchmark has arrivals)."),
    click.option("--bursts", type=float, metavar="SPREAD", help="Arrivals in bursts: gaps with a standard deviation of SPREAD means (1: Poisson)."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of everything that is random: the same seed, the same requests."),
    click.option("--workload", type=click.Choice(list(generators.GENERATORS)), help="Another mix of requests."),
    click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="One's own requests, as JSON lines."),
    click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write everything that was found there."),
    click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the plots into a file (.png, .svg, .pdf)."),
)


@click.group()
def command() -> None:
    """Measure the engine: each benchmark says what it expects, runs, and says whether that came true.

    Engine options are those of `cupaged generate`; what a benchmark varies itself it does not take from them.

    \b
    Examples:
      cupaged bench throughput
      cupaged bench prefix --values 64,512 --json prefix.json
      cupaged bench latency --trace requests.jsonl --plot latency.png
    """


def _add(name: str, benchmark: Benchmark) -> None:
    def run(**options: Any) -> None:
        measure(name, benchmark, options)

    defaults = benchmark.defaults
    told = [f"{defaults.requests} requests", f"{defaults.rate:g} a second" if defaults.rate else "", defaults.workload or ""]
    text = f"{benchmark.help}\n\nPrediction: {benchmark.prediction}.\n\nBy default {', '.join(filter(None, told))}."
    if benchmark.contrary:
        text += f"\n\n\b\nFails as it should:\n  cupaged bench {name} {' '.join(benchmark.contrary)}"
    command_ = engine_options(run)
    if benchmark.values:
        shown = ",".join(f"{value:g}" for value in defaults.values or ())
        command_ = click.option("--values", callback=numbers, metavar="LIST", help=f"{benchmark.values.capitalize()} (default {shown}).")(command_)
    for option in reversed(BENCH_OPTIONS):
        command_ = option(command_)
    command.add_command(click.command(name, help=text, short_help=benchmark.help)(command_))


def measure(name: str, benchmark: Benchmark, options: dict[str, Any]) -> None:
    """Run one benchmark as the options say, and show what came."""
    settings = Settings.of({key: value for key, value in options.items() if key != "seed"})
    if options["plot"] is not None:
        picture.check()
    for key in ("json_file", "plot"):
        if options[key] is not None and not options[key].parent.is_dir():
            raise click.UsageError(f"{options[key]}: there is no such folder")
    chosen: dict[str, Any] = {key: options.get(key) for key in ("requests", "rate", "bursts", "seed", "values", "workload", "trace")}
    where = machine()  # before the run, which is a load itself
    click.echo(f"prediction   {benchmark.prediction}")
    with ProgressView() as progress:

        def open_engine(engine: dict[str, Any]) -> Engine:
            return cupaged.LLM(settings.model, progress=progress, **engine).engine

        lab = Lab(open_engine, Choices(**chosen, engine=settings.engine), benchmark.defaults, progress)
        report = benchmark.run(lab)
    _show(report)
    if options["json_file"] is not None:
        _write(options["json_file"], name, benchmark, lab, settings, report.as_object() | {"machine": where})
    if options["plot"] is not None:
        picture.save(report.plots, options["plot"])


def _show(report: Report) -> None:
    for plot in report.plots:
        click.echo(f"\n{text_plot.draw(plot)}")
    for table in report.tables:
        click.echo()
        Screen(highlight=False).print(_table(table))
    click.echo(f"\nverdict      {'as predicted' if report.holds else 'NOT as predicted'}: {report.verdict}")


def _table(table: Table) -> RichTable:
    drawn = RichTable(title=table.title, title_justify="left")
    for number, name in enumerate(table.header):
        text = any(isinstance(row[number], str) for row in table.rows)
        drawn.add_column(name, justify="left" if text else "right")
    for row in table.text_rows():
        drawn.add_row(*row)
    return drawn


def _write(path: Path, name: str, benchmark: Benchmark, lab: Lab, settings: Settings, found: dict[str, Any]) -> None:
    workloads = [
        w.describe() | {"requests_in_order": [[r.arrival, r.num_prompt, r.num_output, r.session, r.n, r.beams] for r in w.requests]}
        for w in lab.workloads
    ]
    result = {
        "benchmark": name,
        "prediction": benchmark.prediction,
        **found,
        "model": settings.model,
        "engine": benchmark.defaults.engine | settings.engine,
        "seed": lab.seed,
        "workloads": workloads,
    }
    path.write_text(json.dumps(result, ensure_ascii=False), encoding="utf-8")


for _name, _benchmark in BENCHMARKS.items():
    _add(_name, _benchmark)
