"""The list of the kernels, with figures where CUDA's compiler is there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from cupaged.backends import nvrtc
from cupaged.backends.kernel_report import Report, report, typical
from cupaged.backends.kernel_specs import SPECS, variants
from cupaged.backends.launch import C_TYPES, KernelSpec, Variant
from cupaged.cli.terminal import ProgressView, Screen, error_line
from cupaged.errors import BackendError

_SHORT = {C_TYPES[dtype]: short for dtype, short in (("float32", "f32"), ("float16", "f16"), ("bfloat16", "bf16"), ("float8_e4m3fn", "fp8"))}
"""The types that macros stand for, as they fit into a column."""


@dataclass(frozen=True)
class Row:
    """A variant of a kernel for an architecture; `report` is None where it is not known."""

    spec: KernelSpec
    variant: Variant
    architecture: str
    report: Report | None


def show(architectures: Sequence[str], every: bool, as_json: bool) -> None:
    """Print the list; exit status 1 if a kernel does not compile."""
    missing = nvrtc.missing()
    wanted = [(spec, v, a) for spec in SPECS.values() for v in (variants(spec) if every else [typical(spec)]) for a in architectures]
    rows: list[Row] = []
    errors: list[BackendError] = []
    with ProgressView() as progress:
        for done, (spec, variant, architecture) in enumerate(wanted):
            if missing is None:
                progress("compiling the kernels", done, len(wanted))
            try:
                rows.append(Row(spec, variant, architecture, report(spec, variant, architecture) if missing is None else None))
            except BackendError as error:
                rows.append(Row(spec, variant, architecture, None))
                errors.append(error)
    if as_json:
        for row in rows if missing is None else [next(same) for _, same in groupby(rows, lambda row: row.variant)]:
            click.echo(json.dumps(_record(row)))
    else:
        Screen(highlight=False).print(_table(rows) if missing is None else _names())
    if missing is not None:
        click.echo(f"registers, shared memory and occupancy need CUDA's compiler, but no GPU: {missing}", err=True)
    for message in errors:
        error_line(message)
    if errors:
        raise click.exceptions.Exit(1)


def _names() -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("kernel", style="bold", no_wrap=True)
    table.add_column("what it does")
    for spec in SPECS.values():
        table.add_row(spec.name, escape(spec.about))
    return table


def _table(rows: Sequence[Row]) -> Table:
    """A row a variant, a line of it an architecture."""
    table = Table(box=None, pad_edge=False)
    table.add_column("kernel", ratio=1)
    table.add_column("arch")
    for name in ("regs", "shared", "spills", "blocks", "warps"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("limit", no_wrap=True)
    for variant, same in groupby(rows, lambda row: row.variant):
        lines = list(same)
        macros = ", ".join(f"{name} {_SHORT.get(value, value)}" for name, value in variant.macros)
        title = f"[bold]{variant.kernel}[/bold]\n{escape(lines[0].spec.about)}" + (f"\n[dim]{macros}[/dim]" if macros else "")
        if table.row_count:
            table.add_row()
        table.add_row(title, *("\n".join(cells) for cells in zip(*map(_cells, lines), strict=True)))
    return table


def _cells(row: Row) -> tuple[str, ...]:
    if row.report is None:
        return (row.architecture, *["-"] * 5, "does not compile")
    used, resident = row.report.used, row.report.occupancy
    shared = f"{used.shared_bytes}+{row.report.dynamic_bytes}" if row.report.dynamic_bytes else f"{used.shared_bytes}"
    return (
        row.architecture, f"{used.registers}", shared, f"{used.spilled_bytes}", f"{resident.blocks}",
        f"{resident.warps}/{resident.most_warps}", resident.limit.split()[0],
    )  # fmt: skip


def _record(row: Row) -> dict[str, Any]:
    record: dict[str, Any] = {
        "kernel": row.spec.name,
        "about": row.spec.about,
        "source": row.spec.source,
        "macros": dict(row.variant.macros),
        "block_threads": row.spec.block,
    }
    if row.report is None:
        return record
    used, resident = row.report.used, row.report.occupancy
    return record | {
        "architecture": row.architecture,
        "registers": used.registers,
        "static_shared_bytes": used.shared_bytes,
        "dynamic_shared_bytes": row.report.dynamic_bytes,
        "local_bytes": used.local_bytes,
        "spilled_bytes": used.spilled_bytes,
        "blocks_per_multiprocessor": resident.blocks,
        "warps_per_multiprocessor": resident.warps,
        "occupancy": round(resident.share, 4),
        "limited_by": resident.limit,
    }
