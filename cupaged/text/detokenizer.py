"""Text of a growing answer, token by token.

A token is bytes, and a character may span tokens: the bytes of an unfinished character are held until the next token
completes it or shows that it never will. So what was given out never changes, and each token costs its own length.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from cupaged.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns the tokens of one answer into text as they come.

    However the ids are split over calls of `push`, the texts it and `flush` return join to the answer's full text:
    `tokenizer.decode(all ids)`, but with the leading space that decode takes off where the prompt has visible text
    before it (SentencePiece vocabularies put that space before a text; here it stands between prompt and answer).
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        continues = any(index not in self._skip for index in prompt_ids)
        self._strip_space = tokenizer.space_prefix and not continues

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete. Raises RequestError for an id outside the vocabulary."""
        token_bytes, skip = self._tokenizer.token_bytes, self._skip
        return self._strip_start(self._utf8.decode(b"".join([token_bytes(i) for i in token_ids if i not in skip])))

    def flush(self) -> str:
        """The end of the text: U+FFFD for a character that was never finished, else nothing."""
        return self._strip_start(self._utf8.decode(b"", final=True))

    def _strip_start(self, text: str) -> str:
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text
