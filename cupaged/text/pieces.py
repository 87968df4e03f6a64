"""From a vocabulary entry to the bytes it stands for.

A tokenizer spells the bytes of a token in one of two ways. Byte-level BPE (GPT-2, Llama 3, Qwen) writes every byte as
one printable character. SentencePiece (Llama 1 and 2, Mistral) writes text, with "▁" for a space, and spells bytes
outside its vocabulary "<0x0A>". Once a token is bytes, text is their concatenation read as UTF-8, and so it can be
read token by token without ever looking back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cupaged.errors import TokenizerError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: visible Latin-1 characters are themselves, the others follow from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in visible}
    hidden = (byte for byte in range(256) if chr(byte) not in alphabet)
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


BYTE_ALPHABET = _byte_alphabet()


@dataclass(frozen=True)
class PieceDecoder:
    """How the pieces of one vocabulary become bytes.

    byte_level      the piece is spelled in BYTE_ALPHABET
    byte_fallback   "<0x0A>" is one byte
    replacements    (from, to) pairs applied to the piece, such as ("▁", " ")
    space_prefix    the tokenizer puts a space before a text, to be taken off its start again
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    space_prefix: bool = False

    def to_bytes(self, piece: str, *, added: bool = False) -> bytes:
        """Bytes of a piece. `added`: it was added to the vocabulary as it is, not spelled in the byte alphabet."""
        if self.byte_level:
            if added or any(char not in BYTE_ALPHABET for char in piece):
                return piece.encode()
            return bytes(BYTE_ALPHABET[char] for char in piece)
        if self.byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        return piece.encode()


def decoder_from_json(spec: Mapping[str, Any] | None) -> PieceDecoder:
    """Read the "decoder" of a tokenizer.json. Raises TokenizerError for a kind that is no plain spelling of bytes."""
    steps = [] if spec is None else spec["decoders"] if spec["type"] == "Sequence" else [spec]
    byte_level = byte_fallback = space_prefix = False
    replacements: list[tuple[str, str]] = []
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel":
            byte_level = True
        elif kind == "ByteFallback":
            byte_fallback = True
        elif kind == "Replace" and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            replacements.append((step["replacement"], " "))
            space_prefix = step.get("prepend_scheme", "always") != "never"
        elif kind == "Strip" and (step["content"], step["start"], step["stop"]) == (" ", 1, 0):
            space_prefix = True
        elif kind != "Fuse":
            raise TokenizerError(f"tokenizer.json: the decoder {kind!r} is not supported")
    return PieceDecoder(byte_level, byte_fallback, tuple(replacements), space_prefix)
