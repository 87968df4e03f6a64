"""Tokenizers of model folders: tokenizer.json and the files beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cupaged.errors import ChatTemplateError, TokenizerError
from tests.support.text import (
    byte_level_metadata,
    checkpoint,
    folder_tokenizer,
    gguf_tokenizer,
    load_tokenizer,
    sentence_piece_metadata,
    stored,
)

SPECIAL = (("<bos>", 3), ("<eos>", 3))
BYTE_LEVEL_DECODER = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
LLAMA_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
MESSAGES = [{"role": "user", "content": "The boats"}]


def byte_level_json(**changes: Any) -> dict[str, Any]:
    """A tokenizer.json like Llama 3's, on the tiny vocabulary."""
    spec = json.loads(gguf_tokenizer(byte_level_metadata("llama-bpe", SPECIAL)).backend.to_str())
    return spec | {"decoder": BYTE_LEVEL_DECODER} | changes


def template_processor(backend_ids: dict[str, int], before: list[str], after: list[str]) -> dict[str, Any]:
    around = [[{"SpecialToken": {"id": name, "type_id": 0}} for name in names] for names in (before, after)]
    return {
        "type": "TemplateProcessing",
        "single": [*around[0], {"Sequence": {"id": "A", "type_id": 0}}, *around[1]],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in backend_ids.items()},
    }


BOS, EOS = (len(stored("text_byte_level.json")["tokens"]) + i for i in range(2))


def test_same_ids_and_texts_as_from_gguf(tmp_path: Path) -> None:
    data = stored("text_byte_level.json")
    tokenizer = folder_tokenizer(tmp_path, tokenizer=byte_level_json())
    for text, ids in zip(data["texts"], data["encoded"]["llama-bpe"], strict=True):
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode([BOS, *ids, EOS]) == text
    assert tokenizer.decode([BOS, *ids, EOS], skip_special_tokens=False) == f"<bos>{text}<eos>"


def test_sentence_piece_folder(tmp_path: Path) -> None:
    data = stored("text_sentencepiece.json")
    spec = json.loads(gguf_tokenizer(sentence_piece_metadata()).backend.to_str()) | {"decoder": LLAMA_DECODER}
    tokenizer = folder_tokenizer(tmp_path, tokenizer=spec)
    for text, ids in data["encoded"]:
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text.replace("▁", " ")


@pytest.mark.parametrize(
    ("before", "after", "config", "expected"),
    [
        (["<bos>"], [], {}, (True, False)),
        (["<bos>"], ["<eos>"], {}, (True, True)),
        ([], ["<eos>"], {}, (False, True)),
        ([], [], {"add_bos_token": True}, (True, False)),
        (["<bos>"], ["<eos>"], {"add_bos_token": False}, (False, True)),
        (["<bos>"], [], {"add_eos_token": True, "add_bos_token": True}, (True, True)),
        (["<bos>"], [], {"add_bos_token": None}, (True, False)),
    ],
)
def test_what_goes_around_a_text(
    tmp_path: Path, before: list[str], after: list[str], config: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    processor = template_processor({"<bos>": BOS, "<eos>": EOS}, before, after)
    names = {"bos_token": {"content": "<bos>"}, "eos_token": "<eos>"}
    tokenizer = folder_tokenizer(tmp_path, tokenizer=byte_level_json(post_processor=processor), tokenizer_config=names | config)
    for text in ("The boats", ""):
        plain = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text) == [BOS] * expected[0] + plain + [EOS] * expected[1]
    assert tokenizer.encode("<bos>The").count(BOS) == 1
    assert tokenizer.bos_token_id == BOS


def test_limits_of_the_training_run_do_not_apply(tmp_path: Path) -> None:
    limits = {
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "!"},
    }
    tokenizer = folder_tokenizer(tmp_path, tokenizer=byte_level_json(**limits))
    text = "The boats were counted"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_special_token_that_is_no_text_is_not_in_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = folder_tokenizer(tmp_path, tokenizer=byte_level_json(), tokenizer_config={"bos_token": "\ud800"})
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"


