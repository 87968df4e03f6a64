"""Models of random numbers: the shape of a real one without its checkpoint. Tensors give the same numbers every time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupaged import LLM, model_loader
from cupaged.checkpoint.base import Checkpoint
from cupaged.config import ModelConfig
from cupaged.model.weights import EMBEDDING, expected_shapes

LLAMA_8B = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, tie_word_embeddings=False)
SMOLLM2_135M = ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, tie_word_embeddings=True)
TINY = ModelConfig("llama", 128, 64, 96, 2, 3, 1, 64, 512, tie_word_embeddings=False)

PATTERN = 2_097_143
"""Numbers until they repeat: a prime, so no two rows of a matrix are the same."""

LARGEST_PIECE = 1 << 20
"""Numbers that a piece of a loading model has at most."""

STORAGES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class RandomTensor:
    """A TensorSource of normal numbers of variance 1 / width (a vector: ones), already in the type of the weights, which
    spares a conversion of billions of them."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        self.name, self.shape, self.storage, self._dtype = name, shape, STORAGES[dtype], dtype
        self._seed = sum(name.encode()) * 7919

    def read(self, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        rows = len(range(self.shape[0])[start:stop])
        if len(self.shape) == 1:
            return np.ones(rows, np.float32)
        width = self.shape[1]
        pattern = _pattern(width, self._dtype)
        at, count = (self._seed + start * width) % PATTERN, rows * width
        if count > LARGEST_PIECE:
            return np.resize(np.concatenate([pattern[at:PATTERN], pattern[:at]]), (rows, width))
        return pattern[at : at + count].reshape(rows, width)

    def read_blocks(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint8]:
        rows = self.read(start, stop)
        return rows.reshape(len(rows), -1).view(np.uint8)


@lru_cache
def _pattern(width: int, dtype: str) -> npt.NDArray[Any]:
    """PATTERN numbers, and the first ones again: a piece that begins anywhere in it is one slice."""
    numbers = np.random.default_rng(width).standard_normal(PATTERN, np.float32) * np.float32(width**-0.5)
    return np.concatenate([numbers, numbers[:LARGEST_PIECE]]).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def checkpoint(config: ModelConfig, dtype: str) -> Checkpoint:
    """One that lies nowhere: every tensor of the config at random."""
    return Checkpoint(Path("random"), config, {name: RandomTensor(name, shape, dtype) for name, shape in expected_shapes(config).items()})


@contextmanager
def instead_of_a_file(config: ModelConfig, dtype: str) -> Iterator[None]:
    """Whatever model is opened in here is a random one of this shape."""
    with mock.patch.multiple(model_loader, resolve_model=lambda *_: Path("random"), open_checkpoint=lambda _: checkpoint(config, dtype)):
        yield


def open_random(config: ModelConfig, dtype: str = "bfloat16", **options: Any) -> LLM:
    """The engine as users have it, with the weights of a random model."""
    with instead_of_a_file(config, dtype):
        return LLM("random", dtype=dtype, **options)


def weight_bytes(config: ModelConfig, itemsize: int = 2) -> int:
    """What a step reads of the weights: all matrices, but of an embedding that is no head only the rows of its tokens."""
    shapes = expected_shapes(config)
    left_out = () if config.tie_word_embeddings else (EMBEDDING,)
    return itemsize * sum(int(np.prod(shape, dtype=np.int64)) for name, shape in shapes.items() if name not in left_out and len(shape) == 2)
