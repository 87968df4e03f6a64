"""Workloads: the same seed gives the same requests, lengths have the published means, and each mix shares what it should."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cupaged.errors import WorkloadError
from cupaged.workloads import arrivals
from cupaged.workloads.generators import CODE_SHARE, GENERATORS, make
from cupaged.workloads.lengths import ALPACA, SHAREGPT, Dataset, Lengths
from cupaged.workloads.request import TraceRequest, Workload
from cupaged.workloads.trace import read_jsonl, write_jsonl

VOCABULARY = 1000


def request(arrival: float = 0.0, prompt: int = 3, output: int = 2, **more: object) -> TraceRequest:
    return TraceRequest(arrival, np.arange(prompt, dtype=np.int32), output, **more)  # type: ignore[arg-type]


def same(a: Workload, b: Workload) -> bool:
    def plain(w: Workload) -> object:
        return w.name, w.seed, w.max_len, [(r.arrival, r.prompt.tolist(), r.num_output, r.session, r.n, r.beams) for r in w.requests]

    return plain(a) == plain(b)


# Values


def test_a_workload_is_sorted_and_describes_itself() -> None:
    workload = Workload.of("mine", 7, [request(3.0, 5, 4), request(1.0, 3, 2, n=2, session="a"), request(2.0, 1, 6, beams=3, session="a")])
    assert [r.arrival for r in workload.requests] == [1.0, 2.0, 3.0]
    assert workload.describe() == {
        "name": "mine",
        "seed": 7,
        "max_len": 0,
        "requests": 3,
        "prompt_tokens": 9,
        "output_tokens": 4 + 2 * 2 + 3 * 6,
        "mean_prompt": 3.0,
        "mean_output": 4.0,
        "longest": 9,
        "sessions": 1,
        "seconds": 2.0,
        "rate": 1.0,
    }


def test_requests_can_be_moved_in_time() -> None:
    workload = Workload.of("mine", 7, [request(3.0, 5), request(1.0, 3)], 64).arriving([0.5, 4.0])
    assert [(r.arrival, r.num_prompt) for r in workload.requests] == [(0.5, 3), (4.0, 5)]
    assert (workload.name, workload.seed, workload.max_len) == ("mine", 7, 64)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"arrival": -1.0}, "from 0 on"),
        ({"arrival": float("nan")}, "from 0 on"),
        ({"prompt": 0}, "empty"),
        ({"output": 0}, "at least 1"),
        ({"n": 0}, "at least 1"),
        ({"n": 2, "beams": 2}, "samples or beams"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(bad: dict[str, object], says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        request(**bad)  # type: ignore[arg-type]


# Lengths and arrivals


@pytest.mark.parametrize("most", [700, 2048, 1 << 20])
@pytest.mark.parametrize("lengths", [SHAREGPT.prompt, SHAREGPT.output, ALPACA.prompt, ALPACA.output], ids=str)
def test_lengths_have_the_published_mean_after_clipping(lengths: Lengths, most: int) -> None:
    drawn = lengths.draw(40_000, most, np.random.default_rng(1))
    assert drawn.dtype == np.int32
    assert drawn.min() >= 1
    assert drawn.max() <= most
    assert drawn.mean() == pytest.approx(lengths.mean, rel=0.02)


def test_the_spread_is_the_one_that_the_papers_table_implies() -> None:
    prompts, outputs = (part.draw(200_000, 1 << 20, np.random.default_rng(i)).astype(float) for i, part in enumerate((SHAREGPT.prompt, SHAREGPT.output)))
    assert 1 + 2 * prompts.mean() * outputs.mean() / (outputs**2).mean() == pytest.approx(38.2 / 25.2, rel=0.03)


def test_lengths_are_heavy_tailed() -> None:
    drawn = SHAREGPT.output.draw(20_000, 1 << 20, np.random.default_rng(1))
    assert np.median(drawn) < 0.8 * drawn.mean()
    assert np.percentile(drawn, 99) > 4 * drawn.mean()


def test_a_mean_that_clipping_forbids_is_refused() -> None:
    with pytest.raises(WorkloadError, match="raise the longest"):
        Lengths(300).draw(5, 200, np.random.default_rng(0))


def test_a_scaled_dataset_keeps_its_shape() -> None:
    small = SHAREGPT.scaled(1 / 8)
    assert small.prompt.mean == pytest.approx(161.31 / 8)
    assert small.output == Lengths(337.99 / 8)
    assert ALPACA.scaled(0.001) == Dataset(Lengths(1.0), Lengths(1.0))


@pytest.mark.parametrize("variation", [1.0, 3.0])
def test_arrivals_have_their_rate_and_spread(variation: float) -> None:
    times = arrivals.bursty(4.0, 50_000, np.random.default_rng(3), variation)
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_all_at_once_is_all_zero() -> None:
    assert arrivals.times(None, 3, np.random.default_rng(0)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(WorkloadError, match="positive number of requests a second"):
        arrivals.poisson(rate, 3, np.random.default_rng(0))


# Mixes


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("rate", [None, 5.0])
def test_every_mix_is_seeded_and_fits(name: str, rate: float | None) -> None:
    workload = make(name, 60, rate, 11, VOCABULARY, 1024)
    assert same(workload, make(name, 60, rate, 11, VOCABULARY, 1024))
    assert not same(workload, make(name, 60, rate, 12, VOCABULARY, 1024))
    assert workload.name == name
    assert len(workload.requests) == 60
    for r in workload.requests:
        assert r.num_tokens <= 1024
        assert r.prompt.dtype == np.int32
        assert 0 <= r.prompt.min() <= r.prompt.max() < VOCABULARY
    assert (workload.requests[-1].arrival > 0) == (rate is not None)


@pytest.mark.parametrize("name", GENERATORS)
def test_every_mix_works_with_the_smallest_numbers(name: str) -> None:
    if name in ("sharegpt", "alpaca"):
        with pytest.raises(WorkloadError, match="raise the longest"):
            make(name, 3, None, 0, 2, 16)
        return
    assert all(r.num_tokens <= 16 for r in make(name, 3, None, 0, 2, 16).requests)


@pytest.mark.parametrize(("name", "prompt", "output"), [("sharegpt", 161.31, 337.99), ("alpaca", 19.31, 58.45)])
def test_datasets_have_the_published_means(name: str, prompt: float, output: float) -> None:
    told = make(name, 10_000, None, 0, VOCABULARY, 2048).describe()
    assert told["mean_prompt"] == pytest.approx(prompt, rel=0.03)
    assert told["mean_output"] == pytest.approx(output, rel=0.03)


def test_a_code_batch_fills_its_share_of_the_longest_sequence() -> None:
    workload = make("code_batch", 5000, None, 0, VOCABULARY, 1024)
    assert np.mean([r.num_tokens for r in workload.requests]) / 1024 == pytest.approx(CODE_SHARE, rel=0.03)


def test_system_prompts_are_shared_by_their_session_alone() -> None:
    heads: dict[str | None, list[int]] = {}
    for r in make("shared_prompt", 40, None, 5, VOCABULARY, 256).requests:
        assert heads.setdefault(r.session, r.prompt[:128].tolist()) == r.prompt[:128].tolist()
    assert len({tuple(h) for h in heads.values()}) == len(heads) > 3


def test_a_turn_begins_with_all_of_the_turn_before_and_its_answer() -> None:
    last: dict[str | None, TraceRequest] = {}
    turns = 0
    for r in make("chats", 80, None, 5, VOCABULARY, 512).requests:
        before = last.get(r.session)
        if before is not None:
            turns += 1
            assert r.prompt[: before.num_prompt].tolist() == before.prompt.tolist()
            assert r.num_prompt > before.num_prompt + before.num_output
        last[r.session] = r
    assert turns > 30


def test_few_shot_prompts_are_a_tree_of_two_levels() -> None:
    requests = make("few_shot_trees", 60, None, 5, VOCABULARY, 400).requests
    assert len({tuple(r.prompt[:100].tolist()) for r in requests}) == 4
    assert len({tuple(r.prompt[:200].tolist()) for r in requests}) == len({r.session for r in requests}) == 16
    assert len({tuple(r.prompt.tolist()) for r in requests}) == 60


def test_floods_begin_alike_and_never_come_again() -> None:
    requests = make("adversarial_prefixes", 48, None, 5, VOCABULARY, 320).requests
    floods = [r for r in requests if r.session == "flood"]
    assert len(floods) == 32
    assert len({tuple(r.prompt[:20].tolist()) for r in floods}) == 1
    assert len({tuple(r.prompt[:24].tolist()) for r in floods}) == 32
    wanted = [r for r in requests if r.session != "flood"]
    assert len({tuple(r.prompt[:160].tolist()) for r in wanted}) == 4


@pytest.mark.parametrize(
    ("name", "count", "rate", "says"),
    [("luck", 3, None, "there are sharegpt, alpaca"), ("alpaca", 0, None, "at least 1 request"), ("alpaca", 3, 0.0, "positive number")],
)
def test_a_mix_that_makes_no_sense_is_refused(name: str, count: int, rate: float | None, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        make(name, count, rate, 0, VOCABULARY, 512)


# Traces


@pytest.mark.parametrize("name", GENERATORS)
def test_a_trace_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    workload = make(name, 20, 3.0, 4, VOCABULARY, 1024)
    write_jsonl(tmp_path / "t.jsonl", workload)
    assert same(read_jsonl(tmp_path / "t.jsonl", VOCABULARY), workload)


def test_ones_own_trace(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"arrival": 2, "prompt": [1, 2], "output": 3, "beams": 2}\n\n{"prompt_tokens": 5, "output": 1, "n": 4, "session": "s"}\n')
    workload = read_jsonl(path, 50, seed=9)
    first, second = workload.requests
    assert (workload.name, workload.seed) == ("own", 9)
    assert (first.arrival, first.num_prompt, first.n, first.session) == (0.0, 5, 4, "s")
    assert (second.arrival, second.prompt.tolist(), second.num_output, second.beams) == (2.0, [1, 2], 3, 2)
    assert same(workload, read_jsonl(path, 50, seed=9))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON object"),
        ('{"prompt": [1], "output": 1, "size": 2}', "unknown key 'size'"),
        ('{"output": 1}', "either prompt"),
        ('{"prompt": [1], "prompt_tokens": 1, "output": 1}', "either prompt"),
        ('{"prompt": "text", "output": 1}', "list of token ids"),
        ('{"prompt": [50], "output": 1}', "those are 0 .. 49"),
        ('{"prompt": [true], "output": 1}', "no token id"),
        ('{"prompt": [], "output": 1}', "empty"),
        ('{"prompt": [1]}', "output is a whole number from 1 on, not missing"),
        ('{"prompt": [1], "output": 0}', "output is a whole number from 1 on, not 0"),
        ('{"prompt_tokens": 1e9, "output": 1}', "prompt_tokens is a whole number"),
        ('{"prompt": [1], "output": 1, "arrival": "now"}', "number of seconds"),
        ('{"prompt": [1], "output": 1, "arrival": -2}', "from 0 on"),
        ('{"prompt": [1], "output": 1, "session": 3}', "session is a text"),
        ('{"prompt": [1], "output": 1, "n": 2, "beams": 2}', "samples or beams"),
    ],
)
def test_a_bad_line_is_named(line: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": [1], "output": 1}\n' + line + "\n")
    with pytest.raises(WorkloadError, match=says) as refusal:
        read_jsonl(path, 50)
    assert str(refusal.value).startswith(f"{path}, line 2: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("content", "says"), [(b"", "holds no request"), (b"\xff\xfe\x00", "not a text in UTF-8")])
def test_a_file_that_is_no_trace(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    path.write_bytes(content)
    with pytest.raises(WorkloadError, match=says):
        read_jsonl(path, 50)
