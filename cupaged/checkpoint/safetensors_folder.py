"""A folder in Hugging Face layout as a Checkpoint: config.json beside model.safetensors or an index and its shards.

A safetensors file is an 8-byte little-endian length, a JSON header of that length (name -> dtype, shape, byte range
counted from the header's end) and the tensors. The header is parsed here, because the library that reads the format
keeps all pages of a file that it has read, which then count as this process's memory.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from cupaged.checkpoint.base import Checkpoint
from cupaged.checkpoint.codecs import BF16_CODEC, F16_CODEC, F32_CODEC
from cupaged.checkpoint.hf_config import generation_defaults, model_config
from cupaged.checkpoint.json_file import parse_json, read_json
from cupaged.checkpoint.mapped_file import MappedFile
from cupaged.checkpoint.stored_tensor import StoredTensor, UnreadableTensor
from cupaged.errors import CheckpointError, UnsupportedModelError
from cupaged.tensor_source import TensorSource

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_CODECS = {codec.name: codec for codec in (F32_CODEC, F16_CODEC, BF16_CODEC)}
_MAX_HEADER = 100_000_000
"""The format's own bound on the header's length, in bytes."""


def open_folder(path: Path) -> Checkpoint:
    """Open a folder: reads its JSON files and the shards' headers, and checks that every tensor lies inside its file.

    Raises CheckpointError for missing or damaged files, UnsupportedModelError for what the engine does not compute.
    """
    if not (path / "config.json").is_file():
        raise CheckpointError(_not_a_model(path))
    raw = read_json(path / "config.json")
    generation_file = path / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    config = model_config(path / "config.json", raw, generation)
    files: list[MappedFile] = []
    tensors = _open_tensors(path, files)
    return Checkpoint(path, config, tensors, generation_defaults(generation_file, generation), files=files)


def _open_tensors(path: Path, files: list[MappedFile]) -> dict[str, TensorSource]:
    """All tensors by name, and their files added to `files`. One file wins over an index, as in transformers."""
    if (path / WEIGHTS).is_file():
        files.append(MappedFile(path / WEIGHTS))
        return read_tensors(files[0])
    if not (path / INDEX).is_file():
        raise _no_weights(path)
    places = read_json(path / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise CheckpointError(f"{path / INDEX} has no weight_map from tensor names to file names")
    shards: dict[str, dict[str, TensorSource]] = {}
    for shard in sorted(set(places.values())):
        if not (path / shard).is_file():
            raise CheckpointError(f"{path / INDEX} names {shard}, which is not there; get the model again")
        files.append(MappedFile(path / shard))
        shards[shard] = read_tensors(files[-1])
    # the index alone says where a tensor comes from: a shard may hold stale copies of others
    tensors: dict[str, TensorSource] = {}
    for name, shard in places.items():
        if name not in shards[shard]:
            raise CheckpointError(f"{path / shard} lacks tensor {name}, which {INDEX} says it holds")
        tensors[name] = shards[shard][name]
    return tensors


def read_tensors(file: MappedFile) -> dict[str, TensorSource]:
    """The tensors of one safetensors file by name. Raises CheckpointError if it is damaged or cut short."""
    path = file.path
    try:
        size = path.stat().st_size
        with open(path, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise CheckpointError(f"{path} is not a complete safetensors file: its header does not fit")
            header = parse_json(opened.read(length), f"the header of {path}")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    header.pop("__metadata__", None)
    return {name: _tensor(file, name, entry, 8 + length, size) for name, entry in header.items()}


def _tensor(file: MappedFile, name: str, entry: Any, data_start: int, size: int) -> TensorSource:
    path = file.path
    try:
        storage, shape, (start, end) = str(entry["dtype"]), tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path} has a damaged header: the entry of tensor {name} is {entry!r}") from None
    if not 0 <= start <= end or min(shape, default=1) < 0:
        raise CheckpointError(f"{path} has a damaged header: the entry of tensor {name} is {entry!r}")
    if data_start + end > size:
        raise CheckpointError(f"{path} is cut short: tensor {name} ends at byte {data_start + end} of {size}; get the file again")
    codec = _CODECS.get(storage)
    if codec is None:
        return UnreadableTensor(name, shape, storage)
    if end - start != math.prod(shape) * codec.block_bytes:
        raise CheckpointError(f"{path} has a damaged header: tensor {name} is {storage} {list(shape)} in {end - start} bytes")
    return StoredTensor(name, shape, file, data_start + start, codec)


def _not_a_model(path: Path) -> str:
    """What to do about a folder without config.json."""
    files = sorted(path.glob("*.gguf"))
    if files:
        return f"{path} holds GGUF files: give the path of one, such as {files[0]}"
    if (path / "adapter_config.json").is_file():
        return f"{path} holds an adapter, not a model: merge it into its base model first"
    return f"{path} is not a model: it has no config.json"


def _no_weights(path: Path) -> CheckpointError:
    """What to do about a folder without readable weights."""
    if any(path.glob("model-*-of-*.safetensors")):
        return CheckpointError(f"{path} holds shards but not their index, {INDEX}; get the model again")
    if any(path.glob("*.bin")) or any(path.glob("*.pth")) or any(path.glob("*.pt")):
        return UnsupportedModelError(
            f"{path} holds PyTorch weights only; convert them to safetensors (transformers: save_pretrained) and try again"
        )
    return CheckpointError(f"{path} has no weights: neither {WEIGHTS} nor {INDEX} is there")
