"""Write a GGUF file again with its matrices as float16, for engines that are to be compared on 16-bit weights.

    python scripts/export_f16.py MODEL FILE

MODEL is whatever --model takes, if it is a GGUF file in the end. Metadata, tokenizer and the order of the rows stay;
blocks are dequantised and rounded to float16, vectors stay float32, as llama.cpp's own converter does it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, Keys, LlamaFileType, ReaderField
from gguf.quants import dequantize

from cupaged.hub import resolve_model

_OF_THE_FILE = "GGUF."
"""Begins the fields that a reader makes up from the header; a writer counts for itself."""


def _copy(field: ReaderField, writer: GGUFWriter) -> None:
    kind, *of_items = field.types
    writer.add_key_value(field.name, field.contents(), kind, of_items[-1] if of_items else None)


def narrow(name: str, tensor: np.ndarray) -> np.ndarray:
    """A matrix as float16. Raises ValueError where a number is too large for it."""
    with np.errstate(over="ignore"):
        halves = tensor.astype(np.float16)
    if not np.isfinite(halves).all():
        raise ValueError(f"tensor {name} holds numbers too large for float16")
    return halves


def export(model: str, file: Path) -> None:
    """Raises ValueError for a model that is no GGUF file, or does not fit float16."""
    source = resolve_model(model)
    if source.suffix != ".gguf":
        raise ValueError(f"{source} is not a GGUF file")
    reader: Any = GGUFReader(source)
    writer = GGUFWriter(file, reader.get_field(Keys.General.ARCHITECTURE).contents())
    for name, field in reader.fields.items():
        if not name.startswith(_OF_THE_FILE) and name not in (Keys.General.ARCHITECTURE, Keys.General.FILE_TYPE):
            _copy(field, writer)
    writer.add_key_value(Keys.General.FILE_TYPE, int(LlamaFileType.MOSTLY_F16), GGUFValueType.UINT32)
    for tensor in reader.tensors:
        wide = dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, narrow(tensor.name, wide) if wide.ndim > 1 else wide)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python scripts/export_f16.py MODEL FILE")
    export(sys.argv[1], Path(sys.argv[2]))
