"""The size of the KV pool, against sizes computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cupaged.config import EngineConfig, ModelConfig, RopeConfig
from cupaged.errors import ConfigError
from cupaged.memory import available_memory, size_pool, swap_blocks

MODEL = ModelConfig(
    architecture="llama", vocab_size=10, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
    num_kv_heads=3, head_dim=64, max_position=2048,
)  # fmt: skip
TOKEN_BYTES = 2 * 30 * 3 * 64 * 4
GIB = 1 << 30


def sized(available: int = 8 * GIB, **options: object) -> tuple[int, int]:
    config = size_pool(EngineConfig(**options), MODEL, available)
    return config.num_blocks, config.max_model_len


def test_a_token_of_the_default_model_takes_46080_bytes() -> None:
    assert MODEL.kv_bytes_per_token() == TOKEN_BYTES == 46080


def test_a_quarter_of_the_free_memory() -> None:
    assert sized(8 * GIB) == (2 * GIB // (16 * TOKEN_BYTES), 2048)


def test_never_more_than_all_sequences_can_use() -> None:
    assert sized(1000 * GIB, max_num_seqs=2) == (2 * 128, 2048)


def test_memory_in_bytes_is_taken_as_given() -> None:
    assert sized(kv_cache_memory=200 * 16 * TOKEN_BYTES + 5) == (200, 2048)


def test_blocks_are_never_more_than_int32_can_number() -> None:
    assert sized(kv_cache_memory=2**80)[0] == 2**31 - 1


def test_num_blocks_comes_first() -> None:
    assert sized(num_blocks=300, kv_cache_memory=1) == (300, 2048)


def test_a_small_pool_shortens_the_longest_sequence() -> None:
    assert sized(num_blocks=10) == (10, 160)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 4, "max_model_len": 100}, "4 blocks hold 64 tokens, max_model_len is 100; raise num_blocks to 7"),
        ({"kv_cache_memory": 1000}, "holds no block: one block of 16 tokens takes 737280 bytes"),
        ({"max_model_len": 5000}, "above the model's 2048"),
        ({"num_blocks": 1, "block_size": 1}, "too small: 1 token"),
        ({"num_blocks": 2**31}, "num_blocks must be between 1 and 2147483647"),
        ({"threads": 40_000}, "threads must be between 1 and 1024"),
        ({"available": 1000}, "too few for a KV pool"),
    ],
)
def test_a_pool_too_small_is_refused_in_one_line(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        sized(**options)
    assert "\n" not in str(raised.value)


def test_this_machine_has_memory() -> None:
    assert available_memory() > 0


def test_dynamic_ntk_may_be_stretched_but_only_on_request() -> None:
    stretched = replace(MODEL, rope=RopeConfig(scaling="dynamic", factor=4.0))
    assert size_pool(EngineConfig(), stretched, 100 * GIB).max_model_len == 2048
    assert size_pool(EngineConfig(max_model_len=8192), stretched, 100 * GIB).max_model_len == 8192
    with pytest.raises(ConfigError, match="above the model's 8192"):
        size_pool(EngineConfig(max_model_len=8193), stretched, 100 * GIB)


def test_swap_space_is_counted_in_blocks() -> None:
    assert swap_blocks(EngineConfig(), MODEL) == 0
    assert swap_blocks(EngineConfig(preemption="swap"), MODEL) == GIB // (16 * TOKEN_BYTES)
    assert swap_blocks(EngineConfig(preemption="auto", swap_space=16 * TOKEN_BYTES), MODEL) == 1
    with pytest.raises(ConfigError, match=r"swap_space .5 bytes. holds no block"):
        swap_blocks(EngineConfig(preemption="swap", swap_space=5), MODEL)
