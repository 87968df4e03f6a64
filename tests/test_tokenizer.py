"""Tokenizers: ids and texts equal to those of the programs that the vocabularies come from."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from cupaged.checkpoint import open_checkpoint
from cupaged.errors import ChatTemplateError, RequestError, TokenizerError
from cupaged.text.tokenizer import Tokenizer, load_tokenizer
from tests.conftest import golden
from tests.support.text import byte_level_metadata, gguf_tokenizer, sentence_piece_metadata, stored

SPECIAL = (("<bos>", 3), ("<eos>", 3), ("<tool>", 4), ("two words", 4), ("Grüße", 4))
BYTE_LEVEL = stored("text_byte_level.json")
SENTENCE_PIECE = stored("text_sentencepiece.json")


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return gguf_tokenizer(byte_level_metadata(extra=SPECIAL))


@pytest.fixture(scope="module")
def sentence_piece() -> Tokenizer:
    return gguf_tokenizer(sentence_piece_metadata())


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2_path))


class TestSmolLM2:
    @pytest.mark.parametrize("case", golden("smollm2_greedy.json")["cases"], ids=lambda case: case["name"])
    def test_golden_prompts_and_texts(self, smollm2: Tokenizer, case: dict[str, Any]) -> None:
        assert smollm2.encode(case["prompt"]) == case["prompt_ids"]
        assert smollm2.decode(case["prompt_ids"], skip_special_tokens=False) == case["prompt"]
        assert smollm2.decode(case["greedy_ids"]) == case["text"]
        assert smollm2.decode(case["greedy_ids"], skip_special_tokens=False) == case["text_with_special"]
        if "messages" in case:
            assert smollm2.encode_chat(case["messages"]) == case["prompt_ids"]

    def test_facts(self, smollm2: Tokenizer) -> None:
        assert smollm2.vocab_size == 49152
        assert smollm2.bos_token_id == 1
        assert smollm2.special_ids == set(range(17))

    def test_loads_quickly(self, smollm2_path: Path) -> None:
        opened = open_checkpoint(smollm2_path)
        times = []
        for _ in range(3):
            start = time.process_time()
            load_tokenizer(opened)
            times.append(time.process_time() - start)
        assert min(times) < 0.4


class TestByteLevel:
    @pytest.mark.parametrize("pre", sorted(BYTE_LEVEL["encoded"]))
    def test_ids_equal_the_original_tokenizer(self, pre: str) -> None:
        tokenizer = gguf_tokenizer(byte_level_metadata(pre, SPECIAL))
        for text, ids in zip(BYTE_LEVEL["texts"], BYTE_LEVEL["encoded"][pre], strict=True):
            assert tokenizer.encode(text, add_special_tokens=False) == ids, text

    def test_pre_tokenizers_differ_on_the_stored_texts(self) -> None:
        """So that no two of them can be taken for one another unnoticed."""
        encoded = list(BYTE_LEVEL["encoded"].values())
        assert all(a != b for i, a in enumerate(encoded) for b in encoded[:i])

    def test_default_splits_punctuation_and_three_digits(self) -> None:
        """The rules of llama.cpp's "default": runs of punctuation, GPT-2's, numbers, three ASCII digits at a time."""
        metadata = byte_level_metadata("default")
        for left, right in (("Ġ", "("), ("1", "2"), ("12", "3"), ("123", "4"), ("1234", "5"), ("(", "("), ("((", "a")):
            for token in (left, right, left + right):
                if token not in metadata["tokenizer.ggml.tokens"]:
                    metadata["tokenizer.ggml.tokens"].append(token)
                    metadata["tokenizer.ggml.token_type"].append(1)
            metadata["tokenizer.ggml.merges"].append(f"{left} {right}")
        default = gguf_tokenizer(metadata)
        assert _pieces(default, " ((a") == ["Ġ", "((", "a"]
        assert _pieces(default, "12345") == ["123", "4", "5"]
        gpt2 = gguf_tokenizer(metadata | {"tokenizer.ggml.pre": "gpt-2"})
        assert _pieces(gpt2, "12345") == ["12345"]
        assert _pieces(gpt2, " ((a")[0] == "Ġ("
        del metadata["tokenizer.ggml.pre"]
        assert gguf_tokenizer(metadata).encode(" ((12345") == default.encode(" ((12345")

    def test_llama_bpe_takes_a_whole_piece_before_any_merge(self) -> None:
        metadata = byte_level_metadata("llama-bpe", (("<bos>", 3), ("Ġquay", 1)))
        whole = metadata["tokenizer.ggml.tokens"].index("Ġquay")
        assert gguf_tokenizer(metadata).encode(" quay", add_special_tokens=False) == [whole]
        assert whole not in gguf_tokenizer(metadata | {"tokenizer.ggml.pre": "smollm"}).encode(" quay")

    @pytest.mark.parametrize(("pre", "added"), [("smollm", False), ("qwen2", False), ("default", False), ("llama-bpe", True)])
    def test_bos_by_pre_tokenizer_and_by_key(self, pre: str, added: bool) -> None:
        metadata = byte_level_metadata(pre, SPECIAL)
        bos = metadata["tokenizer.ggml.bos_token_id"]
        assert (gguf_tokenizer(metadata).encode("a")[0] == bos) == added
        for told in (True, False):
            metadata["tokenizer.ggml.add_bos_token"] = told
            assert (gguf_tokenizer(metadata).encode("a")[0] == bos) == told
            assert gguf_tokenizer(metadata).encode("a", add_special_tokens=False)[0] != bos

    def test_added_tokens_are_parsed_and_only_control_ones_are_special(self, byte_level: Tokenizer) -> None:
        base = len(BYTE_LEVEL["tokens"])
        ids = byte_level.encode("The<bos> boats<tool>two words Grüße<eos>")
        assert [i for i in ids if i >= base] == [base, base + 2, base + 3, base + 4, base + 1]
        assert byte_level.special_ids == {base, base + 1}
        assert byte_level.decode(ids) == "The boats<tool>two words Grüße"
        assert byte_level.decode(ids, skip_special_tokens=False) == "The<bos> boats<tool>two words Grüße<eos>"

    @given(st.text())
    def test_text_comes_back(self, byte_level: Tokenizer, text: str) -> None:
        text = text.encode("utf-8", "ignore").decode()
        assert byte_level.decode(byte_level.encode(text), skip_special_tokens=False) == text

    @given(st.lists(st.integers(0, len(BYTE_LEVEL["tokens"]) - 1)))
    def test_any_ids_decode_as_the_tokenizers_library_does(self, byte_level: Tokenizer, ids: list[int]) -> None:
        assert byte_level.decode(ids) == decoders.ByteLevel().decode([BYTE_LEVEL["tokens"][i] for i in ids])

    def test_every_byte_has_a_token(self, byte_level: Tokenizer) -> None:
        singles = {byte_level.token_bytes(i) for i in range(len(BYTE_LEVEL["tokens"]))}
        assert {bytes([byte]) for byte in range(256)} <= singles


class TestSentencePiece:
    @pytest.mark.parametrize(("text", "ids"), SENTENCE_PIECE["encoded"])
    def test_ids_equal_sentencepiece(self, sentence_piece: Tokenizer, text: str, ids: list[int]) -> None:
        assert sentence_piece.encode(text, add_special_tokens=False) == ids

    @pytest.mark.parametrize(("ids", "text"), SENTENCE_PIECE["decoded"])
    def test_texts_equal_sentencepiece(self, sentence_piece: Tokenizer, ids: list[int], text: str) -> None:
        """Up to how many U+FFFD an unfinished character takes: one here, as everywhere in Python; there one a byte."""
        assert re.sub("\ufffd+", "\ufffd", sentence_piece.decode(ids)) == re.sub("\ufffd+", "\ufffd", text)

    def test_small_vocabulary_by_hand(self) -> None:
        """Best score first, wherever it stands: "abc" is a|bc although "ab" is a piece too."""
        pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("<0x21>", 0.0, 6)]
        pieces += [("▁", -9.0, 1), ("a", -8.0, 1), ("b", -8.0, 1), ("c", -8.0, 1), ("bc", -1.0, 1), ("ab", -2.0, 1), ("▁a", -3.0, 1)]
        tokens, scores, types = zip(*pieces, strict=True)
        metadata = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": list(tokens),
            "tokenizer.ggml.scores": list(scores),
            "tokenizer.ggml.token_type": list(types),
        }
        tokenizer = gguf_tokenizer(metadata)
        assert _pieces(tokenizer, "abc") == ["▁a", "bc"]
        assert _pieces(tokenizer, "aab") == ["▁a", "ab"]
        assert _pieces(tokenizer, "c!") == ["▁", "c", "<0x21>"]
        assert _pieces(tokenizer, "céü") == ["▁", "c", "<unk>"]  # their bytes are not in this vocabulary
        assert tokenizer.encode("c") == [1, *tokenizer.encode("c", add_special_tokens=False)]  # BOS by default

    def test_space_prefix_can_be_switched_off(self) -> None:
        tokenizer = gguf_tokenizer(sentence_piece_metadata(add_space_prefix=False))
        assert _pieces(tokenizer, "The") != _pieces(tokenizer, " The")
        for text in ("The", " The", "", "  "):
            assert tokenizer.decode(tokenizer.encode(text)) == text

    @given(st.text())
    def test_text_comes_back(self, sentence_piece: Tokenizer, text: str) -> None:
        text = text.encode("utf-8", "ignore").decode().replace("▁", " ")
        assert sentence_piece.decode(sentence_piece.encode(text)) == text

    def test_user_defined_piece_is_text_and_control_is_not(self, sentence_piece: Tokenizer) -> None:
        ids = sentence_piece.encode("The<call></s>", add_special_tokens=False)
        assert ids[-1] == 2
        assert sentence_piece.decode(ids) == "The<call>"
        assert sentence_piece.special_ids == {0, 1, 2}


class TestBosOnce:
    """However BOS gets into a text, it is there once."""

    @pytest.mark.parametrize("make", [lambda: byte_level_metadata("llama-bpe", SPECIAL), sentence_piece_metadata])
    def test_text_that_begins_with_bos(self, make: Any) -> None:
        tokenizer = gguf_tokenizer(make())
        bos = tokenizer.bos_token_id
        assert bos is not None
        written = tokenizer.token_text(bos)
        assert tokenizer.encode(written + "The").count(bos) == 1
        assert tokenizer.encode("The").count(bos) == 1
        assert tokenizer.encode("") == [bos]

    @pytest.mark.parametrize(
        ("template", "count"),
        [("{{ bos_token }}{{ messages[0].content }}", 1), ("<s>{{ messages[0].content }}", 1), ("{{ messages[0].content }}", 0),
         ("\n{{ bos_token }}{{ messages[0].content }}", 1), ("{% if false %}{{ bos_token }}{% endif %}{{ messages[0].content }}", 0)],
    )
    def test_chat(self, template: str, count: int) -> None:
        """The template has the last word: one BOS where it writes one, none where it does not."""
        metadata = sentence_piece_metadata(add_eos_token=True) | {"tokenizer.chat_template": template}
        ids = gguf_tokenizer(metadata).encode_chat([{"role": "user", "content": "The boats"}])
        assert ids.count(1) == count
        assert 2 not in ids  # the answer is still to come

    def test_eos_is_added_to_texts_only_when_asked(self) -> None:
        assert gguf_tokenizer(sentence_piece_metadata(add_eos_token=True)).encode("a")[-1] == 2
        assert gguf_tokenizer(sentence_piece_metadata()).encode("a")[-1] != 2


class TestIds:
    def test_id_outside_the_vocabulary(self, byte_level: Tokenizer) -> None:
        for bad in (-1, byte_level.vocab_size, 10**9):
            with pytest.raises(RequestError, match=f"token id {bad} is not in the vocabulary: ids go from 0 to"):
                byte_level.decode([bad])

    def test_rows_of_the_model_without_a_token_have_no_text(self) -> None:
        tokenizer = gguf_tokenizer(byte_level_metadata(), vocab_size=600)
        assert tokenizer.vocab_size == len(BYTE_LEVEL["tokens"])
        assert tokenizer.decode([36, 599]) == tokenizer.decode([36])
        with pytest.raises(RequestError, match="from 0 to 599"):
            tokenizer.decode([600])

    def test_token_text_shows_parts_of_characters(self, byte_level: Tokenizer, sentence_piece: Tokenizer) -> None:
        ids = byte_level.encode("🍕")
        assert {byte_level.token_text(i)[0] for i in ids} == {"\ufffd"}
        assert sentence_piece.token_text(1) == "<s>"
        the = sentence_piece.encode("The", add_special_tokens=False)
        assert "".join(sentence_piece.token_text(i) for i in the) == " The"

    @pytest.mark.parametrize("text", ["a\ud800", "\udfff\ud83c"])
    def test_lone_surrogates(self, byte_level: Tokenizer, text: str) -> None:
        with pytest.raises(RequestError, match="not valid Unicode: a lone surrogate at character"):
            byte_level.encode(text)

    def test_not_a_text(self, byte_level: Tokenizer) -> None:
        with pytest.raises(RequestError, match="must be a string, not NoneType"):
            byte_level.encode(None)  # type: ignore[arg-type]  # the mistake is the test


class TestDamage:
    """Each fault names itself in one line."""

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"model": "bert"}, "tokenizer model 'bert' is not supported; supported: gpt2, llama"),
            ({"model": None}, "tokenizer.ggml.model is missing"),
            ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not supported; supported: deepseek-r1-qwen, default,"),
            ({"tokens": None}, "tokenizer.ggml.tokens is missing or empty"),
            ({"merges": None}, "tokenizer.ggml.merges is missing or empty"),
            ({"merges": ["ab"]}, "the merge 'ab' is not a pair"),
            ({"merges": ["no-such piece"]}, "does not fit together: .*out of vocabulary"),
            ({"tokens": 5}, "does not fit together"),
            ({"token_type": [1, 1]}, "2 token types for 480 tokens"),
            ({"add_bos_token": True}, "texts need a BOS token, but tokenizer.ggml.bos_token_id names none"),
            ({"add_bos_token": True, "bos_token_id": 10**6}, "texts need a BOS token"),
        ],
    )
    def test_byte_level(self, changes: dict[str, Any], message: str) -> None:
        metadata = byte_level_metadata() | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        metadata = {key: value for key, value in metadata.items() if value is not None}
        with pytest.raises(TokenizerError, match=message) as caught:
            gguf_tokenizer(metadata)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [({"scores": []}, "tokenizer.ggml.scores is missing or empty"), ({"scores": [0.0]}, "1 scores for 600 tokens")],
    )
    def test_sentence_piece(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(TokenizerError, match=message):
            gguf_tokenizer(sentence_piece_metadata(**changes))

    def test_no_chat_template(self, byte_level: Tokenizer) -> None:
        assert byte_level.chat_template is None
        with pytest.raises(ChatTemplateError, match=r"no chat template: give it plain text, or put a chat_template\.jinja"):
            byte_level.encode_chat([{"role": "user", "content": "hi"}])


def _pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.backend.id_to_token(i) for i in tokenizer.encode(text, add_special_tokens=False)]
