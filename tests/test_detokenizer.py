"""The incremental detokenizer and stop strings: however an answer is cut, what is shown is the same."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupaged.errors import RequestError
from cupaged.text.detokenizer import Detokenizer
from cupaged.text.stop import StopChecker
from cupaged.text.tokenizer import Tokenizer
from tests.support.text import byte_level_metadata, gguf_tokenizer, sentence_piece_metadata, stored

BYTE_LEVEL = gguf_tokenizer(byte_level_metadata(extra=(("<bos>", 3), ("<tool>", 4))))
SENTENCE_PIECE = gguf_tokenizer(sentence_piece_metadata())
TOKENIZERS = st.sampled_from([BYTE_LEVEL, SENTENCE_PIECE])
TEXTS = ("I love 🍕 and 👩‍👩‍👧‍👦", "船は二十隻、猫", "  two spaces", "\n\n\nlines\n", "größer", "한국어", "7 boats", " ", "a\u0301")


@st.composite
def answers(draw: st.DrawFn) -> tuple[Tokenizer, list[list[int]]]:
    """A tokenizer, and ids cut into pushes: real texts, and any ids, broken characters and special tokens among them."""
    tokenizer = draw(TOKENIZERS)
    byte_ids = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1 and tokenizer.token_text(i) == "\ufffd"]
    some = st.one_of(
        st.integers(0, tokenizer.vocab_size - 1).map(lambda i: [i]),
        st.sampled_from(byte_ids).map(lambda i: [i]),
        st.sampled_from(sorted(tokenizer.special_ids)).map(lambda i: [i]),
        st.sampled_from(TEXTS).map(lambda text: tokenizer.encode(text, add_special_tokens=False)),
    )
    ids = list(itertools.chain.from_iterable(draw(st.lists(some, max_size=12))))
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    return tokenizer, [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])]


def stream(tokenizer: Tokenizer, prompt: list[int], pushes: list[list[int]], skip: bool) -> str:
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    return "".join([detokenizer.push(ids) for ids in pushes] + [detokenizer.flush()])


class TestDetokenizer:
    @given(answers(), st.booleans())
    def test_deltas_join_to_the_full_decode(self, answer: tuple[Tokenizer, list[list[int]]], skip: bool) -> None:
        tokenizer, pushes = answer
        ids = list(itertools.chain.from_iterable(pushes))
        assert stream(tokenizer, [], pushes, skip) == tokenizer.decode(ids, skip)

    @given(answers(), st.booleans())
    def test_after_a_prompt_nothing_is_stripped(self, answer: tuple[Tokenizer, list[list[int]]], skip: bool) -> None:
        """The answer is what decoding prompt and answer together adds to the prompt's text."""
        tokenizer, pushes = answer
        prompt = tokenizer.encode("The boats")
        ids = list(itertools.chain.from_iterable(pushes))
        full, before = tokenizer.decode(prompt + ids, skip), tokenizer.decode(prompt, skip)
        assert full == before + stream(tokenizer, prompt, pushes, skip)

    @given(TOKENIZERS, st.text())
    def test_real_text_token_by_token_is_never_broken(self, tokenizer: Tokenizer, text: str) -> None:
        text = text.encode("utf-8", "ignore").decode().replace("\ufffd", "").replace("▁", " ")
        detokenizer = Detokenizer(tokenizer)
        deltas = [detokenizer.push([i]) for i in tokenizer.encode(text)]
        assert "".join(deltas) == text.replace("<bos>", "").replace("<s>", "")
        assert all("\ufffd" not in delta for delta in deltas)
        assert detokenizer.flush() == ""

    def test_an_emoji_appears_with_its_last_byte(self) -> None:
        ids = BYTE_LEVEL.encode("🍕")
        assert len(ids) == 4
        detokenizer = Detokenizer(BYTE_LEVEL)
        assert [detokenizer.push([i]) for i in ids] == ["", "", "", "🍕"]

    def test_broken_bytes_do_not_hold_the_text_up(self) -> None:
        half = BYTE_LEVEL.encode("🍕")[:2]
        detokenizer = Detokenizer(BYTE_LEVEL)
        assert detokenizer.push(half) == ""
        assert detokenizer.push(BYTE_LEVEL.encode("a")) == "\ufffda"
        assert detokenizer.push(half) == ""
        assert detokenizer.flush() == "\ufffd"

    @pytest.mark.parametrize(("prompt", "skip", "expected"), [([], True, "The"), ([1], True, "The"), ([1], False, " The"), ([1, 330], True, " The")])
    def test_leading_space_of_sentencepiece(self, prompt: list[int], skip: bool, expected: str) -> None:
        """Kept where the prompt has visible text before it; BOS alone is not visible, unless special tokens are."""
        assert stream(SENTENCE_PIECE, prompt, [[i] for i in SENTENCE_PIECE.encode("The", False)], skip) == expected

    def test_special_tokens(self) -> None:
        ids = BYTE_LEVEL.encode("a<bos><tool>b")
        assert stream(BYTE_LEVEL, [], [ids], True) == "a<tool>b"
        assert stream(BYTE_LEVEL, [], [ids], False) == "a<bos><tool>b"

    def test_id_outside_the_vocabulary(self) -> None:
        with pytest.raises(RequestError, match="not in the vocabulary"):
            Detokenizer(BYTE_LEVEL).push([10**6])


