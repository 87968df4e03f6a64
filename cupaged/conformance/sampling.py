"""Checks of choosing tokens. The oracle takes one row, one token after the other."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from cupaged.conformance.case import check, expect, expect_close, expect_equal
from cupaged.conformance.steps import NEUTRAL, batch_of
from cupaged.conformance.subject import Numbers, Subject, random
from cupaged.errors import InvariantError

Row = dict[str, Any]

ROWS: dict[str, Row] = {
    "greedy": {"temperature": 0.0},
    "plain": {"seeds": 1, "positions": 7},
    "cold": {"temperature": 0.3, "seeds": 2**63 + 5, "positions": 2**31 - 1, "indices": 3},
    "top_k": {"top_k": 5, "seeds": 2, "indices": 1},
    "top_p": {"top_p": 0.7, "seeds": 3, "positions": 9},
    "min_p": {"min_p": 0.05, "temperature": 1.7, "seeds": 4},
    "all filters": {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "temperature": 2.0, "seeds": 5},
    "penalties": {"repetition": 1.3, "presence": 0.5, "frequency": 0.25, "seeds": 6},
    "greedy penalties": {"temperature": 0.0, "repetition": 1.5, "frequency": 2.0},
    "bias": {"temperature": 0.0, "bias": [(3, 4.0), (3, 1.0), (0, -np.inf)]},
}
VOCABULARIES = (17, 1024, 1025, 5000)


@check("sample", vocabulary=VOCABULARIES, kind=list(ROWS))
def chooses_the_defined_token_again_and_again(subject: Subject, vocabulary: int, kind: str) -> None:
    """Four rows of one kind among greedy ones, three times: penalties count what was chosen before."""
    rows = [{**ROWS[kind], "seeds": ROWS[kind].get("seeds", 0) + r, "row_id": 2 * r} for r in range(4)] + [{"temperature": 0.0, "row_id": 9}]
    logits = 3 * random(vocabulary, len(rows), vocabulary)
    histories = [([3, 5, r], [7, 7, int(logits[r].argmax())]) for r in range(len(rows))]
    for row, (prompt, output) in zip(rows, histories, strict=True):
        subject.backend.set_history(row["row_id"], np.array(prompt, np.int32), np.array(output, np.int32))
    for _ in range(3):
        chosen = subject.download(subject.backend.sample(subject.backend.upload(logits.copy()), batch_of(rows)))
        expect(chosen.dtype == np.int32, f"tokens are {chosen.dtype.name}")
        for r, (row, token) in enumerate(zip(rows, chosen.tolist(), strict=True)):
            wanted = defined_token(logits[r], row, *histories[r])
            expect(token == wanted, f"row {r} chooses token {token} instead of {wanted}")
            histories[r][1].append(token)


def defined_token(logits: Numbers, row: Row, prompt: list[int], output: list[int]) -> int:
    """The token that a row of logits gives after these tokens: Backend.sample's steps in their order."""
    value = {name: float(dtype(row.get(name, neutral))) for name, (dtype, neutral) in NEUTRAL.items() if name != "seeds"}
    wide = [np.float32(logit) for logit in logits]
    for token, bias in row.get("bias", []):
        wide[token] += np.float32(bias)
    scores = [float(logit) for logit in wide]
    counts = Counter(output)
    for token in {*prompt, *output}:
        scores[token] = penalised(scores[token], counts[token], value)
    best = max(scores)
    if value["temperature"] == 0:
        return scores.index(best)
    weights = {t: math.exp((s - best) / value["temperature"]) for t, s in enumerate(scores)}
    kept = {t: w for t, w in weights.items() if w >= value["min_p"]}
    ranked = sorted(kept, key=lambda t: -scores[t])
    ranked = ranked[: int(value["top_k"]) or None]
    if value["top_p"] < 1:
        target, held = value["top_p"] * sum(weights[t] for t in ranked), np.cumsum([weights[t] for t in ranked])
        ranked = ranked[: int(np.count_nonzero(held < target)) + 1]
    left = uniform(int(row.get("seeds", 0)), int(value["positions"]), int(value["indices"])) * math.fsum(weights[t] for t in ranked)
    for token in sorted(ranked):
        left -= weights[token]
        if left < 0:
            return token
    raise AssertionError("a random number below 1 has a token")


