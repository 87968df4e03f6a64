"""Write tests/data/sampling_references.json: probabilities of the next token, as transformers computes them.

    python scripts/make_sampling_references.py

Needs torch and transformers, which neither the package nor its tests do. Each case holds SamplingParams' fields, how
to make the logits (`random_logits` in tests/support/sampling.py), the history, tokens banned by bad_words or
min_tokens, and the probability of every token that is left. Each parameter is one of transformers' logits processors,
run in this engine's order, in float64, on parameters rounded to float32 as a batch holds them; presence and frequency
penalty are the formula of OpenAI's API reference.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.sampling import random_logits  # noqa: E402

OUTPUT = ROOT / "tests" / "data" / "sampling_references.json"
VOCAB = 97
PROMPT = [3, 5, 5, 8, 13, 21, 34, 55, 89]
ANSWER = [1, 3, 3, 13, 90, 90, 90, 96]
EOS = 2

PARAMETERS: list[dict[str, Any]] = [
    {},
    *({"temperature": t} for t in (0.1, 0.7, 1.5, 10.0)),
    *({"top_k": k} for k in (1, 2, 10, 96, 97, 200)),
    *({"top_p": p} for p in (0.01, 0.3, 0.9, 0.999)),
    *({"min_p": p} for p in (0.001, 0.05, 0.5, 1.0)),
    *({"repetition_penalty": r} for r in (0.5, 1.1, 3.0)),
    *({"presence_penalty": p} for p in (-2.0, 0.6)),
    *({"frequency_penalty": f} for f in (-1.0, 0.4)),
    {"logit_bias": {"0": 2.5, "40": -3.0, "96": 100.0}},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.02, "top_p": 0.95},
    {"min_p": 0.1, "top_k": 5, "top_p": 0.5},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "temperature": 0.9},
    {"logit_bias": {"13": 4.0}, "repetition_penalty": 1.5, "temperature": 0.6, "min_p": 0.01, "top_k": 30, "top_p": 0.8},
]


def cases() -> list[dict[str, Any]]:
    listed = []
    for parameters in PARAMETERS:
        for seed, scale in ((1, 1.0), (2, 4.0)):
            listed.append({"params": parameters, "seed": seed, "scale": scale})
    listed.append({"params": {}, "seed": 3, "scale": 2.0, "bad_words": [[7], [ANSWER[-1], 11], [90, 12]]})
    listed.append({"params": {"min_tokens": 9}, "seed": 4, "scale": 2.0})
    listed.append({"params": {"min_tokens": 8}, "seed": 4, "scale": 2.0})
    return listed


def processors(params: dict[str, Any], bad_words: list[list[int]]) -> LogitsProcessorList:
    params = {name: float(np.float32(value)) if isinstance(value, float) else value for name, value in params.items()}
    chain = LogitsProcessorList()
    if bad_words:
        chain.append(NoBadWordsLogitsProcessor(bad_words, eos_token_id=EOS))
    if "min_tokens" in params:
        chain.append(MinNewTokensLengthLogitsProcessor(len(PROMPT), params["min_tokens"], EOS, device="cpu"))
    if "logit_bias" in params:
        chain.append(SequenceBiasLogitsProcessor([[[int(token)], bias] for token, bias in params["logit_bias"].items()]))
    if "repetition_penalty" in params:
        chain.append(RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]))
    chain.append(OpenAIPenalties(params.get("presence_penalty", 0.0), params.get("frequency_penalty", 0.0)))
    chain.append(TemperatureLogitsWarper(params.get("temperature", 1.0)))
    if "min_p" in params:
        chain.append(MinPLogitsWarper(params["min_p"]))
    if "top_k" in params:
        chain.append(TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        chain.append(TopPLogitsWarper(params["top_p"]))
    return chain


class OpenAIPenalties:
    """mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence, c counting the answer alone."""

    def __init__(self, presence: float, frequency: float) -> None:
        self.presence, self.frequency = presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token in set(ANSWER):
            scores[0, token] -= ANSWER.count(token) * self.frequency + self.presence
        return scores


def reference(case: dict[str, Any]) -> dict[str, Any]:
    history = torch.tensor([PROMPT + ANSWER])
    logits = torch.from_numpy(random_logits(case["seed"], VOCAB, case["scale"])).double()[None]
    scores = processors(case["params"], case.get("bad_words", []))(history, logits.clone())
    probabilities = scores.softmax(-1)[0].tolist()
    banned = []
    if "bad_words" in case or "min_tokens" in case["params"]:
        banned = torch.isneginf(scores[0]).nonzero()[:, 0].tolist()
    kept = {str(token): float(f"{p:.13g}") for token, p in enumerate(probabilities) if p > 0}
    return {**case, "banned": banned, "probabilities": kept}


def main() -> None:
    document = {"vocab_size": VOCAB, "prompt": PROMPT, "answer": ANSWER, "eos": EOS, "cases": [reference(case) for case in cases()]}
    OUTPUT.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(case) for case in document.pop("cases"))
    OUTPUT.write_text(json.dumps(document)[:-1] + ', "cases": [\n' + lines + "\n]}\n", encoding="utf-8")
    print(f"{OUTPUT}: {OUTPUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
