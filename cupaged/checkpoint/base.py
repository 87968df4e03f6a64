"""What every checkpoint offers, whatever its format: a config, tensors by name, and the files beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cupaged.checkpoint.mapped_file import MappedFile
from cupaged.config import ModelConfig
from cupaged.tensor_source import TensorSource


@dataclass(frozen=True)
class GenerationDefaults:
    """What generation_config.json recommends; None where it is silent. Fields are named as in SamplingParams."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk, opened: headers are read, tensors are not.

    tensors     by Hugging Face name ("model.layers.0.self_attn.q_proj.weight"), in Hugging Face's row order,
                whatever the file calls or permutes them
    metadata    a GGUF file's key-value pairs ("tokenizer.ggml.tokens" -> list, ...); empty for a folder
    files       those that the tensors are read from
    """

    path: Path
    config: ModelConfig
    tensors: Mapping[str, TensorSource]
    generation: GenerationDefaults = GenerationDefaults()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    files: Sequence[MappedFile] = ()

    def file(self, name: str) -> Path | None:
        """A file beside the weights ("tokenizer.json"), or None; always None for a GGUF file."""
        if not self.path.is_dir():
            return None
        candidate = self.path / name
        return candidate if candidate.is_file() else None

    def close(self) -> None:
        """Hold no file any longer. Tensors may still be read: their file is mapped again."""
        for file in self.files:
            file.close()