def watch(stop: tuple[str, ...], pieces: list[str], include: bool = False, min_pieces: int = 0) -> tuple[str, str | None]:
    """What is shown in all, and which stop string ended it; the first `min_pieces` pieces may not stop."""
    checker, shown = StopChecker(stop, include), ""
    for index, piece in enumerate(pieces):
        text, match = checker.push(piece, may_stop=index >= min_pieces)
        shown += text
        if match is not None:
            return shown, match
    return shown + checker.flush(), None


def first_end(text: str, stop: tuple[str, ...], behind: int = 0) -> tuple[int, int] | None:
    """Start and end of the match that ends first, behind `behind` characters; by trying every end."""
    for end in range(behind + 1, len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return min(starts), end
    return None


LETTERS = st.text("abc", max_size=14)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=3).map(tuple)


class TestStopChecker:
    def test_nothing_of_a_stop_string_is_shown(self) -> None:
        checker = StopChecker(("DEFGHIJ",))
        assert [checker.push(piece) for piece in ("ABC", "DEF", "G", "HI")] == [("ABC", None), *[("", None)] * 3]
        assert checker.push("JKL") == ("", "DEFGHIJ")
        assert checker.flush() == ""

    def test_held_text_is_shown_when_the_match_fails(self) -> None:
        checker = StopChecker(("DEFGHIJ",))
        assert [checker.push(piece)[0] for piece in ("DEF", "GHI", "X")] == ["", "", "DEFGHIX"]
        assert (checker.push("D"), checker.flush(), checker.flush()) == (("", None), "D", "")

    @pytest.mark.parametrize("include", [False, True])
    def test_a_stop_inside_a_token_trims_it(self, include: bool) -> None:
        assert watch(("\n\n",), ["one", "\n\ntwo"], include) == ("one\n\n" if include else "one", "\n\n")

    def test_only_what_may_still_match_is_held(self) -> None:
        checker = StopChecker(("abcd", "bx"))
        assert checker.push("zab") == ("z", None)
        assert checker.push("b") == ("ab", None)
        assert checker.push("y") == ("by", None)

    def test_a_stop_string_that_may_not_stop_is_not_held(self) -> None:
        checker = StopChecker(("STOP",))
        assert checker.push("a STOP", may_stop=False) == ("a STOP", None)
        assert checker.push(" STOP") == (" ", "STOP")

    def test_without_stop_strings_text_passes(self) -> None:
        assert StopChecker().push("text") == ("text", None)

    @pytest.mark.parametrize("pieces", [["abcd"], ["a", "b", "c", "d"], ["ab", "cd"]])
    def test_the_match_that_ends_first_wins(self, pieces: list[str]) -> None:
        assert watch(("abcd", "bc"), pieces) == ("a", "bc")
        assert watch(("bc", "abc"), pieces) == ("", "abc")  # of those that end together, the longest

    @given(LETTERS, STOPS, st.booleans(), st.data())
    def test_every_split_shows_the_same(self, text: str, stop: tuple[str, ...], include: bool, data: st.DataObject) -> None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        found = first_end(text, stop)
        expected = (text, None) if found is None else (text[: found[include]], text[found[0] : found[1]])
        assert watch(stop, pieces, include) == expected

    @given(LETTERS, LETTERS, STOPS)
    def test_no_stop_before_min_tokens(self, early: str, late: str, stop: tuple[str, ...]) -> None:
        """A match must end after the early text; it may begin in it."""
        found = first_end(early + late, stop, behind=len(early))
        shown, match = watch(stop, [*early, *late], min_pieces=len(early))
        if found is None:
            assert (shown, match) == (early + late, None)
        else:
            assert match == (early + late)[found[0] : found[1]]
            assert shown == (early + late)[: found[0]]

    @given(st.lists(LETTERS, max_size=6), STOPS)
    def test_no_more_is_held_than_a_stop_string_less_one(self, pieces: list[str], stop: tuple[str, ...]) -> None:
        checker, given_in, shown = StopChecker(stop), "", ""
        for piece in pieces:
            text, match = checker.push(piece)
            given_in, shown = given_in + piece, shown + text
            if match is not None:
                return
            held = given_in[len(shown) :]
            assert held == "" or any(s.startswith(held) and s != held for s in stop)


def test_stored_streams_join() -> None:
    for ids, _ in stored("text_sentencepiece.json")["decoded"]:
        assert stream(SENTENCE_PIECE, [], [[i] for i in ids], True) == SENTENCE_PIECE.decode(ids)
