"""Checks of attention over the paged cache."""

from __future__ import annotations

import numpy as np

from cupaged.backends.base import AttentionBatch
from cupaged.conformance.case import check, expect, expect_refusal
from cupaged.conformance.paged import Paged
from cupaged.conformance.steps import load_batch
from cupaged.conformance.subject import Subject


def of_large_scores(subject: Subject, least: float) -> float:
    """The tolerance where scores magnify the rounding of keys: in 8 bits only that there are numbers can be asked for."""
    return 2.0 if subject.kv_dtype == "int8" else max(least, subject.tolerance)


@check("attention", block_size=[1, 3, 8, 16, 256], chunk=[1, 2, 40])
def at_the_edges_of_blocks(subject: Subject, block_size: int, chunk: int) -> None:
    edges = [k * block_size + d for k in (1, 2, 5) for d in (-1, 0, 1)] if block_size < 256 else [255, 256, 257]
    contexts = [c for c in edges if c >= chunk] or [chunk]
    Paged(contexts, [chunk] * len(contexts), block_size, kv_heads=2, group=3, head_dim=16).check_attention(subject)


@check("attention", group=range(1, 17), head_dim=[64, 128, 32, 2, 80, 6])
def maps_query_heads_to_key_heads(subject: Subject, group: int, head_dim: int) -> None:
    kv_heads = {64: 3, 32: 2, 2: 5}.get(head_dim, 1)
    Paged([19, 34, 50], [1, 1, 22], 16, kv_heads, group, head_dim).check_attention(subject)


@check("attention", window=[1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 128, 140, 299, 300, 301, 1000], block_size=[8, 16])
def a_window_ends_where_it_should(subject: Subject, window: int, block_size: int) -> None:
    Paged([300, 33, 5, 300, 40], [1, 1, 1, 170, 40], block_size, 1, 2, 16).check_attention(subject, window)


@check("attention", context=[127, 128, 129, 255, 256, 257, 300], chunk=[2, 63, 64, 65, 127])
def chunks_of_a_long_prompt(subject: Subject, context: int, chunk: int) -> None:
    Paged([context], [chunk], 16, 1, 2, 64).check_attention(subject)


@check("attention", window=[0, 1, 600], contexts=[[511, 513], [1030, 700]])
def chunks_of_prompts_longer_than_a_tile(subject: Subject, contexts: list[int], window: int) -> None:
    Paged(list(contexts), [100, 70], 16, 1, 3, 16).check_attention(subject, window)


@check("attention")
def large_scores_in_a_later_tile_do_not_overflow(subject: Subject) -> None:
    paged = Paged([1200], [80], 16, 1, 2, 16)
    paged.keys[0] *= np.geomspace(1e-3, 30, 1200, dtype=np.float32)[:, None, None]
    with np.errstate(all="raise", under="ignore"):
        paged.check_attention(subject, scale=3.0, tolerance=of_large_scores(subject, 1e-4))


@check("attention", count=[1, 2, 3, 5, 9])
def decode_of_few_and_many_sequences_with_padded_lanes(subject: Subject, count: int) -> None:
    contexts = [1, 17, 60, 33, 2, 300, 16, 48, 15][:count]
    Paged(contexts, [1] * count, 16, 3, 3, 64, padded=count - 1).check_attention(subject)


@check("attention")
def large_scores_do_not_overflow(subject: Subject) -> None:
    with np.errstate(all="raise", under="ignore"):
        paged = Paged([40, 200, 60], [1, 60, 60], 16, 2, 2, 16)
        paged.check_attention(subject, scale=30.0, tolerance=of_large_scores(subject, 1e-4))


@check("attention")
def scores_that_are_all_far_below_zero(subject: Subject) -> None:
    paged = Paged([40, 60], [1, 60], 16, 2, 2, 16)
    paged.qkv[:] = 1
    for key in paged.keys:
        np.copyto(key, -20 * np.abs(key))
    paged.check_attention(subject, scale=1.0, tolerance=of_large_scores(subject, 1e-3))


@check("attention")
def a_nan_in_a_query_shows_in_its_row_and_in_no_other(subject: Subject) -> None:
    paged, out = Paged([70, 90], [1, 20], 16, 1, 2, 32).stored_as(subject), subject.output(21, 64)
    paged.qkv[3, :32] = np.nan
    subject.backend.attention(subject.upload(paged.qkv), *paged.fill(subject), paged.load(subject.backend), 2, 0.3, 0, out.array)
    numbers = out.numbers()
    expect(np.isnan(numbers[3, :32]).all(), "a query of NaN gives numbers")
    numbers[3, :32] = 0
    expect(np.isfinite(numbers).all(), "a query of NaN disturbs others")


@check("attention")
def rows_of_no_sequence_are_zeros(subject: Subject) -> None:
    paged, extra = Paged([5, 9], [1, 4], 4, 1, 2, 8).stored_as(subject), 3
    batch, qkv = paged.batch, np.concatenate([paged.qkv, subject.random(0, extra, paged.qkv.shape[1])])
    padded = AttentionBatch(
        np.concatenate([batch.positions, np.zeros(extra, np.int32)]), np.concatenate([batch.slots, np.full(extra, -1)]),
        batch.block_tables, batch.query_start, batch.context_lens, batch.num_decode, batch.max_context,
    )  # fmt: skip
    out = subject.output(len(qkv), 16)
    loaded = load_batch(subject.backend, padded, num_blocks=paged.num_blocks, block_size=4)
    subject.backend.attention(subject.upload(qkv), *paged.fill(subject), loaded, 2, 0.3, 0, out.array)
    out.check(np.concatenate([paged.attention(0.3, 0), np.zeros((extra, 16))]))


@check("set_batch", bad=[-1, -7, 10**6], sequence=[0, 1])
def a_block_outside_the_pool_is_refused(subject: Subject, bad: int, sequence: int) -> None:
    paged = Paged([30, 30], [1, 7], 8, 1, 1, 4)
    tables = paged.tables.copy()
    tables[sequence, 2] = bad
    with expect_refusal("block"):
        paged.load(subject.backend, block_tables=tables)


@check("attention")
def blocks_behind_the_window_may_be_missing_but_none_within(subject: Subject) -> None:
    paged = Paged([40, 30], [1, 9], 8, 1, 1, 4).stored_as(subject)
    caches, tables = paged.fill(subject), paged.tables.copy()
    tables[0, :3] = tables[1, :1] = -1  # the rows see 29 .. 39 and 11 .. 29
    out = subject.output(10, 4)
    batch = paged.load(subject.backend, window=11, block_tables=tables)
    subject.backend.attention(subject.upload(paged.qkv), *caches, batch, 1, 0.3, 11, out.array)
    out.check(paged.attention(0.3, 11))
    tables[1, 1] = -1
    with expect_refusal("block"):
        paged.load(subject.backend, window=11, block_tables=tables)
