"""The command and the README's Python with the real model: what a user does first."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import golden

ROOT = Path(__file__).parent.parent


def cupaged(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cupaged", *args]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=True, timeout=300)


def test_a_question_is_answered(smollm2_path: Path) -> None:
    done = cupaged("generate", "--chat", "What is the capital of France?", "--temperature", "0", "--max-tokens", "12")
    assert "Paris" in done.stdout


def test_many_prompts_as_json(smollm2_path: Path) -> None:
    lines = ['{"prompt": "The capital of France is", "max_tokens": 1}', '{"prompt_token_ids": [504, 3575, 282, 4649, 314], "max_tokens": 1}']
    done = cupaged("generate", "--file", "-", "--json", "--temperature", "0", "--logprobs", "1", "--model", str(smollm2_path), stdin="\n".join(lines))
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert first["outputs"][0]["text"] == second["outputs"][0]["text"] == " Paris"
    assert first["prompt_token_ids"] == second["prompt_token_ids"]
    assert first["outputs"][0]["logprobs"][0][0]["token"] == " Paris"


def test_beams_and_samples_in_one_batch(smollm2_path: Path) -> None:
    case = golden("smollm2_beam.json")["cases"][0]
    prompt = {"prompt_token_ids": case["prompt_ids"]}
    jobs = [prompt | {"beam_width": 4, "max_tokens": 32}, prompt | {"n": 3, "max_tokens": 8, "seed": 1, "temperature": 1, "ignore_eos": True}]
    done = cupaged("generate", "--file", "-", "--json", "--stats", stdin="\n".join(json.dumps(job) for job in jobs))
    beams, samples = (json.loads(line) for line in done.stdout.splitlines())
    assert [answer["text"] for answer in beams["outputs"]] == [answer["text"] for answer in case["sequences"]]
    assert all(abs(a["score"] - e["score"]) < 1e-3 for a, e in zip(beams["outputs"], case["sequences"], strict=True))
    assert [len(answer["token_ids"]) for answer in samples["outputs"]] == [8, 8, 8]
    assert len({tuple(answer["token_ids"]) for answer in samples["outputs"]}) > 1
    assert json.loads(done.stderr.splitlines()[-1])["blocks_shared_peak"] > 0


def test_a_conversation(smollm2_path: Path) -> None:
    done = cupaged("chat", "--temperature", "0", "--max-tokens", "20", stdin="Hi, I am Bob.\nWhat is my name?\n/exit\n")
    assert "Bob" in done.stdout


def test_english_is_likelier_than_noise(smollm2_path: Path) -> None:
    english = "The sun rises in the east and sets in the west. Every morning people wake up and go to work."
    noise = "".join(sorted(english))
    scores = [json.loads(cupaged("perplexity", "-", "--json", stdin=text).stdout)["perplexity"] for text in (english, noise)]
    assert scores[0] < 30 < scores[1]


def test_the_python_of_the_readme_runs(smollm2_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert "The capital of France is" in done.stdout
    assert "Traceback" not in done.stderr
