"""Beam search beside transformers', on a small model that ends its answers often and early: every width, penalty and
way of stopping, all searches at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged import LLM, BeamSearchParams
from cupaged.outputs import RequestOutput
from tests.family_models import config_change, plant

DOCUMENT = json.loads((Path(__file__).parent / "data" / "beam_references.json").read_text(encoding="utf-8"))
TIE = 1e-5
"""Answers whose scores differ by less may change places."""


def search(cases: list[dict[str, Any]], num_eos: int, folder: Path, **options: Any) -> tuple[list[RequestOutput], int]:
    """The finished outputs of all cases in their order, run together, and how many preemptions there were."""
    path = plant(DOCUMENT["family"], config_change(eos_token_id=DOCUMENT["eos"][:num_eos]), folder)
    engine = LLM(str(path), **{"device": "reference", "block_size": 4, "num_blocks": 600, "max_model_len": 64, **options}).engine
    preempted: list[int] = []
    engine.observers.append(lambda record: preempted.append(record.num_preempted))
    for number in np.random.default_rng(0).permutation(len(cases)):  # long searches beside short ones
        case = cases[number]
        params = {name: case[name] for name in ("beam_width", "max_tokens", "length_penalty", "early_stopping")}
        engine.add_request(case["prompt"], BeamSearchParams(**params), str(number))
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        done.update({output.request_id: output for output in engine.step() if output.finished})
    engine._scheduler.check_invariants()
    return [done[str(number)] for number in range(len(cases))], sum(preempted)


def check(found: RequestOutput, case: dict[str, Any]) -> None:
    answers = case["answers"]
    label = {name: value for name, value in case.items() if name != "answers"}
    np.testing.assert_allclose([a.score for a in found.outputs], [s for _, s in answers], atol=1e-5, rtol=1e-5, err_msg=str(label))
    for output, (ids, score) in zip(found.outputs, answers, strict=True):
        assert output.token_ids in [ids, *(other for other, value in answers if abs(value - score) < TIE)], label
        ended = ids[-1] in DOCUMENT["eos"][: case["eos"]]
        assert output.finish_reason == ("stop" if ended else "length")


@pytest.mark.parametrize("num_eos", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="roomy"),
        pytest.param({"prefix_cache": False}, id="without the cache"),
        pytest.param({"num_blocks": 36, "max_num_seqs": 20, "max_num_batched_tokens": 24}, id="tiny pool"),
        pytest.param({"num_blocks": 36, "max_num_seqs": 20, "prefix_cache": False}, id="tiny pool without the cache"),
    ],
)
def test_every_search_equals_transformers(num_eos: int, options: dict[str, Any], tmp_path: Path) -> None:
    cases = [case for case in DOCUMENT["cases"] if case["eos"] == num_eos]
    found, preempted = search(cases, num_eos, tmp_path / "model", **options)
    for output, case in zip(found, cases, strict=True):
        check(output, case)
    assert preempted or "num_blocks" not in options


def test_the_references_hold_what_they_are_for() -> None:
    """Answers that end early, answers that do not, and a penalty that changes which answer is the best."""
    cases = DOCUMENT["cases"]
    lengths = [len(ids) < case["max_tokens"] for case in cases for ids, _ in case["answers"]]
    assert 0.2 < np.mean(lengths) < 0.8
    assert {(case["beam_width"], case["length_penalty"], case["early_stopping"]) for case in cases} == {
        (width, penalty, stopping) for width in (1, 2, 3, 5) for penalty in (-1, 0, 1, 2) for stopping in (True, False, "never")
    }
    best: dict[str, set[tuple[int, ...]]] = {}
    for case in cases:
        key = json.dumps([case[name] for name in ("eos", "beam_width", "early_stopping", "max_tokens", "prompt")])
        best.setdefault(key, set()).add(tuple(case["answers"][0][0]))
    assert sum(len(answers) > 1 for answers in best.values()) > 10
