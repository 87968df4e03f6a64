"""Checks of what writes, copies and swaps the cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupaged.backends.base import AttentionBatch, Backend
from cupaged.conformance.case import check, expect, expect_close, expect_equal, expect_refusal
from cupaged.conformance.paged import Paged
from cupaged.conformance.steps import changed, load_batch, stored_slots
from cupaged.conformance.subject import Subject, float64


@check("rope_and_cache", heads=[(9, 3, 64), (2, 2, 32), (4, 1, 128), (1, 1, 2)], block_size=[1, 3, 16, 256])
def rotates_in_place_and_writes_the_rows_slots_only(subject: Subject, block_size: int, heads: tuple[int, int, int]) -> None:
    num_heads, kv_heads, head_dim = heads
    paged = Paged([40, 5, 70, 300], [1, 1, 70, 120], block_size, kv_heads, num_heads // kv_heads, head_dim, padded=2).stored_as(subject)
    batch, half = paged.batch, head_dim // 2
    angles = np.arange(301)[:, None] / 1e4 ** (np.arange(half) / head_dim * 2)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    expected_key, expected_value = paged.pool()
    expected = float64(paged.qkv).reshape(paged.rows, -1, head_dim)
    for row, position in enumerate(batch.positions.tolist()):
        for head in expected[row, : num_heads + kv_heads]:
            for i in range(half):
                a, b, c, s = head[i], head[i + half], cos[position, i], sin[position, i]
                head[i], head[i + half] = a * c - b * s, a * s + b * c
        if batch.slots[row] >= 0:
            block, offset = divmod(int(batch.slots[row]), block_size)
            expected_key[block, :, offset] = expected[row, num_heads : num_heads + kv_heads]
            expected_value[block, :, offset] = expected[row, num_heads + kv_heads :]
    backend, caches, qkv = subject.backend, paged.fill(subject), subject.in_place(paged.qkv)
    backend.rope_and_cache(qkv.array, backend.upload(cos), backend.upload(sin), paged.load(backend), num_heads, *caches)
    qkv.check(expected.reshape(paged.rows, -1))
    for cache, wanted in zip(stored_slots(backend, caches, block_size, head_dim, subject.kv_dtype), (expected_key, expected_value), strict=True):
        written = ~np.isnan(wanted)
        expect_equal(~np.isnan(cache), written, "the set of written slots")
        expect_close(cache[written], wanted[written], subject.kv_tolerance)


@check("set_batch", wrong=[("slots", 10**9), ("slots", 12), ("positions", 50), ("positions", -1)])
def a_slot_or_position_outside_is_refused(subject: Subject, wrong: tuple[str, int]) -> None:
    field, bad = wrong
    arrays: dict[str, Any] = {"positions": np.array([0, 1], np.int32), "slots": np.array([0, 1], np.int64)}
    arrays[field][1] = bad
    tables, starts, contexts = np.zeros((2, 1), np.int32), np.arange(3, dtype=np.int32), np.ones(2, np.int32)
    batch = AttentionBatch(arrays["positions"], arrays["slots"], tables, starts, contexts, 2, 1)
    with expect_refusal(field[:-1]):
        load_batch(subject.backend, batch, num_blocks=3, block_size=4, positions=50)


@check("set_batch")
def a_batch_keeps_its_step_when_the_next_one_is_refused(subject: Subject) -> None:
    paged = Paged([30], [1], 8, 1, 1, 4).stored_as(subject)
    batch = paged.load(subject.backend)
    with expect_refusal("slot"):
        subject.backend.set_batch(batch, np.zeros(1, np.int32), changed(paged.batch, slots=np.array([10**6])))
    out = subject.output(1, 4)
    subject.backend.attention(subject.upload(paged.qkv), *paged.fill(subject), batch, 1, 0.3, 0, out.array)
    out.check(paged.attention(0.3, 0))


def random_caches(backend: Backend, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """A pool of [layers, blocks, heads, block size, head_dim] with random bytes, NaNs among them."""
    caches = backend.new_kv_cache(*shape)
    for cache in caches:
        content = cache.view(np.uint8)
        content[...] = backend.upload(np.random.default_rng(0).integers(0, 256, content.shape, np.uint8))
    return caches


def downloaded(backend: Backend, caches: tuple[Any, Any]) -> list[Any]:
    """Copies of the bytes of caches."""
    return [backend.download(cache).view(np.uint8).copy() for cache in caches]


@check("copy_blocks", shape=[(1, 4, 1, 1, 2), (3, 9, 3, 16, 64), (2, 9, 1, 3, 6)], count=[0, 1, 3])
def copies_whole_blocks_in_all_layers(subject: Subject, shape: tuple[int, ...], count: int) -> None:
    caches = random_caches(subject.backend, shape)
    order = np.random.default_rng(2).permutation(shape[1])
    pairs = np.array([[order[0], order[i + 1]] for i in range(count)], np.int32).reshape(count, 2)
    wanted = downloaded(subject.backend, caches)
    for source, destination in pairs:
        for expected in wanted:
            expected[:, destination] = expected[:, source]
    subject.backend.copy_blocks(*caches, pairs)
    for name, now, expected in zip(("keys", "values"), downloaded(subject.backend, caches), wanted, strict=True):
        expect_equal(now, expected, f"the pool of {name}")


@check("copy_blocks", pair=[(0, 4), (-1, 2), (5, 0)])
def a_block_outside_the_pool_cannot_be_copied(subject: Subject, pair: tuple[int, int]) -> None:
    caches = random_caches(subject.backend, (1, 4, 1, 2, 2))
    with expect_refusal("block"):
        subject.backend.copy_blocks(*caches, np.array([pair], np.int32))


@check("swap_blocks")
def moves_whole_blocks_out_and_back(subject: Subject) -> None:
    backend = subject.backend
    pool, host = random_caches(backend, (3, 7, 2, 4, 6)), backend.new_swap_space(3, 5, 2, 4, 6)
    before = downloaded(backend, pool)
    backend.swap_blocks(pool, host, np.array([[6, 0], [1, 4]], np.int32))
    downloaded(backend, pool)  # after that it is done, whoever looks
    for array in pool:
        array.view(np.uint8)[:, [1, 6]] = 0xFF
    backend.swap_blocks(host, pool, np.array([[4, 3], [0, 2]], np.int32))
    for now, then in zip(downloaded(backend, pool), before, strict=True):
        expect_equal(now[:, 3], then[:, 1], "block 1, swapped out to 4 and in to 3,")
        expect_equal(now[:, 2], then[:, 6], "block 6, swapped out to 0 and in to 2,")
        expect_equal(now[:, [0, 4, 5]], then[:, [0, 4, 5]], "a block that was not swapped")


@check("swap_blocks", pair=[(7, 0), (0, 5), (-1, 0), (0, -1)])
def a_block_that_is_not_there_cannot_be_swapped(subject: Subject, pair: tuple[int, int]) -> None:
    pool = random_caches(subject.backend, (1, 7, 1, 2, 2))
    with expect_refusal("block"):
        subject.backend.swap_blocks(pool, subject.backend.new_swap_space(1, 5, 1, 2, 2), np.array([pair], np.int32))


@check("new_kv_cache")
def has_a_layer_and_a_block_where_the_contract_says(subject: Subject) -> None:
    for cache in subject.backend.new_kv_cache(2, 5, 3, 16, 8):
        expect(len(cache) == 2 and len(cache[0]) == 5, "a cache is not [layers, blocks, ...]")
        expect(cache.flags.c_contiguous, "a cache is not contiguous")
