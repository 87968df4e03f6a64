"""docs/evidence.md: every claim is there with all that belongs to it. Its figures are not tested: a machine's are its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import evidence  # noqa: E402
import evidence_document  # noqa: E402
import evidence_radix  # noqa: E402
import evidence_sim  # noqa: E402
from evidence_claims import CLAIMS, Claim  # noqa: E402
from evidence_document import BUSY, BUSY_HERE, MISSING, REFUTED, REPRODUCED, UNTESTABLE, render  # noqa: E402

from cupaged.bench.catalogue import BENCHMARKS  # noqa: E402

DOCUMENT = ROOT / "docs" / "evidence.md"
FOUND: dict[str, Any] = {
    "holds": True,
    "verdict": "as it should be",
    "tables": [{"title": "a table", "header": ["n", "x"], "rows": [[4, 0.5]]}],
    "plots": [{"kind": "bars", "title": "a plot", "x_label": "n", "y_label": "x", "x": [4], "series": {"x": [0.5]}}],
    "machine": {"processor": "abacus", "cores": 1, "others": 0.052, "date": "2000-01-01"},
}


def section(document: str, claim: Claim) -> dict[str, str]:
    """The fields of a claim's section, and under "" its text."""
    (text,) = re.findall(rf"^## {re.escape(claim.name)}\n(.*?)(?=^## |\Z)", document, re.MULTILINE | re.DOTALL)
    return {"": text, **dict(re.findall(r"^- \*\*(.+?):\*\* (.+)$", text, re.MULTILINE))}


def test_claims_have_their_own_names_and_sound_trials() -> None:
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        for trial in (claim.trial, claim.contrary):
            assert trial is None or bool(trial.bench) != bool(trial.simulation), claim.name
            assert trial is None or not trial.bench or trial.bench[0] in BENCHMARKS
        assert claim.trial or claim.note, f"{claim.name}: why can it not be tested?"
    assert {claim.trial.bench[0] for claim in CLAIMS if claim.trial and claim.trial.bench} == set(BENCHMARKS)


def test_the_stored_document_has_every_claim_with_all_that_belongs_to_it() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    assert document.startswith(evidence_document.HEAD)
    for claim in CLAIMS:
        fields = section(document, claim)
        assert fields["Claim"] == claim.says
        assert fields["Source"] == claim.source
        assert fields["Reference"] == claim.reference
        assert fields["Verdict"].removesuffix(BUSY) in (REPRODUCED, REFUTED, UNTESTABLE)
        assert f"| [{claim.name}](#{claim.name})" in document
        if claim.trial is not None:
            assert fields["Prediction"] == claim.trial.prediction
            assert fields["Command"] == f"`{evidence_document.command(claim, claim.trial)}`"
            assert fields["Ours"] != "-"
            assert re.search(r"^\| -", fields[""], re.MULTILINE), f"{claim.name}: no table"
        if fields["Verdict"].startswith(REPRODUCED):
            assert "it fails: " in fields["Where it fails"], f"{claim.name}: no setting makes it fail"


def test_a_document_says_what_was_found_and_what_was_not_run(tmp_path: Path) -> None:
    claim = next(c for c in CLAIMS if c.contrary is not None and c.contrary.bench and c.contrary.timed)
    assert claim.trial is not None
    evidence_document.path(tmp_path, claim, "trial").write_text(json.dumps(FOUND))
    evidence_document.path(tmp_path, claim, "contrary").write_text(json.dumps(FOUND | {"holds": False, "verdict": "no"}))
    document = render(CLAIMS, tmp_path)
    fields = section(document, claim)
    assert fields["Verdict"] == REPRODUCED
    assert fields["Ours"] == "as it should be"
    assert fields["Where it fails"].endswith("): it fails: no")
    assert fields["How"] == "timed on abacus, 1 cores, of which other processes took 5 %, 2000-01-01"
    assert "| 4 | 0.500 |" in fields[""]
    assert "```text\na plot\n" in fields[""]
    others = [section(document, other)["Verdict"] for other in CLAIMS if other is not claim]
    assert set(others) == {MISSING, UNTESTABLE}


