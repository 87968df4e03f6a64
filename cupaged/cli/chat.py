"""`cupaged chat`: a conversation that is kept, shortened when it grows too long, and never ended by Ctrl-C."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from cupaged.cli.conversation import Conversation, Question
from cupaged.cli.options import engine_options, sampling_options
from cupaged.cli.prompts import decode
from cupaged.cli.settings import Settings
from cupaged.cli.terminal import Interruptible, Screen, error_line, open_llm
from cupaged.errors import ChatTemplateError, RequestError
from cupaged.outputs import CompletionOutput

if TYPE_CHECKING:
    from cupaged import LLM

MAX_TOKENS = 512
HELP = """\
/reset   forget the conversation
/help    show this
/exit    leave; so does Ctrl-D
Ctrl-C   stop an answer"""


@click.command()
@click.option("--system", metavar="TEXT", help="The system message.")
@engine_options
@sampling_options
def command(system: str | None, **options: Any) -> None:
    """Talk with a model. Ctrl-C stops an answer, Ctrl-D or /exit ends, /help lists what else there is.

    When the conversation no longer fits the model's context, its oldest turns are dropped, and that is said.

    \b
    Examples:
      cupaged chat
      cupaged chat --system "Answer in French." --temperature 0.7
      cupaged chat --model Qwen/Qwen2.5-0.5B-Instruct
    """
    settings = Settings.of(options, max_tokens=MAX_TOKENS)
    llm = open_llm(settings)
    talk(llm, Conversation(llm, settings, system), Screen(highlight=False))


def talk(llm: LLM, conversation: Conversation, console: Console) -> None:
    """Read, answer, until the input ends."""
    if sys.stdin.isatty():
        console.print(f"[bold]{llm.engine.model_name}[/bold]  [dim]/help for help, Ctrl-D to leave[/dim]")
    while (line := _read(console)) is not None:
        text = line.strip()
        if text in ("/exit", "/quit"):
            break
        if text == "/reset":
            conversation.reset()
            console.print("[dim]the conversation starts anew[/dim]")
        elif text == "/help":
            console.print(HELP, markup=False)
        elif text.startswith("/") and text[1:].isalpha():
            error_line(f"unknown command {text}; there are /reset, /help and /exit")
        elif text:
            _turn(llm, conversation, text, console)


def _read(console: Console) -> str | None:
    """The next line that is text, or None at the end of the input. Ctrl-C at a terminal only clears the line."""
    while True:
        try:
            if sys.stdin.isatty():
                return console.input("[bold green]> [/bold green]")
            line = sys.stdin.buffer.readline()
            return decode(line, "the line") if line else None
        except EOFError:
            console.print()
            return None
        except RequestError as error:
            error_line(error)
        except UnicodeDecodeError as error:
            error_line(f"the line is not valid UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}")
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            console.print("\n[dim]Ctrl-D or /exit to leave[/dim]")


def _turn(llm: LLM, conversation: Conversation, text: str, console: Console) -> None:
    try:
        question = conversation.ask(text)
        if question.dropped:
            console.print(f"[dim](the {question.dropped} oldest messages were dropped: the context is full)[/dim]")
        answer = _answer(llm, conversation, question)
    except ChatTemplateError:
        raise
    except RequestError as error:
        error_line(error)
        return
    if answer is None or not answer.text:
        console.print("[dim](no answer)[/dim]")
        return
    conversation.answered(question, answer)
    if answer.finish_reason == "abort":
        console.print("[dim](stopped)[/dim]")
    elif answer.finish_reason == "length":
        console.print("[dim](cut at the longest answer allowed: --max-tokens)[/dim]")


def _answer(llm: LLM, conversation: Conversation, question: Question) -> CompletionOutput | None:
    """Write the answer as it comes, until it ends or Ctrl-C; None if nothing had come yet."""
    engine = llm.engine
    request = engine.add_request(question.token_ids, conversation.settings.params(engine.default_params))
    answer: CompletionOutput | None = None
    shown = 0
    with Interruptible() as interrupt:
        while engine.has_unfinished():
            outputs = engine.step()
            if interrupt.pressed:
                aborted = engine.abort(request)
                outputs = [aborted] if aborted else outputs
            for output in outputs:
                answer = output.outputs[0]
                click.echo(answer.text[shown:], nl=False)
                shown = len(answer.text)
    click.echo()
    return answer
