"""The command line around the engine: what goes in, what comes out, what each failure says, and the exit codes."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupaged
from cupaged import BeamSearchParams
from cupaged.cli.main import COMMANDS, run
from cupaged.cli.options import memory_size
from cupaged.cli.perplexity import windows
from cupaged.cli.terminal import ProgressView
from cupaged.errors import HubError
from tests.support.scripted_llm import ANSWER, ScriptedLLM

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """Run `cupaged ARGS` over a scripted model: exit code, stdout, stderr."""
    for name in [name for name in os.environ if name.startswith("CUPAGED_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(cupaged, "LLM", ScriptedLLM)

    def call(*args: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = run(args)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def only_line(text: str) -> str:
    (line,) = text.splitlines()
    return line


def only_answer(row: dict[str, Any]) -> dict[str, Any]:
    """The answer in a --json object that holds one."""
    (answer,) = row["outputs"]
    assert answer["index"] == 0
    result: dict[str, Any] = answer
    return result


# The door


def test_version_loads_nothing_heavy() -> None:
    code = "import sys; from cupaged.cli.main import run; run(['--version']); print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.startswith(f"cupaged {cupaged.__version__}\n")
    assert not {"numpy", "numba", "rich", "huggingface_hub", "tokenizers", "jinja2"} & set(output.split())


def test_python_m_cupaged_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "cupaged", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"cupaged {cupaged.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command: str, cli: Cli) -> None:
    code, out, _ = cli(command, "--help")
    assert code == 0
    assert f"Usage: cupaged {command}" in out
    assert re.search(rf"Examples:\n +cupaged {command}", out)
    assert COMMANDS[command] in cli("--help")[1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--absent"], "No such option"),
        (["absent"], "No such command"),
        (["generate", "x", "--absent"], "No such option"),
        (["generate", "x", "--block-size", "many"], "not a valid integer"),
        (["generate", "x", "--kv-cache-memory", "2 apples"], "is not a size such as"),
        (["generate", "x", "--logit-bias", "5"], "not of the form ID=VALUE"),
        (["generate", "x", "--config", "absent.toml"], "does not exist"),
        (["generate", "--file", "absent.txt"], "does not exist"),
        (["generate", "x", "--system", "y"], "--system needs --chat"),
        (["generate", "x", "--early-stopping", "soon"], "'soon' is not one of true, false, never"),
        (["generate", "x", "--beam-width", "2", "--temperature", "0"], "--beam-width and --temperature exclude each other"),
        (["generate", "x", "--n", "2", "--length-penalty", "1"], "--length-penalty and --n exclude each other"),
        (["generate", "x", "--stop", "y", "--beam-width", "2"], "--beam-width and --stop exclude each other"),
        (["generate", "x", "--stop-token-id", "3", "--beam-width", "2"], "--beam-width and --stop-token-id exclude each other"),
        (["chat", "--n", "2"], "No such option"),
        (["perplexity"], "Missing argument"),
    ],
)
def test_wrong_usage_is_2(args: list[str], message: str, cli: Cli) -> None:
    code, out, err = cli(*args)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--max-tokens", "0"], "error: max_tokens must be at least 1, not 0"),
        (["--temperature", "nan"], "error: temperature must be a finite number, not nan"),
        (["--top-p", "0"], "error: top_p must be above 0 and at most 1, not 0.0"),
        (["--block-size", "0"], "error: block_size must be between 1 and 256, not 0"),
        (["--n", "0"], "error: n must be at least 1, not 0"),
        (["--n", "3", "--best-of", "2"], "error: best_of must be at least 3, not 2"),
        (["--beam-width", "0"], "error: beam_width must be at least 1 and at most 256, not 0"),
        (["--length-penalty", "2"], "error: length_penalty needs beam_width"),
        (["--eviction", "random"], "error: eviction must be one of lru, fifo, lfu, weighted, not 'random'"),
        (["--batch-invariant", "--dtype", "int4"], "error: dtype must be one of auto, float32, float16, bfloat16, int8, not 'int4'"),
        (["--device", "abacus"], "error: device must be one of auto, cpu, reference, emu, cuda or cuda:1 for the second GPU, not 'abacus'"),
    ],
)
def test_a_wrong_value_is_one_line_and_2_before_anything_loads(args: list[str], line: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupaged, "LLM", lambda *args, **options: pytest.fail("loaded a model"))
    assert cli("generate", "x", *args) == (2, "", line + "\n")


def test_a_failure_is_one_line_and_1(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise HubError("no such file or folder: nowhere")

    monkeypatch.setattr(cupaged, "LLM", refuse)
    assert cli("generate", "x", "--model", "nowhere") == (1, "", "error: no such file or folder: nowhere\n")


def test_no_statistics_where_nothing_ran(cli: Cli) -> None:
    code, _, err = cli("generate", "", "--stats")
    assert code == 1
    assert only_line(err).startswith("error: the prompt is empty")


def test_an_interrupt_is_130(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cupaged, "LLM", interrupt)
    assert cli("generate", "x") == (130, "", "interrupted\n")


# Prompts


def test_a_prompt_argument(cli: Cli) -> None:
    assert cli("generate", "Say hello") == (0, ANSWER + "\n", "")
    assert ScriptedLLM.last.prompts == ["Say hello"]


@pytest.mark.parametrize("args", [[], ["-"]])
def test_a_prompt_from_stdin_loses_its_last_line_end_only(args: list[str], cli: Cli) -> None:
    assert cli("generate", *args, stdin=b"two\nlines\n\n")[:2] == (0, ANSWER + "\n")
    assert ScriptedLLM.last.prompts == ["two\nlines\n"]


@pytest.mark.parametrize(
    ("stdin", "line"),
    [
        (b"", "error: standard input is empty: there is no prompt"),
        (b"\n", "error: standard input is empty: there is no prompt"),
        (b"ab\xffcd", "error: standard input is not valid UTF-8: byte 0xff at offset 2"),
    ],
)
def test_unusable_stdin(stdin: bytes, line: str, cli: Cli) -> None:
    assert cli("generate", stdin=stdin) == (1, "", line + "\n")


def test_an_empty_prompt(cli: Cli) -> None:
    code, out, err = cli("generate", "")
    assert (code, out) == (1, "")
    assert only_line(err).startswith("error: the prompt is empty")


def test_an_argument_that_is_not_utf8(cli: Cli) -> None:
    code, _, err = cli("generate", os.fsdecode(b"ab\xff"))
    assert code == 1
    assert only_line(err) == "error: the prompt is not valid UTF-8 at character 2"


def test_chat_wraps_the_prompt(cli: Cli) -> None:
    cli("generate", "--chat", "--system", "Be kind.", "Hi")
    assert ScriptedLLM.last.prompts == ["<system>Be kind.|<user>Hi|"]


def test_a_file_of_lines(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone\r\n\n  two\n{three\n".encode())
    assert cli("generate", "--file", str(path)) == (0, f"{ANSWER}\n" * 3, "")
    assert ScriptedLLM.last.prompts == ["one", "two", "{three"]


def test_a_file_from_stdin(cli: Cli) -> None:
    assert cli("generate", "--file", "-", stdin=b'{"prompt": "a"}\n{"prompt": "b"}\n')[1] == f"{ANSWER}\n" * 2
    assert ScriptedLLM.last.prompts == ["a", "b"]


def test_jsonl_with_parameters(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "a", "max_tokens": 5, "stop": ["zz"]}\n'
        '{"prompt_token_ids": [11, 12]}\n'
        '{"messages": [{"role": "user", "content": "c"}], "temperature": 0.5}\n'
    )
    code, out, err = cli("generate", "--file", str(path), "--json", "--temperature", "0", "--seed", "7")
    assert (code, err) == (0, "")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [only_answer(row)["text"] for row in rows] == ["Hello", ANSWER, ANSWER]
    assert [only_answer(row)["finish_reason"] for row in rows] == ["length", "stop", "stop"]
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert [row["source"] for row in rows] == [f"{path}:{n}" for n in (1, 2, 3)]
    assert rows[0]["usage"] == {"prompt_tokens": 1, "completion_tokens": 5, "cached_tokens": 0}
    assert rows[1]["prompt_token_ids"] == [11, 12]
    assert rows[0]["metrics"]["time_to_first_token"] <= rows[0]["metrics"]["total_time"]
    params = ScriptedLLM.last.params
    assert [p.temperature for p in params] == [0, 0, 0.5]
    assert [p.max_tokens for p in params] == [5, 256, 256]
    assert [p.seed for p in params] == [7, 7, 7]


BAD_LINES = {
    '{"prompt": "a", "beam_width": 2, "temperature": 1}': "beam_width and temperature exclude each other",
    '{"prompt": "a", "beam_width": 2, "beam_widht": 1}': "unknown beam search parameter 'beam_widht'",
    '{"prompt": "a", "beam_width": 0}': "beam_width must be at least 1",
    '{"prompt": "a", "length_penalty": 1}': "length_penalty needs beam_width",
    '{"prompt": "a", "early_stopping": "soon", "beam_width": 2}': "early_stopping must be true, false or 'never'",
    '{"prompt": "a", "n": 65}': "asks for 65 sequences at once",
    '{"prompt": "a", "cache_salt": 1}': "cache_salt must be a string",
    '{"prompt": "a", "temperatur": 1}': "unknown sampling parameter 'temperatur'",
    '{"prompt": "a", "max_tokens": 0}': "max_tokens must be at least 1",
    '{"prompt": "a", "temperature": NaN}': "temperature must be a finite number",
    '{"prompt": "a", "min_tokens": 300}': "min_tokens (300) must not be above max_tokens (256)",
    '{"prompt": "a"': "not valid JSON",
    "1" * 5000: "not usable JSON",
    "[" * 100000: "JSON",
    '"text"': "a line must be a JSON object",
    '{"max_tokens": 3}': "exactly one of prompt, messages, prompt_token_ids is needed, not 0",
    '{"prompt": "a", "messages": []}': "is needed, not 2",
    '{"prompt": 3}': "prompt must be a string",
    '{"prompt": ""}': "the prompt is empty",
    '{"prompt_token_ids": []}': "prompt_token_ids must be a list that is not empty",
    '{"prompt_token_ids": ["x"]}': "prompt_token_ids must be whole numbers",
    '{"prompt_token_ids": [99999]}': "99999",
    '{"messages": [{"role": "user"}]}': "messages must be objects with the strings",
}


def test_a_bad_line_is_named_and_loses_nothing_else(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    good = '{"prompt": "ok"}'
    path.write_text("\n".join([good, *BAD_LINES, good]))
    code, out, err = cli("generate", "--file", str(path), "--json")
    assert code == 1
    assert [json.loads(line)["index"] for line in out.splitlines()] == [0, len(BAD_LINES) + 1]
    for number, (line, message) in enumerate(zip(err.splitlines(), BAD_LINES.values(), strict=True), start=2):
        assert line.startswith(f"error: {path}:{number}: ")
        assert message in line


def test_a_file_without_prompts(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("\n\n")
    assert cli("generate", "--file", str(path)) == (1, "", f"error: {path} holds no prompt\n")
    path.write_bytes(b"\xfe")
    assert cli("generate", "--file", str(path)) == (1, "", f"error: {path} is not valid UTF-8: byte 0xfe at offset 0\n")
    assert cli("generate", "x", "--file", str(path))[0] == 2


def test_answers_come_in_the_order_of_the_prompts(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "a", "max_tokens": n}) for n in (9, 2, 5)))
    assert cli("generate", "--file", str(path))[1].splitlines() == [ANSWER[:9], ANSWER[:2], ANSWER[:5]]


def test_logprobs_in_json(cli: Cli) -> None:
    _, out, _ = cli("generate", "ab", "--json", "--max-tokens", "1", "--logprobs", "1", "--prompt-logprobs", "0")
    row = json.loads(out)
    answer = only_answer(row)
    (token,) = answer["token_ids"]
    assert answer["logprobs"][0][0] == {"token_id": token, "token": "H", "logprob": -float(token), "rank": 2}
    assert answer["cumulative_logprob"] == -float(token)
    assert row["prompt_logprobs"][0] is None
    assert row["prompt_logprobs"][1][0]["token"] == "b"


# Several answers


def test_several_answers_stand_under_their_index(cli: Cli) -> None:
    assert cli("generate", "a", "--n", "2") == (0, f"[0]\n{ANSWER}\n[1]\n{ANSWER}1\n", "")


def test_of_ranked_answers_the_likeliest_come_first(cli: Cli) -> None:
    # token t has logprob -t, and those of "1" and "2" are 2 and 3: each makes the mean of its answer higher
    assert cli("generate", "a", "--n", "2", "--best-of", "3", "--max-tokens", "20") == (0, f"[0]\n{ANSWER}1\n[1]\n{ANSWER}2\n", "")
    assert cli("generate", "a", "--best-of", "3", "--max-tokens", "20") == (0, f"{ANSWER}1\n", "")


def test_beams_stand_under_their_index_and_score(cli: Cli) -> None:
    code, out, err = cli("generate", "a", "--beam-width", "2", "--max-tokens", "2", "--length-penalty", "0")
    # the tokens offered: "1" -0.25, EOS -0.5, ...
    assert (code, out, err) == (0, "[0] score -0.5000\n\n[1] score -0.5000\n11\n", "")
    assert ScriptedLLM.last.params == [BeamSearchParams(beam_width=2, max_tokens=2, length_penalty=0.0)]


def test_a_single_beam_is_written_like_any_single_answer(cli: Cli) -> None:
    assert cli("generate", "a", "--beam-width", "1", "--max-tokens", "3", "--ignore-eos")[:2] == (0, "111\n")


def test_several_answers_in_json(cli: Cli) -> None:
    row = json.loads(cli("generate", "a", "--n", "2", "--json")[1])
    assert [answer["index"] for answer in row["outputs"]] == [0, 1]
    assert [answer["text"] for answer in row["outputs"]] == [ANSWER, ANSWER + "1"]
    assert [answer["finish_reason"] for answer in row["outputs"]] == ["stop", "stop"]
    for answer in row["outputs"]:
        assert answer["cumulative_logprob"] == -sum(answer["token_ids"])
        assert not {"score", "logprobs"} & set(answer)
    assert row["usage"] == {"prompt_tokens": 1, "completion_tokens": 2 * len(ANSWER) + 3, "cached_tokens": 0}


def test_beams_in_json(cli: Cli) -> None:
    row = json.loads(cli("generate", "a", "--beam-width", "2", "--max-tokens", "2", "--json")[1])
    assert [(a["index"], a["token_ids"], a["text"]) for a in row["outputs"]] == [(0, [2, 2], "11"), (1, [2, 0], "1")]
    assert [(a["score"], a["cumulative_logprob"]) for a in row["outputs"]] == [(-0.25, -0.5), (-0.375, -0.75)]


def test_a_file_may_mix_beams_and_samples(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "a", "max_tokens": 3}\n'
        '{"prompt": "b", "beam_width": 3, "early_stopping": "never"}\n'
        '{"prompt": "c", "temperature": 0.5, "n": 2}\n'
        '{"prompt": "d", "cache_salt": "x"}\n'
    )
    args = ["generate", "--file", str(path), "--max-tokens", "2", "--json"]
    code, out, err = cli(*args, "--beam-width", "2", "--cache-salt", "s")
    assert (code, err) == (0, "")
    assert [len(json.loads(line)["outputs"]) for line in out.splitlines()] == [2, 3, 2, 2]
    beams = BeamSearchParams(beam_width=2, max_tokens=2)
    first, second, third, fourth = ScriptedLLM.last.params
    assert first == BeamSearchParams(beam_width=2, max_tokens=3)
    assert second == BeamSearchParams(beam_width=3, max_tokens=2, early_stopping="never")
    assert (third.temperature, third.n, third.max_tokens) == (0.5, 2, 2)
    assert fourth == beams
    assert ScriptedLLM.last.salts == ["s", "s", "s", "x"]
    assert cli(*args, "--temperature", "0.3")[0] == 0
    assert [type(p) is BeamSearchParams for p in ScriptedLLM.last.params] == [False, True, False, False]


@pytest.mark.parametrize(
    ("config", "args", "kind"),
    [
        ("temperature = 0.2", ["--beam-width", "2"], "beams"),
        ("beam-width = 2", ["--temperature", "0.2"], "sampling"),
        ("beam-width = 2\nearly-stopping = true", [], "beams"),
        ("beam-width = 2\nmax-tokens = 5", ["--ignore-eos"], "beams"),
        ("beam-width = 2\ntop-p = 0.2", [], "refused"),
    ],
)
def test_the_nearer_option_decides_between_beams_and_samples(
    config: str, args: list[str], kind: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(config)
    code, _, err = cli("generate", "x", "--config", str(path), *args)
    if kind == "refused":
        assert code == 2
        assert "--beam-width and --top-p exclude each other" in err
        return
    assert (code, err) == (0, "")
    (params,) = ScriptedLLM.last.params
    assert isinstance(params, BeamSearchParams) == (kind == "beams")
    if "early-stopping" in config:
        assert params.early_stopping is True
    if kind == "sampling":
        monkeypatch.setenv("CUPAGED_LENGTH_PENALTY", "2")
        assert "needs beam_width" in cli("generate", "x")[2]
        monkeypatch.setenv("CUPAGED_BEAM_WIDTH", "3")
        assert cli("generate", "x", "--config", str(path), "--max-tokens", "9")[0] == 0
        assert ScriptedLLM.last.params == [BeamSearchParams(beam_width=3, length_penalty=2.0, max_tokens=9)]


# Statistics


def test_stats(cli: Cli) -> None:
    _, out, err = cli("generate", "abc", "--stats", "--max-tokens", "5")
    assert out == "Hello\n"
    values = dict(line.split(None, 1) for line in err.replace("first token", "first_token").splitlines())
    assert values["tokens"] == "3 prompt, 5 generated"
    assert values["requests"].startswith("1 in 5 steps")
    assert values["blocks"] == "2 of 64 used at the peak, 4 tokens each"
    assert values["preempted"] == "0 times, 0.0 MB swapped"
    assert values["cached"] == "0 of the prompt tokens, a hit rate of 0.0 %"
    assert values["sharing"] == "0 blocks saved at the peak, 0 copied before a write"
    assert values["evicted"] == "0 cached blocks"
    assert {"speed", "first_token", "wasted"} <= set(values)


def test_stats_as_json(cli: Cli) -> None:
    lines = b'{"prompt": "0123456789", "n": 3, "max_tokens": 2}\n{"prompt": "0123456789ab", "max_tokens": 2}\n'
    _, out, err = cli("generate", "--file", "-", "--stats", "--json", stdin=lines)
    assert len(out.splitlines()) == 2
    values = json.loads(err)
    assert (values["requests"], values["cached_tokens"], values["prompt_tokens"]) == (2, 8, 22)
    assert values["hit_rate"] == pytest.approx(8 / 22)
    assert (values["blocks_shared_peak"], values["blocks_copied"], values["blocks_evicted"]) == (6, 2, 0)
    assert (values["preemptions"], values["bytes_swapped"]) == (0, 0)


def test_stats_name_the_price_of_batch_invariance_where_it_was_asked_for(cli: Cli) -> None:
    assert "invariant" not in cli("generate", "abc", "--stats", "--no-batch-invariant")[2]
    (line,) = [line for line in cli("generate", "abc", "--stats", "--batch-invariant")[2].splitlines() if line.startswith("invariant")]
    assert "the same bits in any batch" in line
    assert "no cost" in line
    assert json.loads(cli("generate", "abc", "--stats", "--json", "--batch-invariant")[2])["batch_invariant"] is True


def test_stats_of_sharing(cli: Cli) -> None:
    """Ten tokens in blocks of 4: two blocks and a half, which three answers share until they write."""
    lines = b'{"prompt": "0123456789", "n": 3, "max_tokens": 2}\n{"prompt": "0123456789ab", "max_tokens": 2}\n'
    _, _, err = cli("generate", "--file", "-", "--stats", stdin=lines)
    values = dict(line.split(None, 1) for line in err.splitlines())
    assert values["cached"] == "8 of the prompt tokens, a hit rate of 36.4 %"
    assert values["sharing"] == "6 blocks saved at the peak, 2 copied before a write"


def test_stats_of_eviction(cli: Cli) -> None:
    lines = b"".join(b'{"prompt": "%d123456789abcdefghi", "max_tokens": 1}\n' % n for n in range(4))
    args = ["generate", "--file", "-", "--stats", "--num-blocks", "12", "--max-model-len", "30", "--max-num-seqs", "1"]
    values = dict(line.split(None, 1) for line in cli(*args, stdin=lines)[2].splitlines())
    assert values["evicted"] == "8 cached blocks"
    values = dict(line.split(None, 1) for line in cli(*args, "--no-prefix-cache", stdin=lines)[2].splitlines())
    assert values["evicted"] == "0 cached blocks"


def test_every_option_reaches_the_engine_and_the_request(cli: Cli) -> None:
    engine = {
        "device": "cpu", "dtype": "float32", "kv_cache_dtype": "auto", "block_size": 8, "num_blocks": 40, "kv_cache_memory": 512_000_000,
        "max_model_len": 100, "max_num_batched_tokens": 99, "max_num_seqs": 9, "preemption": "recompute", "threads": 1, "eviction": "lfu",
    }  # fmt: skip
    sampling = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "seed": 1, "max_tokens": 7, "min_tokens": 2, "logprobs": 1, "prompt_logprobs": 1,
        "n": 2, "best_of": 3,
    }  # fmt: skip
    args = [f"--{name.replace('_', '-')}={value}" for name, value in (engine | sampling).items()]
    args[args.index("--kv-cache-memory=512000000")] = "--kv-cache-memory=512MB"
    args += ["--stop", "x y", "--stop", "z", "--stop-token-id", "5", "--bad-word", "q", "--logit-bias", "3=-2.5", "--logit-bias", "4=1"]
    args += ["--no-prefix-cache", "--batch-invariant", "--cache-salt", "me"]
    args += ["--ignore-eos", "--no-skip-special-tokens", "--include-stop-str-in-output"]
    assert cli("generate", "x", *args)[0] == 0
    assert ScriptedLLM.last.options == engine | {"prefix_cache": False, "batch_invariant": True}
    assert ScriptedLLM.last.salts == ["me"]
    assert ScriptedLLM.last.params == [
        cupaged.SamplingParams(
            **sampling, stop=["x y", "z"], stop_token_ids=[5], bad_words=["q"], logit_bias={3: -2.5, 4: 1.0},
            ignore_eos=True, skip_special_tokens=False, include_stop_str_in_output=True,
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "size"),
    [("12", 12), ("12B", 12), ("2k", 2000), ("2KiB", 2048), ("512MB", 512 * 10**6), ("1.5gib", 3 * 2**29), ("1 T", 10**12), ("9" * 400, 10**400 - 1)],
)
def test_memory_sizes(text: str, size: int) -> None:
    assert memory_size(text) == size


# Where options come from


def test_precedence(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def block_size_and_seed(*args: str) -> tuple[object, object]:
        assert cli("generate", "x", *args)[0] == 0
        return ScriptedLLM.last.options.get("block_size"), ScriptedLLM.last.params[0].seed

    assert block_size_and_seed() == (None, None)
    config = tmp_path / "config" / "cupaged" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('block-size = 2\nseed = 2\nmodel = "from-file"\nstop = ["q q"]\nignore_eos = true\nmax-tokens = 3')
    assert block_size_and_seed() == (2, 2)
    assert ScriptedLLM.last.model == "from-file"
    assert ScriptedLLM.last.params[0].stop == ("q q",)
    assert ScriptedLLM.last.params[0].ignore_eos is True
    monkeypatch.setenv("CUPAGED_BLOCK_SIZE", "3")
    assert block_size_and_seed() == (3, 2)
    assert block_size_and_seed("--block-size", "5", "--seed", "5") == (5, 5)
    other = tmp_path / "other.toml"
    other.write_text("seed = 9")
    monkeypatch.setenv("CUPAGED_CONFIG", str(other))
    assert block_size_and_seed() == (3, 9)
    monkeypatch.setenv("CUPAGED_CONFIG", "")
    assert block_size_and_seed("--config", str(other)) == (3, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("block-siz = 2", "unknown option 'block-siz'; did you mean 'block-size'?"),
        ("block-size = ", "not valid TOML"),
        ("block-size = 16.5", "'16.5' is not a valid integer"),
        ("block-size = true", "'True' is not a valid integer"),
        ("block-size = " + "9" * 5000, "not valid TOML"),
        ("block-size = " + "[" * 20_000, "not valid TOML"),
    ],
)
def test_a_wrong_config_file(text: str, message: str, cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    code, _, err = cli("generate", "x", "--config", str(path))
    assert code == 2
    assert message in err


def test_a_config_file_may_begin_with_a_byte_order_mark(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(b"\xef\xbb\xbfblock-size = 8")
    assert cli("generate", "x", "--config", str(path))[0] == 0
    assert ScriptedLLM.last.options == {"block_size": 8}


def test_a_user_without_a_home_has_no_config_file(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "")  # and the system knows none
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert cli("generate", "x")[0] == 0


def test_a_config_file_may_name_options_of_other_commands(cli: Cli, tmp_path: Path) -> None:
    config, text = tmp_path / "c.toml", tmp_path / "t.txt"
    config.write_text("temperature = 0.1\nblock-size = 8")
    text.write_text("hello")
    assert cli("perplexity", str(text), "--config", str(config))[0] == 0
    assert ScriptedLLM.last.options == {"block_size": 8}


# perplexity


@given(st.integers(2, 300), st.integers(2, 64), st.integers(1, 63))
def test_windows_score_every_token_once_with_context(num_tokens: int, window: int, stride: int) -> None:
    stride = min(stride, window - 1)
    scored: list[int] = []
    for start, stop, first in windows(num_tokens, window, stride):
        assert start < first < stop <= min(start + window, num_tokens)
        scored += range(first, stop)
    assert scored == list(range(1, num_tokens))


@pytest.mark.parametrize("args", [[], ["--context", "5", "--stride", "2"], ["--context", "2"]])
def test_perplexity(args: list[str], cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("a bc d e f")
    code, out, _ = cli("perplexity", str(path), "--json", *args)
    assert code == 0
    tokens = ScriptedLLM.last.tokenizer.encode("a bc d e f")[1:]  # each token t has logprob -t
    result = json.loads(out)
    assert result["tokens"] == len(tokens)
    assert math.isclose(result["perplexity"], math.exp(sum(tokens) / len(tokens)), rel_tol=1e-6)
    assert "perplexity" in cli("perplexity", "-", stdin=b"hello")[1]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--context", "4", "--stride", "4"], 2, "--stride (4) must be below --context (4)"),
        (["--stride", "512"], 2, "--stride (512) must be below --context (512)"),
        (["--context", "4000"], 2, "--context (4000) must be at most 127"),
        ([], 1, "t.txt has too few tokens: at least 2 are needed"),
        (["--max-model-len", "2"], 2, "max_model_len is 2: at least 3 are needed"),
    ],
)
def test_perplexity_refuses(args: list[str], code: int, message: str, cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("a")
    status, _, err = cli("perplexity", str(path), *args)
    assert status == code
    assert message in err


# chat


def test_chat_keeps_the_conversation(cli: Cli) -> None:
    code, out, err = cli("chat", "--system", "s", stdin=b"one\n\ntwo\n/reset\nthree\n/foo\n/help\n/exit\nnever\n")
    assert code == 0
    assert out.count(ANSWER) == 3
    assert "/reset   forget" in out
    assert ScriptedLLM.last.prompts == [
        "<system>s|<user>one|",
        f"<system>s|<user>one|<assistant>{ANSWER}|<user>two|",
        "<system>s|<user>three|",
    ]
    assert only_line(err) == "error: unknown command /foo; there are /reset, /help and /exit"


def test_chat_drops_the_oldest_turns_when_the_context_is_full(cli: Cli) -> None:
    _, out, err = cli("chat", "--max-tokens", "20", stdin=b"one two three four five six\n" * 4)
    assert err == ""
    assert "(the 2 oldest messages were dropped: the context is full)" in out
    assert all(len(prompt) + 20 <= 128 for prompt in ScriptedLLM.last.prompts)
    assert ScriptedLLM.last.prompts[-1].startswith("<user>one two")


def test_chat_refuses_a_message_that_never_fits_and_goes_on(cli: Cli) -> None:
    code, out, err = cli("chat", stdin=b"hi\n" + b"x" * 200 + b"\nagain\n")
    assert code == 0
    assert only_line(err).startswith("error: the message is too long: 207 tokens")
    assert out.count(ANSWER) == 2
    assert ScriptedLLM.last.prompts[-1] == f"<user>hi|<assistant>{ANSWER}|<user>again|"


def test_chat_takes_back_a_question_the_engine_refuses(cli: Cli) -> None:
    code, _, err = cli("chat", "--num-blocks", "20", "--max-tokens", "30", stdin=b"hi\n" + b"x" * 40 + b"\nagain\n")
    assert code == 0
    assert "the pool has 20" in only_line(err)
    assert ScriptedLLM.last.prompts[-1] == f"<user>hi|<assistant>{ANSWER}|<user>again|"


def test_chat_says_that_an_answer_was_cut(cli: Cli) -> None:
    assert "(cut at the longest answer allowed: --max-tokens)" in cli("chat", "--max-tokens", "3", stdin=b"hi\n")[1]


def test_chat_with_invalid_utf8(cli: Cli) -> None:
    code, out, err = cli("chat", stdin=b"hi\nb\xff\nstill there\n")
    assert (code, out) == (0, f"{ANSWER}\n{ANSWER}\n")
    assert only_line(err) == "error: the line is not valid UTF-8: byte 0xff at offset 1"
    assert ScriptedLLM.last.prompts[-1] == f"<user>hi|<assistant>{ANSWER}|<user>still there|"


# pull, models


def test_pull_tells_every_failure_and_fetches_the_rest(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli("pull", "./absent", str(tmp_path), "absent")
    assert code == 1
    assert out == f"{tmp_path}\n"
    assert [line[:30] for line in err.splitlines()] == ["error: no such file or folder:", "error: no model named 'absent'"]


def test_models(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPAGED_CACHE", str(tmp_path))
    code, out, _ = cli("models")
    assert code == 0
    assert re.search(r"smollm2-135m-instruct \(default\) +98\.4 MB +Apache-2\.0 +no +-", out)
    row = json.loads(cli("models", "--json")[1])
    assert row["name"] == "smollm2-135m-instruct"
    assert row["cached"] is False


# progress


def test_progress_off_a_terminal_tells_announcements_and_what_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("cupaged.cli.terminal.time.monotonic", lambda: now[0])
    with ProgressView() as progress:
        progress("compiling", 0, 0)
        for now[0] in (0.0, 1.0, 4.0, 5.0):
            progress("downloading", 1, 10)
        progress("loading", 1, 10)
        progress("loading", 10, 10)
    assert capsys.readouterr().err == "compiling\ndownloading\n"
