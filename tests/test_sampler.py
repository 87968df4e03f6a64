"""Packing: every parameter of a request reaches its own row of the SamplingBatch."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from cupaged.backends.base import Backend
from cupaged.model import sampler
from cupaged.params import SamplingParams
from cupaged.step_plan import IntArray, SampleSpec


def test_each_parameter_goes_to_its_own_row() -> None:
    full = SamplingParams(
        temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, repetition_penalty=1.5, presence_penalty=-1.0,
        frequency_penalty=2.0, logit_bias={3: 1.5, 9: -2.0},
    )  # fmt: skip
    batch = sampler.pack(
        [
            SampleSpec(SamplingParams(temperature=0), row_id=4, seed=1, index=0),
            SampleSpec(full, row_id=2, seed=2**64 - 1, index=3, banned=(8, 11)),
            SampleSpec(SamplingParams(top_k=-1, temperature=1e-6), row_id=0, seed=2, index=0),
        ],
        np.array([5, 9, 1], np.int32),
    )
    assert batch.num_rows == 3
    assert batch.temperature.tolist() == [0.0, 0.5, 0.0]
    assert batch.top_k.tolist() == [0, 7, 0]
    assert batch.top_p.tolist() == [1.0, 0.25, 1.0]
    assert batch.min_p.tolist() == [0.0, 0.125, 0.0]
    assert batch.repetition.tolist() == [1.0, 1.5, 1.0]
    assert batch.presence.tolist() == [0.0, -1.0, 0.0]
    assert batch.frequency.tolist() == [0.0, 2.0, 0.0]
    assert batch.penalised.tolist() == [False, True, False]
    assert batch.seeds.tolist() == [1, 2**64 - 1, 2]
    assert batch.positions.tolist() == [5, 9, 1]
    assert batch.indices.tolist() == [0, 3, 0]
    assert batch.row_ids.tolist() == [4, 2, 0]
    assert batch.bias_start.tolist() == [0, 0, 4, 4]
    assert batch.bias_ids.tolist() == [3, 9, 8, 11]
    assert batch.bias_values.tolist() == [1.5, -2.0, -np.inf, -np.inf]


def test_histories_are_sent_for_the_rows_that_bring_one() -> None:
    sent: list[tuple[int, list[int], list[int]]] = []

    class Recorder:
        def set_history(self, row_id: int, prompt_ids: IntArray, output_ids: IntArray) -> None:
            sent.append((row_id, prompt_ids.tolist(), output_ids.tolist()))

    backend: Backend = Recorder()  # type: ignore[assignment]  # the one operation that is used here
    history = (np.array([1, 2], np.int32), np.array([3], np.int32))
    params = SamplingParams(presence_penalty=1.0)
    specs = [SampleSpec(params, 5, 0, 0, history=history), SampleSpec(params, 6, 0, 0)]
    sampler.send_histories(specs, backend)
    assert sent == [(5, [1, 2], [3])]


def test_packing_step_after_step_is_packing_each() -> None:
    one, other = SamplingParams(temperature=0.5, logit_bias={3: 1.0}), SamplingParams(temperature=0.5, logit_bias={3: 2.0})
    first, second = SampleSpec(one, row_id=0, seed=1, index=0), SampleSpec(one, row_id=1, seed=2, index=0)
    both = (first, second)
    steps = [
        *(both, both, (second, first), (first,), (first,), ()),
        *((replace(first, params=other),), (first,), (replace(first, seed=3),), (replace(first, index=1),)),
        *((replace(first, row_id=2),), (replace(first, banned=(7,)),), (replace(first, banned=(8,)),), (first,)),
    ]
    packer = sampler.Packer()
    for step, specs in enumerate(steps):
        positions = np.arange(step, step + len(specs), dtype=np.int32)
        packed, whole = packer.pack(specs, positions), sampler.pack(specs, positions)
        for field in fields(packed):
            np.testing.assert_array_equal(getattr(packed, field.name), getattr(whole, field.name), err_msg=field.name)


def test_the_packer_knows_how_many_logprobs_are_wanted() -> None:
    packer = sampler.Packer()
    wanted = []
    for asked in ([None], [None, 3, 0], [0], [], [None]):
        specs = tuple(SampleSpec(SamplingParams(logprobs=k), row_id=0, seed=0, index=0) for k in asked)
        packer.pack(specs, np.arange(len(specs), dtype=np.int32))
        wanted.append(packer.logprobs)
    assert wanted == [-1, 3, 0, -1, -1]


def test_plain_steps_take_the_likeliest_token_of_every_row_and_nothing_else() -> None:
    packer = sampler.Packer()

    def plain(*params: SamplingParams, banned: tuple[int, ...] = ()) -> bool:
        specs = tuple(SampleSpec(p, row_id=i, seed=0, index=0, banned=banned) for i, p in enumerate(params))
        packer.pack(specs, np.arange(len(specs), dtype=np.int32))
        return packer.plain

    greedy = SamplingParams(temperature=0)
    assert plain(greedy, SamplingParams(temperature=1e-6, top_p=0.5))
    assert not plain(greedy, SamplingParams(temperature=0.1))
    assert not plain(greedy, SamplingParams(temperature=0, presence_penalty=1.0))
    assert not plain(SamplingParams(temperature=0, logit_bias={3: 1.0}), greedy)
    assert not plain(greedy, banned=(3,))
    assert not plain(SamplingParams(temperature=0, logprobs=0))
    assert plain(greedy)
