"""The tokenizer of a model folder: tokenizer.json, and what tokenizer_config.json says about its use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from cupaged.checkpoint.base import Checkpoint
from cupaged.checkpoint.json_file import read_json
from cupaged.errors import CheckpointError, TokenizerError
from cupaged.text.parts import TokenizerParts
from cupaged.text.pieces import decoder_from_json

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_folder_tokenizer(checkpoint: Checkpoint) -> TokenizerParts:
    """Read a folder's tokenizer. Raises TokenizerError, naming the file that is missing or damaged.

    Where tokenizer_config.json says add_bos_token or add_eos_token, that decides what goes around a text; else the
    post-processor in tokenizer.json does.
    """
    path = checkpoint.file("tokenizer.json")
    if path is None:
        raise TokenizerError(_missing(checkpoint))
    spec = _read_json(path)
    try:
        backend = Tokenizer.from_str(json.dumps(spec))
        decoder = decoder_from_json(spec.get("decoder"))
    except TokenizerError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception for a file it cannot read
        raise TokenizerError(f"{path.name} is damaged or not supported: {error}") from error
    backend.no_truncation()  # a file may carry the limits of its training run
    backend.no_padding()
    config_path = checkpoint.file("tokenizer_config.json")
    config = _read_json(config_path) if config_path else {}
    special_tokens = _special_tokens(checkpoint, config, backend)
    prefix, suffix = _around(config, backend, special_tokens)
    return TokenizerParts(
        backend, backend.id_to_token, decoder, prefix, suffix, special_tokens, _chat_template(checkpoint, config)
    )


def _missing(checkpoint: Checkpoint) -> str:
    if checkpoint.file("tokenizer.model") is None:
        return f"{checkpoint.path}: tokenizer.json is missing, so this model's texts cannot be turned into tokens"
    return (
        f"{checkpoint.path}: tokenizer.json is missing; make it from tokenizer.model with transformers:"
        " AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except CheckpointError as error:
        raise TokenizerError(str(error)) from None


def _special_tokens(checkpoint: Checkpoint, config: Mapping[str, Any], backend: Tokenizer) -> dict[str, str]:
    """Name -> text of the special tokens; those of the vocabulary become special in the backend too."""
    map_path = checkpoint.file("special_tokens_map.json")
    found: dict[str, str] = {}
    for source in (_read_json(map_path) if map_path else {}, config):
        for name in _NAMES:
            value = source.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str) and content.encode("utf-8", "ignore").decode() == content:  # no lone surrogates
                found[name] = content
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens(
        [
            AddedToken(content, special=True, normalized=False)
            for content in found.values()
            if content not in special and backend.token_to_id(content) is not None
        ]
    )
    return found


def _around(
    config: Mapping[str, Any], backend: Tokenizer, special_tokens: Mapping[str, str]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids before and after a text."""
    sample = backend.encode("a", add_special_tokens=True)
    body = [i for i, special in enumerate(sample.special_tokens_mask) if not special]
    start, end = (body[0], body[-1] + 1) if body else (len(sample.ids), len(sample.ids))
    around = {"bos": tuple(sample.ids[:start]), "eos": tuple(sample.ids[end:])}
    for name in around:
        wanted = config.get(f"add_{name}_token")
        if isinstance(wanted, bool):
            around[name] = (_id_of(f"{name}_token", backend, special_tokens),) if wanted else ()
    return around["bos"], around["eos"]


def _id_of(name: str, backend: Tokenizer, special_tokens: Mapping[str, str]) -> int:
    content = special_tokens.get(name)
    index: int | None = None if content is None else backend.token_to_id(content)
    if index is None:
        raise TokenizerError(f"tokenizer_config.json asks for a {name}, but the vocabulary has none")
    return index


def _chat_template(checkpoint: Checkpoint, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's: one source, or named ones of which "default" counts."""
    path = checkpoint.file("chat_template.jinja")
    if path is not None:
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise TokenizerError(f"{path.name} cannot be read: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = (entry for entry in template if isinstance(entry, dict))
        template = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None
