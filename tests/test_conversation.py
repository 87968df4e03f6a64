"""A conversation keeps the ids that the model produced: only what is new is tokenised, and computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupaged import LLM
from cupaged.cli.conversation import Conversation, Question
from cupaged.cli.settings import Settings
from cupaged.errors import RequestError
from cupaged.outputs import CompletionOutput, RequestOutput
from tests.support.scripted import EOS, PieceTokenizer, ScriptedModel, make_engine

PIECES = ("Hello", "<", ">", "|", " ", "\n", *"abcdefghijklmnopqrstuvwxyzHIV", ".", "é", "è")
MODEL_BYTES = [b"\xc3", b"\xa9", b"\xff"]
"""Bytes that only the model writes; é is the first two."""


def as_it_is(content: str) -> str:
    return content


class Tokenizer(PieceTokenizer):
    """Knows "Hello" as one token, and a template that marks the ends of answers with <eos>."""

    def __init__(self, write: Callable[[str], str] = as_it_is) -> None:
        super().__init__(PIECES)
        self.write = write

    def token_bytes(self, token_id: int) -> bytes:
        return [*(piece.encode() for piece in self.pieces), *MODEL_BYTES][token_id]

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        ends = {"user": "|", "system": "|", "assistant": "<eos>|"}
        return "".join(f"<{m['role']}>{self.write(m['content'])}{ends[m['role']]}" for m in messages) + "<assistant>"

    def text(self, ids: Sequence[int]) -> str:
        return b"".join(self.token_bytes(i) for i in ids).decode()

    def ids(self, *pieces: str | bytes) -> list[int]:
        """Token by token, as a model may write it, whatever `encode` would make of the text."""
        known = [*(piece.encode() for piece in self.pieces), *MODEL_BYTES]
        return [known.index(piece if isinstance(piece, bytes) else piece.encode()) for piece in pieces]


class Fake:
    """A Conversation with a model that answers what it is told to; every answer in turn."""

    def __init__(self, tokenizer: Tokenizer, *answers: Sequence[int], system: str | None = None, max_tokens: int = 30, **sampling: Any) -> None:
        self.tokenizer = tokenizer
        self.engine = make_engine(ScriptedModel(dict(enumerate(answers))), PIECES, block_size=4)
        self.engine.tokenizer = tokenizer  # type: ignore[assignment]
        self.settings = Settings("m", {}, {"max_tokens": max_tokens, **sampling})
        self.conversation = Conversation(self, self.settings, system)  # type: ignore[arg-type]

    def turn(self, text: str, stop_after: int = 0) -> tuple[Question, RequestOutput]:
        """Ask and answer; `stop_after` so many tokens, if not 0, as Ctrl-C does."""
        question = self.conversation.ask(text)
        request = self.engine.add_request(question.token_ids, self.settings.params(self.engine.default_params))
        output = None
        while self.engine.has_unfinished():
            (output,) = self.engine.step()
            if len(output.outputs[0].token_ids) == stop_after:
                output = self.engine.abort(request)
        assert output is not None
        self.conversation.answered(question, output.outputs[0])
        return question, output


def computed_before(question: Question, output: RequestOutput) -> int:
    """Tokens of which there is KV after an answer: all but the last."""
    return len(question.token_ids) + len(output.outputs[0].token_ids) - 1


def test_only_what_is_new_is_computed_though_the_text_would_be_tokenised_otherwise() -> None:
    tokenizer = Tokenizer()
    spelled = [*tokenizer.ids(*"Hello"), EOS]
    fake = Fake(tokenizer, spelled, spelled, spelled, system="be kind")
    question, output = fake.turn("hi")
    for text in ("a", "bc de"):
        before, ids = computed_before(question, output), question.token_ids + spelled
        question, output = fake.turn(text)
        assert question.text == tokenizer.text(question.token_ids)
        assert question.token_ids[: len(ids)] == ids
        assert question.token_ids != tokenizer.encode(question.text)
        assert output.num_cached_tokens == before
    assert [m["content"] for m in fake.conversation.turns] == ["hi", "Hello", "a", "Hello", "bc de", "Hello"]


def test_a_stopped_answer_is_kept_as_far_as_it_came() -> None:
    tokenizer = Tokenizer()
    fake = Fake(tokenizer, tokenizer.ids(*"Hello"), [*tokenizer.ids("a"), EOS])
    question, output = fake.turn("hi", stop_after=4)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("Hell", "abort")
    again, second = fake.turn("b")
    assert again.token_ids == [*question.token_ids, *tokenizer.ids(*"Hell"), *tokenizer.encode("<eos>|<user>b|<assistant>")]
    assert second.num_cached_tokens == computed_before(question, output)


@pytest.mark.parametrize(
    ("answer", "kept", "content"),
    [
        ((*"Hello", "."), 5, "Hello"),  # a stop string
        ((*"Hell", b"\xc3", b"\xa9", "."), 6, "Hellé"),  # bytes of one character, then a stop string
        (("a", b"\xff", "b", "."), 1, "a\ufffdb"),  # what is no character is written otherwise
    ],
)
def test_what_the_text_does_not_say_is_not_kept(answer: tuple[str | bytes, ...], kept: int, content: str) -> None:
    tokenizer = Tokenizer()
    tokenizer.pieces.append("\ufffd")
    fake = Fake(tokenizer)
    question = fake.conversation.ask("hi")
    ids = tokenizer.ids(*answer)
    fake.conversation.answered(question, CompletionOutput(0, content, ids, finish_reason="stop", stop_reason="."))
    again = fake.conversation.ask("b")
    assert again.token_ids[: len(question.token_ids) + kept] == question.token_ids + ids[:kept]
    assert again.token_ids[len(question.token_ids) + kept] not in ids[kept : kept + 1]


def test_a_character_is_kept_whole_or_not_at_all() -> None:
    tokenizer = Tokenizer(lambda content: content.replace("é", "è"))  # of which the first byte is the same
    fake = Fake(tokenizer)
    question = fake.conversation.ask("hi")
    fake.conversation.answered(question, CompletionOutput(0, "aé", tokenizer.ids("a", b"\xc3", b"\xa9"), finish_reason="length"))
    again = fake.conversation.ask("b")
    assert again.token_ids == [*question.token_ids, *tokenizer.encode("aè<eos>|<user>b|<assistant>")]


@pytest.mark.parametrize("marked", [True, False])
def test_a_tokenizer_that_puts_a_space_before_a_text_puts_none_into_the_conversation(marked: bool) -> None:
    """Where it would (nothing special stands at the start of what is new), all of it is tokenised again."""
    tokenizer = Tokenizer()
    plain = tokenizer.encode
    tokenizer.encode = lambda text, add_special_tokens=True: plain(text if text.startswith("<eos>") else " " + text)  # type: ignore[method-assign]
    if not marked:
        render = tokenizer.render_chat
        tokenizer.render_chat = lambda messages: render(messages).replace("<eos>", "")  # type: ignore[method-assign]
    spelled = [*tokenizer.ids(*"Hello"), EOS]
    fake = Fake(tokenizer, spelled)
    question, _ = fake.turn("hi")
    again = fake.conversation.ask("b")
    assert tokenizer.text(again.token_ids) == " " + again.text
    kept = again.token_ids[: len(question.token_ids) + len(spelled)] == question.token_ids + spelled
    assert kept == marked


def test_a_template_that_writes_old_turns_otherwise_is_believed() -> None:
    tokenizer = Tokenizer(lambda content: content.strip())
    fake = Fake(tokenizer, [*tokenizer.ids(" ", *"Hello", " "), EOS])
    fake.turn("hi")
    again = fake.conversation.ask("b")
    assert again.text == "<user>hi|<assistant>Hello<eos>|<user>b|<assistant>"
    assert tokenizer.text(again.token_ids) == again.text
    tokenizer.write = lambda content: content.upper() if content == "hi" else content
    assert fake.conversation.ask("b").token_ids == tokenizer.encode(
        "<user>HI|<assistant> Hello <eos>|<user>b|<assistant>"
    )


def test_dropped_turns_are_followed_by_exact_ones() -> None:
    tokenizer = Tokenizer()
    spelled = [*tokenizer.ids(*"Hello"), EOS]
    fake = Fake(tokenizer, *[spelled] * 6, max_tokens=20)
    dropped = []
    previous: tuple[Question, RequestOutput] | None = None
    for _ in range(6):
        question, output = fake.turn("abc de")
        assert tokenizer.text(question.token_ids) == question.text
        dropped.append(question.dropped)
        if previous and not question.dropped:
            assert output.num_cached_tokens == computed_before(*previous)
        previous = question, output
    assert 2 in dropped
    assert dropped[-1] in (0, 2)
    assert len(fake.conversation.turns) < 12


def test_a_question_without_an_answer_leaves_no_trace() -> None:
    tokenizer = Tokenizer()
    fake = Fake(tokenizer, [*tokenizer.ids(*"Hello"), EOS])
    fake.turn("hi")
    expected = fake.conversation.ask("b")
    fake.conversation.ask("never answered")
    with pytest.raises(RequestError, match="too long"):
        fake.conversation.ask("x" * 150)
    assert fake.conversation.ask("b") == expected
    fake.conversation.reset()
    assert fake.conversation.ask("b").token_ids == tokenizer.encode("<user>b|<assistant>")


@given(st.lists(st.lists(st.sampled_from([*"Helo.|", "Hello", "<", "é", b"\xc3", b"\xa9"]), max_size=6), max_size=4), st.booleans())
def test_the_ids_always_say_what_the_template_writes(answers: list[list[str | bytes]], strips: bool) -> None:
    tokenizer = Tokenizer((lambda content: content.strip("H.")) if strips else as_it_is)
    tokenizer.pieces.append("\ufffd")
    conversation = Fake(tokenizer).conversation
    for answer in answers:
        question = conversation.ask("a")
        assert tokenizer.text(question.token_ids) == question.text
        ids = tokenizer.ids(*answer)
        text = b"".join(tokenizer.token_bytes(i) for i in ids).decode(errors="replace")
        conversation.answered(question, CompletionOutput(0, text, ids, finish_reason="length"))
    question = conversation.ask("b")
    assert tokenizer.text(question.token_ids) == question.text


# The real model


def test_smollm2_computes_only_what_is_new(smollm2_path: Path) -> None:
    llm = LLM(str(smollm2_path), num_blocks=200, max_model_len=1024)
    settings = Settings("m", {}, {"max_tokens": 24, "temperature": 1.0, "seed": 5})
    conversation = Conversation(llm, settings, "Answer briefly.")
    computed: list[int] = []
    llm.engine.observers.append(lambda record: computed.append(record.num_tokens))
    before, retokenised, reasons = 0, [], []
    for number, text in enumerate(("Hi, I am Bob.", "Who am I? Häßlich \N{SNOWMAN}", "Say yes.", "Name a colour.")):
        computed.clear()
        question = conversation.ask(text)
        request = llm.engine.add_request(question.token_ids, settings.params(llm.engine.default_params))
        output = None
        while llm.engine.has_unfinished():
            (output,) = llm.engine.step()
            if number == 1 and len(output.outputs[0].token_ids) == 9:
                output = llm.engine.abort(request)
        assert output is not None
        answer = output.outputs[0]
        assert output.num_cached_tokens == before
        assert sum(computed) == len(question.token_ids) - before + len(answer.token_ids) - 1
        assert llm.tokenizer.decode(question.token_ids, skip_special_tokens=False) == question.text
        conversation.answered(question, answer)
        before = len(question.token_ids) + len(answer.token_ids) - 1
        retokenised.append(question.token_ids != llm.tokenizer.encode(question.text, add_special_tokens=False))
        reasons.append(answer.finish_reason)
    assert {"abort", "stop"} <= set(reasons)
    assert any(retokenised), "the texts were such that tokenising them again gives the same ids: no proof"
