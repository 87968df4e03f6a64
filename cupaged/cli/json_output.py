"""--json: a finished request as one JSON object."""

from __future__ import annotations

from typing import Any

from cupaged.outputs import CompletionOutput, RequestOutput, TokenCandidates


def as_object(index: int, source: str, output: RequestOutput) -> dict[str, Any]:
    """Times are seconds; logprobs and scores are there where there are any."""
    metrics = output.metrics
    value: dict[str, Any] = {"index": index}
    if source:
        value["source"] = source
    value |= {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [_answer(answer) for answer in output.outputs],
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": sum(len(answer.token_ids) for answer in output.outputs),
            "cached_tokens": output.num_cached_tokens,
        },
        "metrics": {
            "time_to_first_token": _since(metrics.arrival, metrics.first_token),
            "total_time": _since(metrics.arrival, metrics.finished),
            "num_preemptions": metrics.num_preemptions,
        },
    }
    if output.prompt_logprobs is not None:
        value["prompt_logprobs"] = [position and _candidates(position) for position in output.prompt_logprobs]
    return value


def _answer(answer: CompletionOutput) -> dict[str, Any]:
    value: dict[str, Any] = {
        "index": answer.index,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
    if answer.score is not None:
        value["score"] = answer.score
    if answer.cumulative_logprob is not None:
        value["cumulative_logprob"] = answer.cumulative_logprob
    if answer.logprobs is not None:
        value["logprobs"] = [_candidates(position) for position in answer.logprobs]
    return value


def _candidates(position: TokenCandidates) -> list[dict[str, Any]]:
    return [
        {"token_id": token, "token": c.decoded_token, "logprob": c.logprob, "rank": c.rank} for token, c in position.items()
    ]


def _since(start: float, end: float | None) -> float | None:
    return None if end is None else round(end - start, 6)
