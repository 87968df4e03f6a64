"""cupaged: LLM inference over a paged KV cache, without torch.

    from cupaged import LLM, SamplingParams

Names are imported when they are first used, so that `import cupaged` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cupaged._version import __version__ as __version__

if TYPE_CHECKING:
    from cupaged.config import EngineConfig as EngineConfig
    from cupaged.config import ModelConfig as ModelConfig
    from cupaged.engine import Engine as Engine
    from cupaged.errors import CupagedError as CupagedError
    from cupaged.llm import LLM as LLM
    from cupaged.outputs import BeamSearchOutput as BeamSearchOutput
    from cupaged.outputs import CompletionOutput as CompletionOutput
    from cupaged.outputs import Logprob as Logprob
    from cupaged.outputs import RequestOutput as RequestOutput
    from cupaged.params import BeamSearchParams as BeamSearchParams
    from cupaged.params import SamplingParams as SamplingParams

_EXPORTS = {
    "BeamSearchOutput": "cupaged.outputs",
    "BeamSearchParams": "cupaged.params",
    "CompletionOutput": "cupaged.outputs",
    "CupagedError": "cupaged.errors",
    "Engine": "cupaged.engine",
    "EngineConfig": "cupaged.config",
    "LLM": "cupaged.llm",
    "Logprob": "cupaged.outputs",
    "ModelConfig": "cupaged.config",
    "RequestOutput": "cupaged.outputs",
    "SamplingParams": "cupaged.params",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'cupaged' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