@pytest.mark.parametrize(("holds", "verdict", "told"), [(True, REPRODUCED, "it held all the same: as it should be"), (False, REFUTED, "it fails: as it should be")])
def test_the_verdict_is_the_trials(holds: bool, verdict: str, told: str, tmp_path: Path) -> None:
    claim = next(c for c in CLAIMS if c.contrary is not None)
    for part in ("trial", "contrary"):
        evidence_document.path(tmp_path, claim, part).write_text(json.dumps(FOUND | {"holds": holds}))
    fields = section(render(CLAIMS, tmp_path), claim)
    assert fields["Verdict"] == verdict
    assert fields["Where it fails"].endswith(told)


def test_seconds_of_a_busy_machine_are_marked(tmp_path: Path) -> None:
    for claim in CLAIMS:
        if claim.trial is not None:
            found = FOUND | {"machine": FOUND["machine"] | {"others": 0.3}}
            evidence_document.path(tmp_path, claim, "trial").write_text(json.dumps(found))
    document = render(CLAIMS, tmp_path)
    for claim in CLAIMS:
        timed = claim.trial is not None and claim.trial.timed
        assert section(document, claim)["Verdict"].endswith(BUSY) == timed, claim.name
        (row,) = [line for line in document.splitlines() if line.startswith(f"| [{claim.name}]")]
        assert (f"{REPRODUCED}{BUSY_HERE}" in row) == timed, claim.name
    timed_claims = [claim for claim in CLAIMS if claim.trial is not None and claim.trial.timed]
    tried = [claim for claim in CLAIMS if claim.trial is not None]
    assert f"\n{len(tried)} reproduced ({len(timed_claims)} of them timed on a busy machine), " in document


def test_contrary_seconds_of_a_busy_machine_are_marked(tmp_path: Path) -> None:
    claim = next(c for c in CLAIMS if c.contrary is not None and c.contrary.timed)
    evidence_document.path(tmp_path, claim, "trial").write_text(json.dumps(FOUND))
    contrary = FOUND | {"holds": False, "verdict": "no", "machine": FOUND["machine"] | {"others": 0.3}}
    evidence_document.path(tmp_path, claim, "contrary").write_text(json.dumps(contrary))
    fields = section(render(CLAIMS, tmp_path), claim)
    assert fields["Verdict"] == REPRODUCED
    assert fields["Where it fails"].endswith(f"it fails: no{BUSY}")


def test_counts_are_the_same_on_every_machine_where_no_model_is_asked(tmp_path: Path) -> None:
    for claim in CLAIMS:
        if claim.trial is not None:
            evidence_document.path(tmp_path, claim, "trial").write_text(json.dumps(FOUND))
    document = render(CLAIMS, tmp_path)
    told = {claim.name: section(document, claim)["How"].split(", 2000")[0] for claim in CLAIMS if claim.trial is not None}
    assert {name for name, how in told.items() if how == "counted, the same on every machine"} == {"eviction", "queue"}
    assert {name for name, how in told.items() if how == "counted"} == {"fragmentation", "beam"}


@pytest.mark.parametrize(
    ("reserving", "demand", "paged", "holds", "told"),
    [
        (0, 80, 10, True, "8 times as often as paged, 8 times as often as paged, 8 times as often as paged, by load"),
        (1, 80, 10, False, "preempt 9 times"),
        (0, 170, 10, False, "17 times as often as paged"),
        (0, 154, 0, False, "154 times against none"),
    ],
)
def test_preemptions_are_compared_and_none_is_no_divisor(reserving: int, demand: int, paged: int, holds: bool, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"demand": demand, "paged": paged}
    monkeypatch.setattr(evidence_sim, "run", lambda name, *args: SimpleNamespace(preemptions=counts.get(name, reserving)))
    report = evidence_sim.preemptions()
    assert report.holds is holds
    assert told in report.verdict


