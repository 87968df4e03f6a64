"""The sharing benchmark's counts on a small scale, and that its command line answers. Timing itself is not tested."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_sharing  # noqa: E402
import sharing_counts  # noqa: E402
import sharing_times  # noqa: E402


def test_help_names_every_measurement() -> None:
    done = subprocess.run([sys.executable, str(SCRIPTS / "bench_sharing.py"), "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    for name in (*bench_sharing.MEASUREMENTS, "--questions", "--json", "--repeat"):
        assert name in done.stdout


@pytest.mark.parametrize("argv", [["--only", "speed,luck"], ["--questions", "1"], ["--requests", "0"]])
def test_bad_usage_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        bench_sharing.parse(argv)
    assert refusal.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_one_sequence_saves_nothing_and_more_save_more() -> None:
    shares = [sharing_counts.blocks_saved("Alpaca", n, False, 8) for n in (1, 2, 4)]
    assert shares[0] == 0
    assert 0 < shares[1] < shares[2]
    assert sharing_counts.blocks_saved("Alpaca", 4, True, 8) > shares[2], "beams share their outputs, too"


def test_samples_share_the_prompt_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 32 tokens and 17 more: 2 blocks of the prompt, then each sequence has one and, for the last step's
    token, none further. Steps: the prompt alone (no sharing yet counted), then 16 steps that save 3 * 2 of 4 * 3."""
    monkeypatch.setattr(sharing_counts, "draw", lambda random, mean: 32 if mean > 100 else 17)
    monkeypatch.setitem(sharing_counts.LENGTHS, "ShareGPT", (161.0, 17.0))
    assert sharing_counts.blocks_saved("ShareGPT", 4, False, 1) == pytest.approx(16 * 6 / (2 + 16 * 12))


def test_lengths_have_their_mean_and_a_long_tail() -> None:
    random = np.random.default_rng(0)
    lengths = [sharing_counts.draw(random, 161.31) for _ in range(20_000)]
    assert np.mean(lengths) == pytest.approx(161.31, rel=0.02)
    assert np.median(lengths) < 130


@pytest.mark.parametrize("mix", sorted(sharing_counts.MIXES))
def test_a_pool_that_never_evicts_finds_most(mix: str) -> None:
    best = sharing_counts.hit_rate(mix, "lru", 36, 1 << 12)
    assert 0 < sharing_counts.hit_rate(mix, "lru", 36, 110) < best < 1


def test_questions_share_the_system_prompt_alone() -> None:
    prompts = sharing_times.questions(32)
    assert {len(prompt) for prompt in prompts} == {1024}
    assert len({tuple(prompt[:1000]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 32


def test_tables_show_the_figures() -> None:
    row = {"dataset": "Alpaca", "kind": "beams", "n": 2, "paper": "37.6", "saved": 0.4}
    assert "40.0" in bench_sharing.saved({"rows": [row]})
    times = {"without": {"computed": 9, "cached": 0, "seconds": [4.0, 2.0]}, "with": {"computed": 5, "cached": 4, "seconds": [4.0, 0.2]}}
    assert "10.0 times sooner" in bench_sharing.prompt(times)
