"""What sampling promises beyond the probabilities: its random numbers, its state, its ties, its errors."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cupaged.backends import cpu_sampling, open_backend, sampling
from cupaged.backends.reference import ReferenceBackend
from cupaged.backends.sampling import TokenCounts
from cupaged.errors import InvariantError
from tests.support import cpu_choice
from tests.support.sampling import batch_of, random_logits

both = pytest.mark.parametrize("implementation", [sampling, cpu_choice], ids=["reference", "cpu"])


def ids(*tokens: int) -> np.ndarray[Any, Any]:
    return np.array(tokens, np.int32)


def draw(implementation: ModuleType, logits: Any, rows: list[dict[str, Any]], counts: TokenCounts | None = None) -> list[int]:
    """Tokens of rows that share one row of logits, or have one each."""
    table = np.array(np.broadcast_to(np.asarray(logits, np.float32), (len(rows), np.shape(logits)[-1])))
    return list(implementation.sample(table, batch_of(rows), counts or TokenCounts()).tolist())


# ---- the generator


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123, tests/kat_vectors
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_vectors(counter: str, key: str, expected: str) -> None:
    words = [np.array([[int(word, 16) for word in text.split()]], np.uint32) for text in (counter, key)]
    assert " ".join(f"{word:08x}" for word in sampling.philox4x32(*words)[0]) == expected


def test_uniform_is_keyed_by_the_seeds_halves_and_counts_position_and_index() -> None:
    seed, position, index = 0x299F31D0A4093822, 0x7FFFFFFF, 5
    word = sampling.philox4x32(np.array([[position, index, 0, 0]], np.uint32), np.array([[0xA4093822, 0x299F31D0]], np.uint32))[0, 0]
    expected = ((int(word) >> 8) + 0.5) / 2**24
    assert sampling.uniform(np.array([seed], np.uint64), ids(position), ids(index)).tolist() == [expected]


def test_uniforms_stay_inside_zero_and_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, expected in ((0, 2.0**-25), (0xFFFFFFFF, 1 - 2.0**-25)):
        monkeypatch.setattr(sampling, "philox4x32", lambda *_, word=word: np.full((1, 4), word, np.uint32))
        assert sampling.uniform(np.array([0], np.uint64), ids(0), ids(0)).tolist() == [expected]


# ---- the draws


@both
def test_draws_over_positions_follow_the_probabilities(implementation: ModuleType) -> None:
    logits, n = random_logits(5, 12, 1.0), 20_000
    counts = np.bincount(draw(implementation, logits, [{"seeds": 7, "positions": p} for p in range(n)]), minlength=12)
    expected = n * np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum()
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 31.3  # the 99.9 % quantile at 11 degrees of freedom


@both
@pytest.mark.parametrize("second", [{"indices": 1}, {"seeds": 8}, {"seeds": 7 + 2**32}, {"positions": 1}], ids=str)
def test_streams_of_index_seed_and_position_are_independent(implementation: ModuleType, second: dict[str, int]) -> None:
    n, side = 8_000, 4
    first = [{"seeds": 7, "positions": 2 * p, "indices": 0} for p in range(n)]
    other = [{**row, **second, "positions": row["positions"] + second.get("positions", 0)} for row in first]
    logits = np.zeros(side, np.float32)
    a, b = (np.array(draw(implementation, logits, rows)) for rows in (first, other))
    pairs = np.bincount(a * side + b, minlength=side * side)
    chi_square = ((pairs - n / side**2) ** 2 / (n / side**2)).sum()
    assert chi_square < 37.7  # the 99.9 % quantile at 15 degrees of freedom


@both
def test_a_token_depends_on_nothing_but_its_own_row(implementation: ModuleType) -> None:
    row = {"seeds": 2**63 + 5, "positions": 1000, "indices": 3, "top_p": 0.95, "temperature": 1.5}
    logits = random_logits(1, 500, 2.0)
    alone = draw(implementation, logits, [row])
    others = [{"temperature": 0}, {"seeds": 9, "top_k": 3}, {"bias": [(4, 50.0)]}, {"min_p": 0.5}]
    table = np.stack([random_logits(s, 500, 2.0) for s in (2, 3)] + [logits] + [random_logits(s, 500, 2.0) for s in (4, 5)])
    batched = draw(implementation, table, [*others[:2], {**row, "row_id": 40}, *others[2:]])
    assert batched[2:3] == alone


@both
def test_draws_reach_the_first_and_the_last_kept_token_and_skip_banned_ones(implementation: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sampling, cpu_sampling):
        monkeypatch.setattr(module, "uniform", lambda *_: np.array([2.0**-25, 0.5, 1 - 2.0**-25]))
    row = {"bias": [(0, -np.inf), (9, -np.inf)]}
    assert draw(implementation, np.zeros(10), [row] * 3) == [1, 5, 8]


@both
def test_hopeless_tokens_are_not_drawn_and_do_not_disturb(implementation: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sampling, cpu_sampling):
        monkeypatch.setattr(module, "uniform", lambda *_: np.array([2.0**-25, 1 - 2.0**-25]))
    logits = np.array([-3e38, -np.inf, 3e38, -60.0, -1e4], np.float32)
    assert draw(implementation, logits, [{}] * 2) == [2, 2]
    assert draw(implementation, logits, [{"temperature": 1e-30}] * 2) == [2, 2]


# ---- the filters' edges


def support(implementation: ModuleType, logits: Any, monkeypatch: pytest.MonkeyPatch, **row: Any) -> list[int]:
    """Every token that some of 512 evenly spaced uniform numbers give."""
    n = 512
    with monkeypatch.context() as patch:
        for module in (sampling, cpu_sampling):
            patch.setattr(module, "uniform", lambda *_: (np.arange(n) + 0.5) / n)
        return sorted(set(draw(implementation, logits, [row] * n)))


@both
def test_ties_stay_together(implementation: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = [1.0, 2.0, 1.0, 0.0, 1.0, -0.0]
    assert support(implementation, logits, monkeypatch, top_k=1) == [1]
    assert support(implementation, logits, monkeypatch, top_k=2) == [0, 1, 2, 4]
    assert support(implementation, logits, monkeypatch, top_k=4) == [0, 1, 2, 4]
    assert support(implementation, logits, monkeypatch, top_k=5) == [0, 1, 2, 3, 4, 5]
    assert support(implementation, logits, monkeypatch, top_p=0.5) == [0, 1, 2, 4]
    assert support(implementation, logits, monkeypatch, top_p=0.95) == [0, 1, 2, 3, 4, 5]
    assert support(implementation, logits, monkeypatch, min_p=0.36) == [0, 1, 2, 4]
    assert support(implementation, logits, monkeypatch, min_p=0.37) == [1]
    assert support(implementation, logits, monkeypatch, min_p=1.0) == [1]
    assert support(implementation, [0.5] * 7, monkeypatch, top_k=1, top_p=0.01, min_p=1.0) == list(range(7))


@both
def test_top_p_keeps_the_smallest_set_that_reaches_it(implementation: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.log([0.1, 0.4, 0.2, 0.3])
    expected = {0.39: [1], 0.41: [1, 3], 0.69: [1, 3], 0.71: [1, 2, 3], 0.89: [1, 2, 3], 0.91: [0, 1, 2, 3], 1.0: [0, 1, 2, 3]}
    for top_p, kept in expected.items():
        assert support(implementation, logits, monkeypatch, top_p=top_p) == kept
    exactly_half = [0.0, 0.0, -40.0]  # 1/2 + 1/2: two ties reach 1/2 together, and all of it
    assert support(implementation, exactly_half, monkeypatch, top_p=0.5) == [0, 1]
    assert support(implementation, logits, monkeypatch, top_p=1e-30) == [1]
    assert support(implementation, logits, monkeypatch, top_p=1e-50) == [1]  # 0 in float32


@both
def test_top_p_counts_what_min_p_and_top_k_left(implementation: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert support(implementation, logits, monkeypatch, top_p=0.55) == [0, 1]
    assert support(implementation, logits, monkeypatch, top_p=0.55, top_k=2) == [0]  # 4/7 of what is left
    assert support(implementation, logits, monkeypatch, top_p=0.55, min_p=0.6) == [0]
    assert support(implementation, logits, monkeypatch, top_p=0.6, top_k=2) == [0, 1]
    assert support(implementation, logits, monkeypatch, top_k=3, min_p=0.6) == [0, 1]


@both
def test_temperature_comes_before_min_p(implementation: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.log([0.64, 0.36])
    assert support(implementation, logits, monkeypatch, min_p=0.7) == [0]
    assert support(implementation, logits, monkeypatch, min_p=0.7, temperature=2.0) == [0, 1]


@both
def test_bias_comes_before_penalties(implementation: ModuleType) -> None:
    counts = TokenCounts()
    counts.set_history(0, ids(0), ids())
    row = {"temperature": 0, "repetition": 2.0, "bias": [(0, 3.0)]}
    assert draw(implementation, [-1.0, 1.5], [row], counts) == [1]  # (-1 + 3) / 2 = 1; the other order gives -2 + 3


@both
def test_greedy_takes_the_lowest_id_among_equals(implementation: ModuleType) -> None:
    assert draw(implementation, [[0.0, 3.0, 3.0], [-0.0, 0.0, -1.0], [-np.inf, -5.0, -5.0]], [{"temperature": 0}] * 3) == [1, 0, 1]
    wide = np.zeros(5000, np.float32)
    wide[[1023, 1024, 4999]] = 1.0
    assert draw(implementation, wide, [{"temperature": 0}]) == [1023]


@both
def test_a_token_may_be_biased_and_banned_at_once(implementation: ModuleType) -> None:
    for bias in ([(1, 100.0), (1, -np.inf)], [(1, -np.inf), (1, 100.0)]):
        assert draw(implementation, [0.0, 1.0, 0.5], [{"temperature": 0, "bias": bias}]) == [2]
    assert draw(implementation, [0.0, 1.0, 0.5], [{"temperature": 0, "bias": [(0, 0.6), (0, 0.6)]}]) == [0]


# ---- penalties and their state


@both
@pytest.mark.parametrize(
    ("penalty", "prompt", "output", "expected"),
    [
        ({"repetition": 3.0}, [0], [], 1),  # counts the prompt
        ({"repetition": 3.0}, [9], [0], 1),  # and the output
        ({"repetition": 3.0}, [9], [], 0),
        ({"presence": 2.0}, [0], [], 0),  # the output alone
        ({"presence": 2.0}, [9], [0], 1),
        ({"frequency": 2.0}, [0], [], 0),
        ({"frequency": 2.0}, [9], [0], 1),
        ({"frequency": 0.6}, [9], [0], 0),  # once is 0.6, twice is 1.2
        ({"frequency": 0.6}, [9], [0, 0], 1),
        ({"presence": 0.6}, [9], [0, 0], 0),  # once, however often
        ({"repetition": 1.9}, [0, 0, 0], [0, 0], 0),  # once, however often
    ],
    ids=str,
)
def test_what_each_penalty_counts(implementation: ModuleType, penalty: dict[str, float], prompt: list[int], output: list[int], expected: int) -> None:
    counts = TokenCounts()
    counts.set_history(0, ids(*prompt), ids(*output))
    logits = [2.0, 1.0, *[-9.0] * 8]
    assert draw(implementation, logits, [{"temperature": 0, **penalty}], counts) == [expected]


@both
def test_chosen_tokens_count_for_the_next_step(implementation: ModuleType) -> None:
    counts = TokenCounts()
    counts.set_history(3, ids(5), ids())
    counts.set_history(0, ids(5), ids())
    rows = [{"temperature": 0, "frequency": 1.0, "row_id": 3}, {"temperature": 0}, {"temperature": 0, "presence": 1.5, "row_id": 0}]
    logits = [2.0, 1.6, 0.9, 0.0, 0.0, 0.0]
    steps = [draw(implementation, logits, rows, counts) for _ in range(4)]
    assert steps == [[0, 0, 0], [1, 0, 1], [0, 0, 2], [2, 0, 0]]


@both
def test_a_row_without_penalties_needs_and_leaves_no_state(implementation: ModuleType) -> None:
    counts = TokenCounts()
    counts.set_history(1, ids(0), ids(1))
    draw(implementation, [0.0, 1.0], [{"row_id": 10**9}, {"row_id": 1}, {"row_id": -1, "temperature": 0}], counts)
    assert counts.outputs.size == counts.in_prompt.size == 0


@both
def test_a_new_history_replaces_the_old_one(implementation: ModuleType) -> None:
    counts, logits = TokenCounts(), [2.0, 1.0, 0.0]
    row = {"temperature": 0, "frequency": 2.0, "repetition": 3.0}
    for prompt, output, expected in (([2], [0, 0], 1), ([2], [], 0), ([0], [], 1), ([2], [], 0), ([2], [1], 0), ([0], [1], 0)):
        counts.set_history(0, ids(*prompt), ids(*output))
        assert draw(implementation, logits, [row], counts) == [expected]


@both
def test_a_history_is_the_one_of_its_call(implementation: ModuleType) -> None:
    counts, prompt, output = TokenCounts(), ids(2), ids(2)
    counts.set_history(0, prompt, output)
    prompt[0] = output[0] = 0
    assert draw(implementation, [2.0, 1.0, 0.0], [{"temperature": 0, "repetition": 3.0}], counts) == [0]


@both
def test_rows_appear_in_any_order_and_keep_their_counts(implementation: ModuleType) -> None:
    counts = TokenCounts()
    counts.set_history(1, ids(9), ids(0, 0))
    row = {"temperature": 0, "frequency": 0.6}
    logits = [1.0, 0.5, *[-9.0] * 8]
    assert draw(implementation, logits, [{**row, "row_id": 1}], counts) == [1]
    counts.set_history(70, ids(9), ids())
    counts.set_history(0, ids(9), ids(0))
    assert draw(implementation, logits, [{**row, "row_id": r} for r in (70, 1, 0)], counts) == [0, 1, 1]
    assert counts.outputs[[0, 1, 70], :2].tolist() == [[1, 1], [2, 2], [1, 0]]


@both
def test_another_vocabulary_forgets_all_rows(implementation: ModuleType) -> None:
    counts = TokenCounts()
    row = {"temperature": 0, "frequency": 2.0}
    for row_id in (0, 1):
        counts.set_history(row_id, ids(0), ids(0))
    assert draw(implementation, [2.0, 1.0], [row, row], counts) == [1, 1]
    counts.set_history(0, ids(4), ids(4))
    assert draw(implementation, [0.0, 0.0, 0.0, 1.0, 2.0], [row], counts) == [3]
    with pytest.raises(InvariantError, match="row 1 has penalties, but nobody set its history"):
        draw(implementation, [0.0, 0.0, 0.0, 1.0, 2.0], [row, row], counts)


@both
def test_penalties_without_a_history_are_a_bug(implementation: ModuleType) -> None:
    counts = TokenCounts()
    counts.set_history(0, ids(1), ids())
    with pytest.raises(InvariantError, match="row 4 has penalties, but nobody set its history"):
        draw(implementation, [0.0, 1.0], [{"presence": 1.0, "row_id": 4}], counts)


@both
def test_histories_hold_tokens_of_the_vocabulary(implementation: ModuleType) -> None:
    for prompt, output in ((ids(0, 2), ids()), (ids(), ids(-1))):
        counts = TokenCounts()
        counts.set_history(0, prompt, output)
        with pytest.raises(InvariantError, match=r"token ids .* are not within 0 \.\. 1"):
            draw(implementation, [0.0, 1.0], [{"presence": 1.0}], counts)
    with pytest.raises(InvariantError, match="row id -1 is negative"):
        TokenCounts().set_history(-1, ids(0), ids())


# ---- damaged input


@both
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("damage", [np.nan, -np.nan, np.inf])
def test_damaged_logits_are_refused(implementation: ModuleType, temperature: float, damage: float) -> None:
    counts = TokenCounts()
    counts.set_history(0, ids(0), ids())
    row = {"temperature": temperature, "presence": 1.0}
    for place in (0, 1024, 2999):
        table = np.stack([random_logits(1, 3000, 1.0), random_logits(2, 3000, 1.0)])
        table[1, place] = damage
        with pytest.raises(InvariantError, match="row 1: the logits hold NaN or infinity"):
            draw(implementation, table, [row, {"temperature": temperature}], counts)
        with pytest.raises(InvariantError, match="row 1: the logits hold NaN or infinity"):
            implementation.token_logprobs(table, ids(0, 0), 2)
    assert counts.outputs.sum() == 0  # a refused step counts nothing


@both
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_every_token_banned_is_refused(implementation: ModuleType, temperature: float) -> None:
    row = {"temperature": temperature, "bias": [(token, -np.inf) for token in range(3)]}
    with pytest.raises(InvariantError, match="row 1: no token is left to choose from"):
        draw(implementation, [0.0, 1.0, 2.0], [{}, row])


@both
def test_a_batch_that_does_not_fit_is_refused(implementation: ModuleType) -> None:
    with pytest.raises(InvariantError, match="2 rows of logits, but parameters of 1"):
        implementation.sample(np.zeros((2, 3), np.float32), batch_of([{}]), TokenCounts())
    for token in (-1, 3):
        with pytest.raises(InvariantError, match=r"are not within 0 \.\. 2"):
            draw(implementation, np.zeros(3), [{"bias": [(token, 1.0)]}])
        with pytest.raises(InvariantError, match=r"are not within 0 \.\. 2"):
            implementation.token_logprobs(np.zeros((1, 3), np.float32), ids(token), 1)


@both
def test_no_rows_are_fine(implementation: ModuleType) -> None:
    tokens = implementation.sample(np.zeros((0, 5), np.float32), batch_of([]), TokenCounts())
    assert tokens.shape == (0,)
    assert tokens.dtype == np.int32
    assert [a.shape for a in implementation.token_logprobs(np.zeros((0, 5), np.float32), ids(), 2)] == [(0,), (0,), (0, 2), (0, 2)]


# ---- logprobs


@both
@pytest.mark.parametrize(("vocab_size", "k"), [(1, 1), (17, 0), (17, 5), (17, 17), (1025, 3), (5000, 100)])
def test_logprobs_are_log_softmax_in_float64(implementation: ModuleType, vocab_size: int, k: int) -> None:
    rows = 6
    logits = np.stack([random_logits(seed, vocab_size, 0.5 + 3 * seed) for seed in range(rows)])
    chosen = ids(*np.random.RandomState(9).randint(vocab_size, size=rows))
    before = logits.copy()
    logprobs, ranks, top_ids, top_logprobs = implementation.token_logprobs(logits, chosen, k)
    assert (logits == before).all()
    wide = logits.astype(np.float64)
    expected = wide - np.logaddexp.reduce(wide, axis=1, keepdims=True)
    np.testing.assert_allclose(logprobs, expected[np.arange(rows), chosen], rtol=1e-6, atol=1e-12)
    order = np.lexsort((np.broadcast_to(np.arange(vocab_size), wide.shape), -wide), axis=1)[:, :k]
    assert top_ids.tolist() == order.tolist()
    np.testing.assert_allclose(top_logprobs, np.take_along_axis(expected, order, 1), rtol=1e-6, atol=1e-12)
    assert ranks.tolist() == [1 + sum(x > row[c] for x in row) for row, c in zip(logits.tolist(), chosen, strict=True)]
    assert [a.dtype for a in (logprobs, ranks, top_ids, top_logprobs)] == [np.float32, np.int32, np.int32, np.float32]


@both
def test_equal_logits_come_lower_id_first_and_share_a_rank(implementation: ModuleType) -> None:
    logits = np.array([[1.0, 3.0, 1.0, 3.0, 2.0, 1.0]], np.float32)
    _, ranks, top_ids, top_logprobs = implementation.token_logprobs(logits, ids(5), 5)
    assert top_ids.tolist() == [[1, 3, 4, 0, 2]]
    assert ranks.tolist() == [4]
    assert top_logprobs[0, 0] == top_logprobs[0, 1]
    for token, rank in enumerate((4, 1, 4, 1, 3, 4)):
        assert implementation.token_logprobs(logits, ids(token), 0)[1].tolist() == [rank]
    rising = np.repeat(np.arange(1500, dtype=np.float32), 2)[None]
    assert implementation.token_logprobs(rising, ids(0), 5)[2].tolist() == [[2998, 2999, 2996, 2997, 2994]]


@both
def test_candidates_of_beams_are_the_likeliest_tokens(implementation: ModuleType) -> None:
    logits = np.stack([random_logits(seed, 700, 4.0) for seed in range(3)])
    before = logits.copy()
    _, _, top_ids, top_logprobs = implementation.token_logprobs(logits, ids(0, 0, 0), 16)
    found, logprobs = implementation.beam_candidates(logits, 16)
    assert np.array_equal(found, top_ids)
    assert np.array_equal(logprobs, top_logprobs)
    assert (found.dtype, logprobs.dtype) == (np.int32, np.float32)
    assert (logits == before).all()


@both
def test_impossible_tokens_have_minus_infinity_and_missing_ones_are_marked(implementation: ModuleType) -> None:
    logits = np.array([[-np.inf, 0.0, -np.inf]], np.float32)
    logprobs, ranks, top_ids, top_logprobs = implementation.token_logprobs(logits, ids(2), 5)
    assert logprobs.tolist() == [-np.inf]
    assert ranks.tolist() == [2]
    assert top_ids.tolist() == [[1, 0, 2, -1, -1]]
    assert top_logprobs.tolist() == [[0.0, *[-np.inf] * 4]]


def test_the_reference_backend_samples_by_this_definition() -> None:
    backend = ReferenceBackend()
    backend.set_history(2, ids(0), ids(1))
    row = {"temperature": 0, "repetition": 2.0, "row_id": 2}
    logits = np.array([[2.0, 1.9, 1.5]], np.float32)
    assert backend.sample(logits.copy(), batch_of([row])).tolist() == [2]
    assert backend.sample(logits.copy(), batch_of([row])).tolist() == [0]  # 2 has been counted: 1, 0.95, 0.75
    assert backend.token_logprobs(logits, ids(1), 1)[1].tolist() == [2]


def test_rows_of_logits_may_lie_apart() -> None:
    """Rows of a whole number of pages do, on a CPU; tokens are chosen from where they lie."""
    backend = open_backend("cpu", 2)
    apart, close = backend.empty((5, 1024), np.float32), backend.empty((5, 1000), np.float32)
    assert apart.strides == (4096 + 64, 4)
    assert close.strides == (4000, 4)
    apart[:] = [random_logits(seed, 1024, 3.0) for seed in range(5)]
    backend.set_history(1, ids(), ids(0, 5))
    rows = [{"temperature": 0}, {"temperature": 0.7, "seed": 3}, {"temperature": 1.0, "top_k": 20, "seed": 5}, {"repetition": 1.3, "row_id": 1}, {"temperature": 0}]
    counts = TokenCounts()
    counts.set_history(1, ids(), ids(0, 5))
    expected = sampling.sample(np.array(apart), batch_of(rows), counts)
    reports = [sampling.token_logprobs(np.array(apart), expected, 4), backend.token_logprobs(apart, expected, 4)]
    for one, other in zip(*reports, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    assert backend.sample(apart, batch_of(rows)).tolist() == expected.tolist()
    assert apart[3].tolist() != random_logits(3, 1024, 3.0).tolist()  # penalised where it lies: no copy was made
