"""The command as a process: pipes that close, Ctrl-C at any time, and a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.scripted_llm import ANSWER

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "tests.support.scripted_llm"]


def environment(delay: float = 0.0) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("CUPAGED_", "PYTHONUNBUFFERED"))}
    return own | {"SCRIPTED_DELAY": str(delay), "XDG_CONFIG_HOME": "/nonexistent", "TERM": "xterm", "COLUMNS": "100"}


def shell(line: str, delay: float = 0.0) -> subprocess.CompletedProcess[str]:
    env = environment(delay) | {"C": " ".join(COMMAND)}
    return subprocess.run(["bash", "-c", line], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


# Pipes


def test_a_closed_pipe_ends_quietly() -> None:
    done = shell('yes hi | head -200 | $C generate --file - | head -n 1; echo "${PIPESTATUS[2]}"', delay=0.002)
    assert (done.stdout, done.stderr) == (f"{ANSWER}\n141\n", "")


def test_a_pipe_closed_before_the_first_word_ends_quietly() -> None:
    done = shell("$C generate hi | true; echo ${PIPESTATUS[0]}", delay=0.1)
    assert (done.stdout, done.stderr) == ("141\n", "")


def test_a_pipe_closed_during_a_chat_ends_quietly() -> None:
    done = shell('yes hi | head -200 | $C chat --max-tokens 2 | head -n 1; echo "${PIPESTATUS[2]}"', delay=0.002)
    assert (done.stdout, done.stderr) == ("He\n141\n", "")


def test_a_full_disk_behind_stdout_is_one_line() -> None:
    done = shell("$C generate hi > /dev/full")
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


def test_a_closed_stdout_is_no_crash() -> None:
    assert "Traceback" not in shell("$C generate hi >&-").stderr


# Ctrl-C


@pytest.mark.parametrize("args", [["--json"], []])
def test_an_interrupt_ends_generate_in_one_line(args: list[str]) -> None:
    command = [*COMMAND, "generate", "--file", "-", *args]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(0.02), stdin=-1, stdout=-1, stderr=-1, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write('{"prompt": "a", "max_tokens": 1}\n{"prompt": "b", "ignore_eos": true, "max_tokens": 100}\n')
    process.stdin.close()
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert process.stdout.read() == ""
    assert process.stderr is not None
    assert process.stderr.read() == "interrupted\n"


@pytest.mark.parametrize("module", ["click", "cupaged.cli.main"])
def test_an_interrupt_while_the_command_still_loads_is_no_traceback(module: str, tmp_path: Path) -> None:
    code = (
        "import builtins, signal, sys\n"
        "real = builtins.__import__\n"
        "def load(name, *rest):\n"
        f"    if name == {module!r}: signal.raise_signal(signal.SIGINT)\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = load\n"
        "import cupaged.__main__"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")


# A terminal


class Terminal:
    """A process whose stdin, stdout and stderr are a terminal."""

    def __init__(self, args: list[str], delay: float, mark: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *args],
            cwd=ROOT,
            env=environment(delay) | {"SCRIPTED_MARK": mark},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal
        )
        os.close(slave)
        self.text = ""

    def send(self, text: str) -> None:
        self.send_bytes(text.encode())

    def send_bytes(self, data: bytes) -> None:
        os.write(self._master, data)

    def read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], 60)
        assert ready, f"nothing more came after {self.text!r}"
        try:
            data = os.read(self._master, 4096)
        except OSError:  # the other side is closed
            return False
        self.text += data.decode(errors="replace")
        return bool(data)

    def wait_for(self, text: str) -> str:
        """Everything up to `text`, which must come."""
        while text not in self.text:
            assert self.read(), f"ended without {text!r}: {self.text!r}"
        before, _, self.text = self.text.partition(text)
        return before

    def end(self) -> tuple[int, str]:
        while self.read():
            pass
        os.close(self._master)
        return self.process.wait(timeout=20), self.text


@contextlib.contextmanager
def terminal(*args: str, delay: float = 0.0, mark: str = "") -> Iterator[Terminal]:
    started = Terminal(list(args), delay, mark)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait()


def test_one_prompt_streams_on_a_terminal() -> None:
    with terminal("generate", "hi", delay=0.1) as screen:
        screen.wait_for("He")
        start = time.monotonic()
        screen.wait_for("world.")
        assert time.monotonic() - start > 0.5  # ten steps later, not at once
        assert screen.end() == (0, "\r\n")


def test_several_answers_on_a_terminal_come_when_they_are_complete() -> None:
    with terminal("generate", "hi", "--n", "2", delay=0.1) as screen:
        start = time.monotonic()
        screen.wait_for(f"[0]\r\n{ANSWER}\r\n")
        assert time.monotonic() - start > 0.5
        assert screen.end() == (0, f"[1]\r\n{ANSWER}1\r\n")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--n", "1", "--best-of", "2"], f"{ANSWER}1\r\n"),
        (["--n", "2", "--best-of", "3"], f"[0]\r\n{ANSWER}1\r\n[1]\r\n{ANSWER}2\r\n"),
        (["--beam-width", "2"], "[0] score -0.2500\r\n" + "1" * 20 + "\r\n[1] score -0.2625\r\n" + "1" * 19 + "\r\n"),
        (["--beam-width", "1"], "1" * 20 + "\r\n"),
    ],
)
def test_ranked_answers_on_a_terminal_come_at_the_end(args: list[str], expected: str) -> None:
    with terminal("generate", "hi", "--max-tokens", "20", *args) as screen:
        code, text = screen.end()
    assert code == 0
    assert text.endswith("\x1b[?25h\r" + expected)  # nothing but the bar of the loading before it


def test_an_interrupt_ends_a_stream() -> None:
    with terminal("generate", "hi", "--ignore-eos", delay=0.05) as screen:
        screen.wait_for("He")
        screen.send("\x03")
        code, rest = screen.end()
        assert code == 130
        assert rest.endswith("interrupted\r\n")
        assert "Traceback" not in rest


def test_many_prompts_on_a_terminal_show_a_bar_and_the_answers() -> None:
    with terminal("generate", "--file", "-", delay=0.02) as screen:
        screen.send("one\ntwo\n\x04")
        code, text = screen.end()
        assert code == 0
        assert text.count(ANSWER) == 2
        assert "answering" in text


def test_ctrl_c_stops_an_answer_and_not_the_chat() -> None:
    with terminal("chat", "--ignore-eos", "--max-tokens", "60", delay=0.05) as screen:
        screen.wait_for("> ")
        screen.send("\x03")  # at the prompt: nothing but a hint
        screen.wait_for("Ctrl-D or /exit to leave")
        screen.wait_for("> ")
        screen.send("hi\n")
        screen.wait_for("He")
        screen.send("\x03")
        screen.wait_for("(stopped)")
        screen.wait_for("> ")
        screen.send("again\n")
        screen.wait_for("Hello")
        screen.send("\x03")
        screen.wait_for("(stopped)")
        screen.wait_for("> ")
        screen.send("\x04")
        assert screen.end()[0] == 0


def test_a_line_that_is_no_text_does_not_end_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:strict")
    with terminal("chat") as screen:
        screen.wait_for("> ")
        screen.send_bytes(b"\xff\n")
        screen.wait_for("error: the line is not valid UTF-8: byte 0xff at offset 0")
        screen.wait_for("> ")
        screen.send("hi\n")
        screen.wait_for(ANSWER)
        screen.wait_for("> ")
        screen.send("\x04")
        assert screen.end()[0] == 0


def test_a_second_ctrl_c_leaves_a_step_that_takes_too_long(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with terminal("chat", delay=20, mark=str(mark)) as screen:
        screen.wait_for("> ")
        screen.send("hi\n")
        while not mark.exists():
            assert screen.process.poll() is None
            time.sleep(0.01)
        screen.send("\x03")
        time.sleep(0.5)  # two that come together are one signal
        start = time.monotonic()
        screen.send("\x03")
        code, text = screen.end()
        assert time.monotonic() - start < 15
        assert code == 130
        assert "Traceback" not in text
