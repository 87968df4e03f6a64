"""Conversation: what was said, as messages and as the token ids that the model has seen.

An answer's text, tokenised again, often gives other ids than the model produced, and then everything from there on
would be computed again. So the ids are kept, and only what the chat template writes after them is tokenised:

    the last question's prompt ... <assistant>   the answer    <end> <user> the new question <end> <assistant>
    its ids                                      its ids       tokenised now

The ids always say just what the template writes. Where it writes the earlier turns otherwise than before (turns were
dropped, or it leaves something out of old ones), all of it is tokenised again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cupaged.cli.prompts import Message
from cupaged.cli.settings import Settings
from cupaged.errors import RequestError
from cupaged.outputs import CompletionOutput

if TYPE_CHECKING:
    from cupaged import LLM


@dataclass(frozen=True)
class Question:
    """The conversation up to a question: its messages, what the chat template writes, and that as token ids."""

    turns: list[Message]
    text: str
    token_ids: list[int]
    dropped: int


class Conversation:
    """The messages so far, and how the next question is asked."""

    def __init__(self, llm: LLM, settings: Settings, system: str | None = None) -> None:
        self.turns: list[Message] = []
        self.settings = settings
        self._llm = llm
        self._system = system
        self._last: tuple[Question, CompletionOutput] | None = None

    def ask(self, text: str) -> Question:
        """The user's next message, ready for the model; it is part of the conversation once it is `answered`.

        Room is kept for an answer of max_tokens, but at most a quarter of the context; the oldest messages are dropped
        for it. Raises RequestError when the message alone does not fit.
        """
        engine = self._llm.engine
        context = engine.config.max_model_len or engine.model_config.max_position
        room = min(self.settings.sampling["max_tokens"], context // 4)
        turns = [*self.turns, {"role": "user", "content": text}]
        dropped = 0
        while len((question := self._question(turns, dropped)).token_ids) + room > context:
            if len(turns) <= 2:
                size = len(question.token_ids)
                raise RequestError(f"the message is too long: {size} tokens, and the context holds {context}")
            turns, dropped = turns[2:], dropped + 2
        return question

    def answered(self, question: Question, answer: CompletionOutput) -> None:
        self.turns = [*question.turns, {"role": "assistant", "content": answer.text}]
        self._last = question, answer

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.turns, self._last = [], None

    def _question(self, turns: list[Message], dropped: int) -> Question:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        text = self._llm.tokenizer.render_chat([*system, *turns])
        return Question(turns, text, self._token_ids(text), dropped)

    def _token_ids(self, text: str) -> list[int]:
        tokenizer = self._llm.tokenizer
        if self._last is not None and text.startswith(self._last[0].text):
            question, answer = self._last
            rest = text[len(question.text) :]
            pieces = [tokenizer.token_bytes(token) for token in answer.token_ids]
            kept = _repeated(pieces, answer.text, rest)
            rest = rest[len(b"".join(pieces[:kept]).decode()) :]
            new = tokenizer.encode(rest, add_special_tokens=False)
            # a tokenizer may put a space before a text, but here it stands in the middle of one
            if new and rest.encode().startswith(tokenizer.token_bytes(new[0])):
                return [*question.token_ids, *answer.token_ids[:kept], *new]
        return tokenizer.encode(text, add_special_tokens=False)


def _repeated(pieces: list[bytes], answer: str, rest: str) -> int:
    """How many of an answer's tokens are part of its text and written again at the start of `rest`, to a whole character.

    A token that ended the answer, and what belongs to a stop string, is not part of its text.
    """
    spoken = answer.encode()
    written = rest.encode("utf-8", "surrogatepass")  # the new question in it may hold what no tokenizer takes
    kept = length = 0
    for count, piece in enumerate(pieces, 1):
        if not (spoken.startswith(piece, length) and written.startswith(piece, length)):
            break
        length += len(piece)
        if piece and not b"\x80" <= written[length : length + 1] < b"\xc0":  # what follows is not the rest of a character
            kept = count
    return kept