def test_one_claim_from_run_to_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "evidence.md"
    assert evidence.main(["--only", "arithmetic", "--results", str(tmp_path / "r"), "--output", str(output)]) == 0
    (claim,) = [c for c in CLAIMS if c.name == "arithmetic"]
    fields = section(output.read_text(encoding="utf-8"), claim)
    assert fields["Verdict"] == REFUTED
    assert "327680" in fields[""]
    assert re.search(r"KV of 8,192 tokens, GB +\| 8,192 x a token +\| 2\.68 ", fields[""])
    assert capsys.readouterr().out.endswith(f"wrote {output}\n")


def test_a_run_that_fails_is_told_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--only", "overhead,arithmetic", "--parts", "trial", "--model", str(tmp_path / "absent.gguf"), "--results", str(tmp_path), "--output", str(tmp_path / "e.md")]
    assert evidence.main(arguments) == 1
    captured = capsys.readouterr()
    assert re.match(r"error: overhead: error: .*absent\.gguf", captured.err)
    assert "arithmetic, trial: 4 of" in captured.out


@pytest.mark.parametrize("argv", [["--only", "luck"], ["--parts", "half"]])
def test_bad_usage_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        evidence.parse(argv)
    assert refusal.value.code == 2
    assert "scripts/reproduce: error:" in capsys.readouterr().err


def test_reproduce_is_a_script_that_names_the_claims() -> None:
    done = subprocess.run([str(ROOT / "scripts" / "reproduce"), "--help"], capture_output=True, text=True, env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    for claim in CLAIMS:
        assert claim.name in done.stdout


def test_the_tree_s_edges_by_hand() -> None:
    prompts = [np.array(p, np.int32) for p in ([5, 1, 2, 3], [5, 1, 9], [7], [5, 1, 2, 4, 4])]
    assert evidence_radix.edge_tokens(prompts) == 2 + 1 + 1 + 2 + 1 + 1


def test_turns_follow_each_other_and_find_what_was_said() -> None:
    program = [(np.arange(40, dtype=np.int32), 10), (np.arange(100, 120, dtype=np.int32), 5)]
    plain, cached = (evidence_radix.serve([program, program], on, at_once=1) for on in (False, True))
    assert plain.hit_rate == 0
    # the second turn finds the first's 40 + 10 tokens but the last, which was not computed; the second program finds itself,
    # but computes a token, and its answer is new
    assert cached.hit_rate == pytest.approx((49 + 39 + 49) / (2 * (40 + 70)))
    assert cached.latency < plain.latency
    assert plain.rate == pytest.approx(1 / plain.latency)


def test_what_shares_nothing_gains_nothing() -> None:
    report = evidence_radix.gains(("nothing shared",))
    assert not report.holds
    assert "1.0 times the throughput" in report.verdict


def test_the_optimum_is_that_of_the_order() -> None:
    assert evidence_radix.optimum().holds
    assert not evidence_radix.optimum(("fcfs",)).holds


def test_samples_that_save_what_the_paper_says_are_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"Alpaca": [6.5, 8.0, 9.9], "ShareGPT": [50.0, 50.0, 50.0]}
    for samples, holds in (([17.0, 20.0, 30.0], True), ([17.0, 20.0, 31.0], False)):
        table = {(d, b): v for d, v in figures.items() for b in (False, True)} | {("ShareGPT", False): samples}
        monkeypatch.setattr(evidence_sim, "blocks_saved", lambda d, n, b, count, t=table: t[d, b][n // 2 - 1] / 100)
        assert evidence_sim.sharing().holds is holds


def test_a_simulated_claim_without_its_cause_fails() -> None:
    """With a pool for everybody nobody preempts, and what is reserved costs nothing."""
    free = evidence_sim.run("paged", "sharegpt", 4.0, 40, pools=16)
    bound = evidence_sim.run("max", "sharegpt", 4.0, 40, pools=16)
    tight = evidence_sim.run("max", "sharegpt", 4.0, 40)
    assert free.preemptions == 0
    assert bound.seconds == pytest.approx(free.seconds, rel=0.02)
    assert tight.seconds > 2 * free.seconds
