"""Tokenizers for tests: tiny vocabularies from tests/data, as GGUF metadata or as a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cupaged.checkpoint.base import Checkpoint
from cupaged.config import ModelConfig
from cupaged.text.tokenizer import Tokenizer, load_tokenizer

DATA = Path(__file__).parent.parent / "data"


def stored(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def checkpoint(path: Path, metadata: dict[str, Any] | None = None, vocab_size: int = 1) -> Checkpoint:
    config = ModelConfig(
        "llama", vocab_size, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, max_position=64
    )
    return Checkpoint(path, config, {}, metadata=metadata or {})


def gguf_tokenizer(metadata: dict[str, Any], vocab_size: int = 1) -> Tokenizer:
    return load_tokenizer(checkpoint(Path("model.gguf"), metadata, vocab_size))


def folder_tokenizer(folder: Path, **files: Any) -> Tokenizer:
    """A folder with these JSON files ("tokenizer", "tokenizer_config", ...) and its tokenizer."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return load_tokenizer(checkpoint(folder))


def byte_level_metadata(pre: str = "smollm", extra: tuple[tuple[str, int], ...] = ()) -> dict[str, Any]:
    """The stored byte-level vocabulary, with `extra` (token, GGUF type) behind it; BOS is its first control token."""
    data = stored("text_byte_level.json")
    tokens = [*data["tokens"], *(token for token, _ in extra)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": data["merges"],
        "tokenizer.ggml.token_type": [1] * len(data["tokens"]) + [kind for _, kind in extra],
    }
    for offset, (_, kind) in enumerate(extra):
        if kind == 3:
            metadata.setdefault("tokenizer.ggml.bos_token_id", len(data["tokens"]) + offset)
    return metadata


def sentence_piece_metadata(**changes: Any) -> dict[str, Any]:
    """The stored SentencePiece vocabulary; `changes` set keys below tokenizer.ggml."""
    metadata: dict[str, Any] = stored("text_sentencepiece.json")["metadata"]
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