def penalised(score: float, count: int, value: dict[str, float]) -> float:
    repeated = score / value["repetition"] if score > 0 else score * value["repetition"]
    return float(np.float32(repeated - value["frequency"] * count - value["presence"] * (count > 0)))


def uniform(seed: int, position: int, index: int) -> float:
    """Philox4x32-10 (Salmon et al., SC'11) in whole numbers."""
    c, k, word = [position, index, 0, 0], [seed & 0xFFFFFFFF, seed >> 32], 0xFFFFFFFF
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [second >> 32 ^ c[1] ^ k[0], second & word, first >> 32 ^ c[3] ^ k[1], first & word]
        k = [k[0] + 0x9E3779B9 & word, k[1] + 0xBB67AE85 & word]
    return float(((c[0] >> 8) + 0.5) * 2.0**-24)


@check("likeliest", vocabulary=VOCABULARIES, rows=[1, 5])
def names_the_lowest_of_the_largest(subject: Subject, vocabulary: int, rows: int) -> None:
    logits = np.round(2 * random(vocabulary, rows, vocabulary), 1)  # some are equal
    uploaded, tokens = subject.backend.upload(logits.copy()), subject.backend.empty((rows,), np.int32)
    subject.backend.likeliest(uploaded, out=tokens)
    wanted = [row.index(max(row)) for row in logits.tolist()]
    expect(subject.download(tokens).tolist() == wanted, f"tokens {subject.download(tokens).tolist()} instead of {wanted}")
    expect_equal(subject.download(uploaded), logits, "the logits")


@check("sample", value=[np.nan, np.inf])
def damaged_logits_are_refused(subject: Subject, value: float) -> None:
    logits = random(0, 2, 40)
    logits[1, 5] = value
    try:
        tokens = subject.download(subject.backend.sample(subject.backend.upload(logits), batch_of([{}, {"temperature": 0.0}])))
    except InvariantError as error:
        expect("logits" in str(error), f"the refusal {str(error)!r} does not speak of the logits")
    else:  # a device that computes behind the host's back says it with a number
        expect(tokens[0] >= 0 > tokens[1], f"tokens {tokens.tolist()} are chosen from damaged logits in row 1")


@check("token_logprobs", vocabulary=VOCABULARIES, k=[0, 1, 8, 20])
def gives_the_chosen_and_the_likeliest(subject: Subject, vocabulary: int, k: int) -> None:
    logits = np.round(2 * random(vocabulary, 3, vocabulary), 1)  # some are equal
    chosen = np.array([0, vocabulary - 1, 5], np.int32)
    backend = subject.backend
    answers = backend.token_logprobs(backend.upload(logits), backend.upload(chosen), k)
    logprobs, ranks, top_ids, top_logprobs = (backend.download(a) for a in answers)
    for r, row in enumerate(logits.astype(np.float64)):
        logs = row - row.max() - math.log(math.fsum(np.exp(row - row.max())))
        best = sorted(range(vocabulary), key=lambda t: (-row[t], t))[:k]
        expect(ranks[r] == 1 + sum(other > row[chosen[r]] for other in row), f"row {r} has rank {ranks[r]}")
        expect(top_ids[r, : len(best)].tolist() == best, f"row {r}: the likeliest are {top_ids[r].tolist()} instead of {best}")
        expect_close(np.append(top_logprobs[r, : len(best)], logprobs[r]), np.append(logs[best], logs[chosen[r]]), 1e-6)


@check("beam_candidates", vocabulary=VOCABULARIES, k=[1, 8, 16])
def gives_the_likeliest_and_changes_nothing(subject: Subject, vocabulary: int, k: int) -> None:
    logits = np.round(2 * random(vocabulary, 3, vocabulary), 1)  # some are equal
    uploaded = subject.backend.upload(logits.copy())
    ids, logprobs = (subject.download(answer) for answer in subject.backend.beam_candidates(uploaded, k))
    for r, row in enumerate(logits.astype(np.float64)):
        best = sorted(range(vocabulary), key=lambda t: (-row[t], t))[:k]
        expect(ids[r].tolist() == best, f"row {r}: the likeliest are {ids[r].tolist()} instead of {best}")
        expect_close(logprobs[r], row[best] - row.max() - math.log(math.fsum(np.exp(row - row.max()))), 1e-6)
    expect_equal(subject.download(uploaded), logits, "the logits")
