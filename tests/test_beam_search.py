"""Beam search: stored results of Hugging Face's, in the engine, in company, in a tiny pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged import LLM, BeamSearchParams, SamplingParams
from tests.conftest import golden

TIE = 1e-4
"""Answers whose scores differ by less may change places."""

PLAIN = golden("smollm2_beam.json")
VARIED = golden("smollm2_beam_params.json")["cases"]


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return LLM(str(smollm2_path), num_blocks=300, max_model_len=1024)


def check(found: list[Any], expected: list[dict[str, Any]], tolerance: float) -> None:
    assert len(found) == len(expected)
    np.testing.assert_allclose([s.score for s in found], [s["score"] for s in expected], rtol=tolerance, atol=tolerance)
    for got, want in zip(found, expected, strict=True):
        alternatives = [s["ids"] for s in expected if abs(s["score"] - want["score"]) < TIE]
        assert got.token_ids in alternatives
        if len(alternatives) == 1:
            assert got.text == want["text"]


@pytest.mark.parametrize("case", PLAIN["cases"], ids=[case["name"] for case in PLAIN["cases"]])
def test_four_beams(llm: LLM, case: dict[str, Any]) -> None:
    output = llm.beam_search([case["prompt_ids"]], BeamSearchParams(beam_width=4, max_tokens=32))[0]
    check(output.sequences, case["sequences"], 1e-4)


def test_every_penalty_and_every_way_of_stopping_all_at_once(llm: LLM) -> None:
    results = []
    for case in VARIED:
        params = BeamSearchParams(
            beam_width=case["beam_width"], max_tokens=case["max_tokens"], length_penalty=case["length_penalty"],
            early_stopping=case["early_stopping"],
        )  # fmt: skip
        results.append(llm.engine.add_request(case["prompt_ids"], params))
    done = {}
    while llm.engine.has_unfinished():
        done.update({o.request_id: o for o in llm.engine.step() if o.finished})
    for request_id, case in zip(results, VARIED, strict=True):
        check(done[request_id].outputs, case["sequences"], 1e-4)


def test_beams_and_samples_share_a_tiny_pool(smollm2_path: Path, llm: LLM) -> None:
    case = PLAIN["cases"][0]
    sampled = SamplingParams(seed=3, n=3, max_tokens=30, ignore_eos=True)
    alone = llm.generate([case["prompt_ids"]], sampled)[0]
    small = LLM(str(smollm2_path), num_blocks=15, max_num_seqs=16, max_num_batched_tokens=64)
    preempted: list[int] = []
    small.engine.observers.append(lambda record: preempted.append(record.num_preempted))
    ids = [
        small.engine.add_request(case["prompt_ids"], params)
        for params in (BeamSearchParams(beam_width=4, max_tokens=32), sampled, BeamSearchParams(beam_width=4, max_tokens=32), sampled)
    ]
    done = {}
    while small.engine.has_unfinished():
        done.update({o.request_id: o for o in small.engine.step() if o.finished})
    assert sum(preempted) > 0
    for name in (ids[0], ids[2]):
        check(done[name].outputs, case["sequences"], 1e-4)
    for name in (ids[1], ids[3]):
        assert [a.token_ids for a in done[name].outputs] == [a.token_ids for a in alone.outputs]
    small.engine._scheduler.check_invariants()
