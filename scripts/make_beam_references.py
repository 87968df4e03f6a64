"""Write tests/data/beam_references.json: beam searches as transformers runs them, where answers end often and early.

    python scripts/make_beam_references.py

Needs torch and transformers, which neither the package nor its tests do. The model is a small random one of
tests/families; its EOS ids are set to tokens that are often among its likeliest, so that complete answers and growing
beams compete in every way: each beam width meets each length penalty, each early_stopping and several lengths.

transformers calls a search with one beam greedy decoding; here it runs its beam search all the same. Scores are
of a float64 model; a case in which the float32 one finds other answers is left out, for it hangs on a near tie.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import GenerationMode

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "tests" / "data" / "beam_references.json"
FAMILY = "llama1"
WIDTHS = (1, 2, 3, 5)
PENALTIES = (-1.0, 0.0, 1.0, 2.0)
STOPPING = (True, False, "never")
LENGTHS = (1, 5, 14, 24)
NUM_EOS = (1, 2)

Case = dict[str, Any]
Answers = list[tuple[list[int], float]]


class BeamSearchAlways(GenerationConfig):
    """Beam search for one beam, too."""

    def get_generation_mode(self, *_: object, **__: object) -> GenerationMode:
        return GenerationMode.BEAM_SEARCH


def prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(11)
    return [torch.randint(4, 128, (size,), generator=random).tolist() for size in (1, 2, 3, 5, 8, 13, 17)]


def likely_tokens(model: torch.nn.Module) -> list[int]:
    """The tokens most often among the three likeliest, over the greedy answers to all prompts."""
    counts = torch.zeros(model.config.vocab_size)
    for prompt in prompts():
        ids = torch.tensor([prompt])
        for _ in range(24):
            best = model(ids).logits[0, -1].topk(3).indices
            counts[best] += 1
            ids = torch.cat([ids, best[:1, None]], dim=1)
    return counts.topk(max(NUM_EOS)).indices.tolist()


def search(model: torch.nn.Module, case: Case, eos: list[int]) -> Answers:
    """(generated tokens with EOS, score) of every answer, best first."""
    config = BeamSearchAlways(
        num_beams=case["beam_width"], num_return_sequences=case["beam_width"], max_new_tokens=case["max_tokens"],
        length_penalty=case["length_penalty"], early_stopping=case["early_stopping"], eos_token_id=eos, pad_token_id=0,
        do_sample=False, output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    ids = torch.tensor([case["prompt"]])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    answers = found.sequences[:, len(case["prompt"]) :].tolist()
    ends = [min((a.index(token) + 1 for token in eos if token in a), default=len(a)) for a in answers]
    return [(a[:end], round(score, 8)) for a, end, score in zip(answers, ends, found.sequences_scores.tolist(), strict=True)]


@torch.no_grad()
def main() -> None:
    transformers.logging.set_verbosity_error()  # one beam and a length penalty are meant
    single = AutoModelForCausalLM.from_pretrained(ROOT / "tests" / "families" / FAMILY, dtype=torch.float32).eval()
    double = AutoModelForCausalLM.from_pretrained(ROOT / "tests" / "families" / FAMILY, dtype=torch.float64).eval()
    eos = likely_tokens(single)
    questions = prompts()
    sizes = enumerate(itertools.product(NUM_EOS, WIDTHS, LENGTHS, range(2)))
    cases, near_ties = [], 0
    for (number, (num_eos, width, length, _)), penalty, stopping in itertools.product(sizes, PENALTIES, STOPPING):
        case: Case = {
            "eos": num_eos, "beam_width": width, "length_penalty": penalty, "early_stopping": stopping,
            "max_tokens": length, "prompt": questions[number % len(questions)],
        }  # fmt: skip
        answers = search(double, case, eos[:num_eos])
        if [a for a, _ in answers] != [a for a, _ in search(single, case, eos[:num_eos])]:
            near_ties += 1
            continue
        cases.append({**case, "answers": answers})
    head = {"family": FAMILY, "eos": eos, "versions": f"transformers {transformers.__version__}, torch {torch.__version__}"}
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    OUTPUT.write_text(json.dumps(head)[:-1] + ', "cases": [\n' + lines + "\n]}\n", encoding="utf-8")
    early = sum(len(a) < case["max_tokens"] for case in cases for a, _ in case["answers"])
    total = sum(len(case["answers"]) for case in cases)
    print(f"{OUTPUT}: {OUTPUT.stat().st_size:,} bytes, {len(cases)} cases, {near_ties} near ties left out, {early} of {total} answers end early")


if __name__ == "__main__":
    main()
