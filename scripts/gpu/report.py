"""Results of a run as a table for people and as JSON; both are kept with the machine's facts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_figures import table

from gpu.cases import Result

NOTE = {"failed": "FAILED: ", "skipped": "skipped: ", "cut": "not run: "}


def render(title: str, machine: dict[str, str], results: Sequence[Result]) -> str:
    """Markdown: the facts, and one table a part with a column for every figure that any of its cases has."""
    parts = [f"# {title}", "\n".join(f"- {name}: {value}" for name, value in machine.items())]
    for part in dict.fromkeys(result.part for result in results):
        of_part = [result for result in results if result.part == part]
        columns = list(dict.fromkeys(name for result in of_part for name in result.figures))
        noted = any(result.status != "ok" for result in of_part)
        header = ["case", *columns, *(["note"] if noted else [])]
        rows = [[r.case, *(_text(r.figures.get(name)) for name in columns), *([_note(r)] if noted else [])] for r in of_part]
        parts.append(f"## {part}\n\n{table(header, rows)}")
    counts = {status: sum(r.status == status for r in results) for status in ("ok", "failed", "skipped", "cut")}
    parts.append(", ".join(f"{count} {'not run' if status == 'cut' else status}" for status, count in counts.items() if count) or "nothing was run")
    return "\n\n".join(parts) + "\n"


def _note(result: Result) -> str:
    return (NOTE.get(result.status, "") + result.message).replace("\n", " ").replace("|", "/")[:300]


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def save(folder: Path, stem: str, machine: dict[str, str], results: Sequence[Result], text: str) -> Path:
    """<stem>-<GPU>-<date>.json and .md in the folder; the path of the JSON."""
    words = f"{stem}-{machine.get('GPU', machine['device'])}-{machine['date']}"
    name = re.sub(r"[^a-z0-9_]+", "-", words.lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    content = {"machine": machine, "results": [result.as_json() for result in results]}
    path.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    return path
