"""What a tokenizer is made of, whichever files it was read from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import tokenizers

from cupaged.text.pieces import PieceDecoder


@dataclass(frozen=True)
class TokenizerParts:
    """Everything that `Tokenizer` needs to know.

    backend         text -> ids, without anything added around them
    piece           id -> its entry in the vocabulary, None for an id without one
    decoder         entry -> bytes
    prefix, suffix  ids put around a text when special tokens are asked for
    special_tokens  name -> text, as chat templates know them: {"bos_token": "<s>", ...}
    chat_template   the Jinja source, None without one
    """

    backend: tokenizers.Tokenizer
    piece: Callable[[int], str | None]
    decoder: PieceDecoder
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None
