"""One tree of typed errors; every error a user can cause is one of these and carries one clear line.

    CupagedError
    |- ConfigError (ValueError)        an option, or a combination of options, out of range or not built
    |  `- ParameterError               the same for a sampling parameter
    |- RequestError (ValueError)       a request that can never be served: empty, too long, larger than the pool
    |- CheckpointError                 a model's files are missing, damaged or do not fit together
    |  |- UnsupportedModelError        they are fine, but describe something this engine does not compute
    |  `- TokenizerError               the tokenizer's part of them
    |     `- ChatTemplateError         the chat template's part: absent, broken, or refusing the messages
    |- HubError                        a model's name could not be turned into files
    |- WorkloadError                   a trace, an arrival rate or a mix of requests that makes no sense
    |- BackendError                    a device, compiler or kernel is not usable
    |  `- KernelError                  a kernel broke a rule of its device, or was called with wrong arguments
    `- InvariantError                  the engine's own bookkeeping is corrupt: a bug, never a user's fault

Two families ask for two reactions. A caller reports a CupagedError by its message and goes on with other requests;
an InvariantError means that the pool can no longer be trusted.
"""

__all__ = [
    "BackendError",
    "ChatTemplateError",
    "CheckpointError",
    "ConfigError",
    "CupagedError",
    "HubError",
    "InvariantError",
    "KernelError",
    "ParameterError",
    "RequestError",
    "TokenizerError",
    "UnsupportedModelError",
    "WorkloadError",
    "shown",
]

_SHOWN_CHARACTERS = 100


class CupagedError(Exception):
    """Base of every error that cupaged raises on purpose; `str(error)` is one line for the user."""


class ConfigError(CupagedError, ValueError):
    """An engine option is out of range, unknown, or needs a part that is not built."""


class ParameterError(ConfigError):
    """A sampling parameter is out of range or unknown."""


class RequestError(CupagedError, ValueError):
    """A request that can never be served; others are not affected."""


class CheckpointError(CupagedError):
    """A model's files are missing, damaged or contradict each other."""


class UnsupportedModelError(CheckpointError):
    """The files are sound but describe a model that this engine does not compute."""


class TokenizerError(CheckpointError):
    """The tokenizer's files are missing, damaged or of a kind that is not supported."""


class ChatTemplateError(TokenizerError):
    """The chat template is absent, does not compile, or refuses the messages."""


class HubError(CupagedError):
    """A model's name could not be turned into local files."""


class WorkloadError(CupagedError):
    """A trace, an arrival rate or a mix of requests that cannot be served or makes no sense."""


class BackendError(CupagedError):
    """A device, a compiler or a kernel cannot be used."""


class KernelError(BackendError):
    """A kernel broke a rule of its device, or was called with wrong arguments.

    `kind` is the rule, in two or three words ("data race"); `array` the argument or shared array, `file` and `line` the
    place in the kernel's source, `block` and `thread` who did it, each None where it is not known.
    """

    def __init__(
        self,
        message: str,
        *,
        kernel: str,
        kind: str,
        array: str | None = None,
        file: str | None = None,
        line: int | None = None,
        block: tuple[int, int, int] | None = None,
        thread: tuple[int, int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.kernel, self.kind, self.array = kernel, kind, array
        self.file, self.line = file, line
        self.block, self.thread = block, thread


class InvariantError(CupagedError):
    """Corrupt bookkeeping: a wrong reference count, a slot written twice. Always a bug in cupaged."""


def shown(value: object) -> str:
    """A wrong value as an error names it: its repr, on one line and not too long for one."""
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):  # an integer of thousands of digits, a list of thousands of levels
        return f"<{type(value).__name__} too large to show>"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
