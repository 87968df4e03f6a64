"""A GGUF file as a Checkpoint: Hugging Face names and row order over the file's own."""

from __future__ import annotations

import math
import re
from pathlib import Path

from cupaged.checkpoint.base import Checkpoint
from cupaged.checkpoint.gguf_blocks import CODECS, TYPE_NAMES
from cupaged.checkpoint.gguf_config import generation_defaults, model_config
from cupaged.checkpoint.gguf_header import GgufHeader, TensorEntry, read_header
from cupaged.checkpoint.mapped_file import MappedFile
from cupaged.checkpoint.stored_tensor import PairedRows, StoredTensor
from cupaged.errors import CheckpointError, UnsupportedModelError
from cupaged.tensor_source import TensorSource

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_PAIRED = re.compile(r"\.self_attn\.[qk]_proj\.(weight|bias)$")
_ROPE_FREQS = "rope_freqs.weight"
"""Divisors of the rotary frequencies (Llama 3.x): part of the configuration, not a weight."""


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file: reads its header and checks that every tensor lies inside the file.

    Raises CheckpointError for a damaged file, UnsupportedModelError for a model or tensor type that is not computed.
    """
    header, file = read_header(path), MappedFile(path)
    stored = _stored_tensors(file, header)
    rope_freqs = stored.pop(_ROPE_FREQS, None)
    freq_factors = None if rope_freqs is None else tuple(rope_freqs.read().tolist())
    config = model_config(path, header.metadata, {name: tensor.shape for name, tensor in stored.items()}, freq_factors)
    tensors: dict[str, TensorSource] = {}
    for tensor in stored.values():
        # only the `llama` architecture's converter interleaves the two halves of a head (see PairedRows)
        paired = config.architecture == "llama" and _PAIRED.search(tensor.name) is not None
        tensors[tensor.name] = PairedRows(tensor, config.head_dim) if paired else tensor
    file.close()  # of which the frequencies were read
    return Checkpoint(path, config, tensors, generation_defaults(path, header.metadata), header.metadata, [file])


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name that has none stays as it is."""
    layer = _LAYER.fullmatch(name)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name


def _stored_tensors(file: MappedFile, header: GgufHeader) -> dict[str, StoredTensor]:
    """Tensors by GGUF name, each known to lie inside the file; they themselves carry their Hugging Face names."""
    path = file.path
    size = path.stat().st_size
    stored: dict[str, StoredTensor] = {}
    for entry in header.tensors:
        if entry.name in stored:
            raise CheckpointError(f"{path} lists tensor {entry.name} twice")
        tensor = _stored_tensor(file, entry)
        if tensor.offset + tensor.nbytes > size:
            raise CheckpointError(
                f"{path} is cut short: tensor {entry.name} ends at byte {tensor.offset + tensor.nbytes} of {size}; get the file again"
            )
        stored[entry.name] = tensor
    return stored


def _stored_tensor(file: MappedFile, entry: TensorEntry) -> StoredTensor:
    path = file.path
    kind = TYPE_NAMES.get(entry.type_id, f"number {entry.type_id}")
    codec = CODECS.get(kind)
    if codec is None:
        raise UnsupportedModelError(f"{path}: tensor {entry.name} has type {kind}; supported types: {', '.join(CODECS)}")
    if entry.shape[-1] % codec.block_values:
        raise CheckpointError(
            f"{path}: tensor {entry.name} has rows of {entry.shape[-1]} values, which {kind} cannot store in blocks of {codec.block_values}"
        )
    if math.prod(entry.shape) < 1:
        raise CheckpointError(f"{path}: tensor {entry.name} is empty")
    return StoredTensor(hf_name(entry.name), entry.shape, file, entry.offset, codec)
