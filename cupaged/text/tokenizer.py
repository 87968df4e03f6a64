"""Tokenizer: text to token ids and back, for a folder in Hugging Face's layout or a GGUF file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cupaged.checkpoint.base import Checkpoint
from cupaged.errors import ChatTemplateError, RequestError
from cupaged.text.chat_template import ChatTemplate
from cupaged.text.folder_tokenizer import read_folder_tokenizer
from cupaged.text.gguf_tokenizer import read_gguf_tokenizer
from cupaged.text.parts import TokenizerParts


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Read a checkpoint's tokenizer. Raises TokenizerError, naming what is missing, damaged or not supported."""
    read = read_folder_tokenizer if checkpoint.path.is_dir() else read_gguf_tokenizer
    return Tokenizer(read(checkpoint), checkpoint.config.vocab_size)


class Tokenizer:
    """Text to ids and back. Immutable, and safe to share between threads.

    vocab_size      one more than the largest id that has a text; a model may have more rows (padding)
    bos_token_id    None for a vocabulary without one
    special_ids     ids left out of text by `skip_special_tokens`
    chat_template   None for a model without one
    backend         the tokenizers library's object, which knows nothing of what is put around a text
    space_prefix    the tokenizer puts a space before a text, and `decode` takes it off again
    """

    def __init__(self, parts: TokenizerParts, model_vocab_size: int = 0) -> None:
        """`model_vocab_size`: ids up to it are valid even where the vocabulary has no text for them."""
        self._parts = parts
        self.backend = parts.backend
        added = parts.backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size: int = 1 + max(parts.backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.num_ids = max(self.vocab_size, model_vocab_size)
        bos = parts.special_tokens.get("bos_token")
        self.bos_token_id: int | None = None if bos is None else parts.backend.token_to_id(bos)
        self.space_prefix = parts.decoder.space_prefix
        self.chat_template = None
        if parts.chat_template is not None:
            self.chat_template = ChatTemplate(parts.chat_template, parts.special_tokens)
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in it are parsed.

        `add_special_tokens` puts BOS (and EOS) around it as the model's tokenizer does, but never a second BOS before
        a text that already starts with one. Raises RequestError for a text that is not valid Unicode.
        """
        ids = self._encode(text)
        if not add_special_tokens:
            return ids
        return [*self._prefix(ids), *ids, *self._parts.suffix]

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation, ready for the answer. Raises as `render_chat` does.

        Exactly what the template writes: whether there is a BOS is its business, as in Hugging Face's convention.
        """
        return self._encode(self.render_chat(messages, add_generation_prompt, **variables))

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """A conversation as the chat template writes it; `variables` are passed to the template.

        Raises RequestError for messages that are not {"role": text, "content": text}, and ChatTemplateError for a
        template that is absent or broken or refuses them.
        """
        if self.chat_template is None:
            raise ChatTemplateError(
                "this model has no chat template: give it plain text, or put a chat_template.jinja into its folder"
            )
        return self.chat_template.render(messages, add_generation_prompt, **variables)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that are no UTF-8 become U+FFFD; an id of the model without a text gives none.

        Spaces are left as the model wrote them (no "clean-up"), except for the one that the tokenizer itself puts
        before a text. Raises RequestError for an id outside the vocabulary.
        """
        skip = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(index) for index in ids if index not in skip).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.space_prefix else text

    def token_text(self, token_id: int) -> str:
        """Text of one token, special ones and a leading space included; part of a character is shown as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text. Raises RequestError for an id outside the vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            if not 0 <= token_id < self.num_ids:
                raise RequestError(f"token id {token_id} is not in the vocabulary: ids go from 0 to {self.num_ids - 1}")
            piece = self._parts.piece(token_id)
            added = token_id in self._added_ids
            found = b"" if piece is None else self._parts.decoder.to_bytes(piece, added=added)
            self._bytes[token_id] = found
        return found

    def _encode(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise RequestError(f"a text must be a string, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is not valid Unicode: a lone surrogate at character {error.start}") from None
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def _prefix(self, ids: list[int]) -> tuple[int, ...]:
        prefix = self._parts.prefix
        return () if tuple(ids[: len(prefix)]) == prefix else prefix
