"""Models on disk: safetensors folders and GGUF files, opened lazily. `open_checkpoint` chooses by the path."""

from __future__ import annotations

from pathlib import Path

from cupaged.checkpoint.base import Checkpoint, GenerationDefaults
from cupaged.checkpoint.gguf_file import open_gguf
from cupaged.checkpoint.gguf_header import MAGIC
from cupaged.checkpoint.safetensors_folder import open_folder
from cupaged.errors import CheckpointError

__all__ = ["Checkpoint", "GenerationDefaults", "open_checkpoint"]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder in Hugging Face layout or a GGUF file, which its first bytes tell, whatever it is called.

    Reads headers and configuration, no tensors. Raises CheckpointError when something is missing or damaged, and
    UnsupportedModelError when it is sound but not computed by this engine.
    """
    try:
        if path.is_dir():
            return open_folder(path)
        with open(path, "rb") as file:
            magic = file.read(len(MAGIC))
    except FileNotFoundError:
        raise CheckpointError(f"no such model: {path} does not exist") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    if path.suffix == ".gguf" or magic == MAGIC:
        return open_gguf(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} is only a part of a model: give the folder that also holds its config.json")
    raise CheckpointError(f"{path} is neither a GGUF file nor a folder with config.json and safetensors")