def test_named_special_tokens_become_special(tmp_path: Path) -> None:
    """A file may list them as ordinary; one outside the vocabulary gets no id of its own."""
    spec = byte_level_json()
    spec["added_tokens"] = [token | {"special": False} for token in spec["added_tokens"]]
    names = {"eos_token": "<eos>", "pad_token": "<absent>"}
    tokenizer = folder_tokenizer(tmp_path, tokenizer=spec, special_tokens_map=names)
    assert tokenizer.special_ids == {EOS}
    assert tokenizer.vocab_size == EOS + 1


class TestChatTemplateSources:
    def test_jinja_file_first(self, tmp_path: Path) -> None:
        (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }} {{ messages[0].content }}", encoding="utf-8")
        config = {"chat_template": "config", "eos_token": "<eos>"}
        tokenizer = folder_tokenizer(tmp_path, tokenizer=byte_level_json(), tokenizer_config=config)
        assert tokenizer.render_chat(MESSAGES) == "file <eos> The boats"

    def test_config(self, tmp_path: Path) -> None:
        config = {"chat_template": "[{{ messages[0].content }}]"}
        assert folder_tokenizer(tmp_path, tokenizer=byte_level_json(), tokenizer_config=config).render_chat(MESSAGES) == "[The boats]"

    def test_default_among_named_ones(self, tmp_path: Path) -> None:
        named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
        tokenizer = folder_tokenizer(tmp_path, tokenizer=byte_level_json(), tokenizer_config={"chat_template": named})
        assert tokenizer.render_chat(MESSAGES) == "plain"
        tokenizer = folder_tokenizer(tmp_path, tokenizer_config={"chat_template": named[:1]})
        with pytest.raises(ChatTemplateError, match="no chat template"):
            tokenizer.render_chat(MESSAGES)

    def test_a_broken_one_disturbs_only_chat(self, tmp_path: Path) -> None:
        config = {"chat_template": "{% for %}"}
        tokenizer = folder_tokenizer(tmp_path, tokenizer=byte_level_json(), tokenizer_config=config)
        assert tokenizer.encode("The")
        with pytest.raises(ChatTemplateError, match="broken at line 1"):
            tokenizer.render_chat(MESSAGES)


class TestDamage:
    def test_no_tokenizer(self, tmp_path: Path) -> None:
        with pytest.raises(TokenizerError, match=r"tokenizer.json is missing, so this model's texts"):
            load_tokenizer(checkpoint(tmp_path))

    def test_only_a_sentencepiece_model(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.model").write_bytes(b"\n\x05")
        with pytest.raises(TokenizerError, match=r"tokenizer.json is missing; make it from tokenizer.model with transformers: "):
            load_tokenizer(checkpoint(tmp_path))

    @pytest.mark.parametrize("content", ["", "{", "[1]", '"text"', "{}", '{"model": {"type": "Magic"}}'])
    def test_damaged_tokenizer_json(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
        with pytest.raises(TokenizerError, match=r"tokenizer.json") as caught:
            load_tokenizer(checkpoint(tmp_path))
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(("content", "fault"), [(b"\xff\xfe{}", "is not UTF-8"), (b"[" * 100_000, "is nested too deeply")])
    def test_damaged_config(self, tmp_path: Path, content: bytes, fault: str) -> None:
        (tmp_path / "tokenizer_config.json").write_bytes(content)
        with pytest.raises(TokenizerError, match=rf"tokenizer_config.json .*{fault}"):
            folder_tokenizer(tmp_path, tokenizer=byte_level_json())

    @pytest.mark.parametrize(
        "decoder",
        [
            {"type": "WordPiece", "prefix": "##", "cleanup": True},
            {"type": "Strip", "content": " ", "start": 0, "stop": 1},
            {"type": "Sequence", "decoders": [{"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}]},
        ],
    )
    def test_decoder_that_is_no_spelling_of_bytes(self, tmp_path: Path, decoder: dict[str, Any]) -> None:
        with pytest.raises(TokenizerError, match=r"the decoder '\w+' is not supported"):
            folder_tokenizer(tmp_path, tokenizer=byte_level_json(decoder=decoder))

    def test_bos_that_is_not_in_the_vocabulary(self, tmp_path: Path) -> None:
        config = {"add_bos_token": True, "bos_token": "<absent>"}
        with pytest.raises(TokenizerError, match="asks for a bos_token, but the vocabulary has none"):
            folder_tokenizer(tmp_path, tokenizer=byte_level_json(), tokenizer_config=config)
