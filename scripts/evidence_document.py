"""docs/evidence.md from the results of the claims' runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_figures import table
from evidence_claims import Claim, Trial

from cupaged.bench.report import Plot, Table
from cupaged.bench.text_plot import draw

HEAD = """# Evidence

What the PagedAttention and RadixAttention papers and the article about them claim, and what this engine finds. `scripts/reproduce`
runs it all and writes this document; `--only NAME` runs one claim. Each prediction was written down before its run; where a
claim is reproduced, a setting that should make it fail stands beside it, with what it did.

- **Measured** claims run the real engine on the machine named with them. A small model's lengths are the papers', scaled
  with the longest sequence.
- **Simulated** claims run the real scheduler and cache manager under a roofline of the papers' machines: OPT-13B on an A100
  with 40 GB for PagedAttention, where one constant, the overhead of a step, is fitted, to one of the paper's figures, and all
  others are tests; Llama-7B on an A10G for RadixAttention, where nothing is fitted.
- **Counted** claims run the real scheduler and cache, some with a model that answers at random; nothing is timed.

"""
BUSY_HERE = ", busy machine"
BUSY = ", on a machine that was busy: to be run again alone"
BUSY_SHARE = 0.1
"""Of all cores' time, for other processes: above it a time says little."""
REPRODUCED, REFUTED, UNTESTABLE, MISSING = "reproduced", "refuted", "not testable here", "not run"


def path(results: Path, claim: Claim, part: str) -> Path:
    """Where the result of a claim's trial or of its contrary is kept."""
    return results / f"{claim.name}.{part}.json"


def render(claims: Sequence[Claim], results: Path) -> str:
    """The document, in Markdown."""
    parts = [(claim, _load(results, claim, "trial"), _load(results, claim, "contrary")) for claim in claims]
    summary = [[f"[{c.name}](#{c.name})", c.says, _short(c, found), "-" if found is None else found["verdict"]] for c, found, _ in parts]
    counts = _counts([row[2] for row in summary])
    sections = [_section(claim, found, contrary) for claim, found, contrary in parts]
    return HEAD + f"{counts}.\n\n" + table(["claim", "says", "verdict", "found"], summary) + "\n\n" + "\n\n".join(sections) + "\n"


def _short(claim: Claim, found: dict[str, Any] | None) -> str:
    """The verdict with its caveat, for the table."""
    return verdict(claim, found) + (BUSY_HERE if found is not None and busy(claim.trial, found["machine"]) else "")


def _counts(verdicts: Sequence[str]) -> str:
    """How many of each kind, and of those how many mean little."""
    parts = []
    for kind in (REPRODUCED, REFUTED, UNTESTABLE, MISSING):
        if count := sum(shown.removesuffix(BUSY_HERE) == kind for shown in verdicts):
            on_busy = verdicts.count(kind + BUSY_HERE)
            parts.append(f"{count} {kind}" + (f" ({on_busy} of them timed on a busy machine)" if on_busy else ""))
    return ", ".join(parts)


def _load(results: Path, claim: Claim, part: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path(results, claim, part).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found


def verdict(claim: Claim, found: dict[str, Any] | None) -> str:
    if claim.trial is None:
        return UNTESTABLE
    if found is None:
        return MISSING
    return REPRODUCED if found["holds"] else REFUTED


def command(claim: Claim, trial: Trial) -> str:
    """What a person types for a trial."""
    return f"cupaged bench {' '.join(trial.bench)}" if trial.bench else f"scripts/reproduce --only {claim.name}"


def _section(claim: Claim, found: dict[str, Any] | None, contrary: dict[str, Any] | None) -> str:
    lines = [f"## {claim.name}", "", f"- **Claim:** {claim.says}", f"- **Source:** {claim.source}"]
    if claim.trial is not None:
        lines += [f"- **Command:** `{command(claim, claim.trial)}`", f"- **Prediction:** {claim.trial.prediction}"]
    lines.append(f"- **Reference:** {claim.reference}")
    lines.append(f"- **Ours:** {'-' if found is None else found['verdict']}")
    lines.append(f"- **Verdict:** {verdict(claim, found)}{BUSY if found is not None and busy(claim.trial, found['machine']) else ''}")
    if claim.contrary is not None:
        lines.append(f"- **Where it fails:** {_failing(claim, claim.contrary, contrary)}")
    if found is not None:
        lines.append(f"- **How:** {_how(claim, found['machine'])}")
    if claim.note:
        lines += ["", claim.note]
    if found is not None:
        lines += _pictures(found)
    return "\n".join(lines)


def busy(trial: Trial | None, machine: dict[str, Any]) -> bool:
    """Whether seconds count and other processes took much of the machine meanwhile: then they mean little."""
    return trial is not None and trial.timed and machine["others"] > BUSY_SHARE


def _how(claim: Claim, machine: dict[str, Any]) -> str:
    if claim.trial is None or (claim.trial.simulation is not None and not claim.trial.timed):
        return f"simulated or computed, {machine['date']}"
    if claim.trial.timed:
        kind = f"timed on {machine['processor']}, {machine['cores']} cores, of which other processes took {100 * machine['others']:.0f} %"
    else:
        kind = "counted, the same on every machine" if claim.trial.stand_in else "counted"
    return f"{kind}, {machine['date']}"


def _failing(claim: Claim, trial: Trial, found: dict[str, Any] | None) -> str:
    how = f"`{command(claim, trial)}`" if trial.bench else "the same with another setting"
    if found is None:
        return f"{how} ({trial.because}): {MISSING}"
    outcome = "it held all the same" if found["holds"] else "it fails"
    return f"{how} ({trial.because}): {outcome}: {found['verdict']}{BUSY if busy(trial, found['machine']) else ''}"


def _pictures(found: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for value in found["tables"]:
        shown = Table(value["title"], tuple(value["header"]), tuple(tuple(row) for row in value["rows"]))
        lines += ["", shown.title, "", table(shown.header, shown.text_rows())]
    for value in found["plots"]:
        plot = Plot(value["kind"], value["title"], value["x_label"], value["y_label"], tuple(value["x"]), value["series"])
        lines += ["", "```text", draw(plot), "```"]
    return lines
