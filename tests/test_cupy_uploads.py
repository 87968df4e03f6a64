"""What a step sends to the GPU: how often, and how much."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupaged import LLM, SamplingParams
from cupaged.backends import cupy_device
from cupaged.backends.base import AttentionBatch, BatchLimits
from cupaged.backends.cupy_device import CupyDevice
from cupaged.backends.emu_device import EmuDevice
from cupaged.backends.kernel_batch import DeviceBatch
from cupaged.backends.kernel_sampling import DeviceParameters
from cupaged.step_plan import StepPlan
from tests.family_models import ROOT
from tests.support import fake_cupy
from tests.support.kernels import skip_without_compiler
from tests.support.sampling import batch_of

Sent = list[int]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """The bytes of every upload."""
    skip_without_compiler()
    fake_cupy.install(monkeypatch)
    sizes: Sent = []
    plain, of_rows = fake_cupy.memcpyAsync, fake_cupy.memcpy2DAsync

    def copy(dst: int, src: int, size: int, kind: int, stream: int) -> None:
        sizes.append(size)
        plain(dst, src, size, kind, stream)

    def copy_rows(dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: int, stream: int) -> None:
        sizes.append(width * height)
        of_rows(dst, dpitch, src, spitch, width, height, kind, stream)

    monkeypatch.setattr(fake_cupy.runtime, "memcpyAsync", copy)
    monkeypatch.setattr(fake_cupy.runtime, "memcpy2DAsync", copy_rows)
    return sizes


# ---- how often

REQUESTS = {
    "greedy": {"temperature": 0},
    "everything": {
        "temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.1,
        "logit_bias": {5: 1.0, 6: -1.0},
    },
}  # fmt: skip


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_decode_step_is_sent_in_two_pieces_at_most(sent: Sent, request_: str, enforce_eager: bool) -> None:
    """Its rows, and how to choose their tokens unless the likeliest ones are wanted (array by array these were 7 pieces, or 15); of
    a graph the tables, too, where they have changed."""
    llm = LLM(
        str(ROOT / "llama_tied"), device="cuda", dtype="float32", num_blocks=60, block_size=4, max_model_len=64, max_num_seqs=3, max_num_batched_tokens=32,
        enforce_eager=enforce_eager,
    )  # fmt: skip
    engine, counts = llm.engine, []
    submit = engine._runner.submit

    def watch(plan: StepPlan) -> Any:
        sent.clear()
        late = submit(plan)
        if plan.num_decode == plan.num_tokens == len(plan.samples) == 3 and all(spec.history is None for spec in plan.samples):
            counts.append((len(sent), any(item.start % 4 == 0 for item in plan.sequences)))
        return late

    engine._runner.submit = watch  # type: ignore[method-assign]
    llm.generate([[i, 4, 5, 6] for i in range(3, 6)], SamplingParams(seed=1, max_tokens=12, ignore_eos=True, **REQUESTS[request_]))
    counts = counts[2:]  # the first of all has another table
    assert len(counts) > 6
    assert {grown for _, grown in counts} == {False, True}
    for count, grown in counts:
        assert count == 1 + (request_ != "greedy") + (grown and not enforce_eager)


@pytest.mark.parametrize("device", ["emu", "cuda"])
def test_sampling_parameters_arrive_whole_however_many_there_are(sent: Sent, device: str) -> None:
    parameters = DeviceParameters(EmuDevice("check") if device == "emu" else CupyDevice())
    random = np.random.default_rng(0)
    for count, biases, adjusted in ((3, 0, False), (3, 2, True), (65, 0, True), (2, 200, True), (70, 1, False), (300, 9, True), (1, 0, False)):
        rows = [{"temperature": random.random(), "seeds": 2**64 - 1 - i, "presence": 0.5, "row_id": i, "bias": [(i, 1.5 * i)] * biases} for i in range(count)]
        batch = batch_of(rows)
        sent.clear()
        found = parameters.send(batch, adjusted)
        assert device == "emu" or len(sent) == 1
        choose, adjust, tally = ({name: fetch(array) for name, array in arrays.items()} for arrays in found)
        assert sorted(choose) == sorted(DeviceParameters.CHOOSE)
        assert sorted(adjust) == (sorted(DeviceParameters.ADJUST) if adjusted else [])
        assert sorted(tally) == (sorted(DeviceParameters.COUNT) if adjusted else [])
        for name, values in (choose | adjust | tally).items():
            assert np.array_equal(values, getattr(batch, name)), name
    assert len(parameters._mailboxes) == 4


def fetch(array: Any) -> np.ndarray:
    return array.get() if isinstance(array, fake_cupy.ndarray) else array


# ---- how much

WIDTH, SEQUENCES = 8192, 64
LIMITS = BatchLimits(rows=64, sequences=SEQUENCES, table_width=WIDTH, vocab_size=9, positions=16 * WIDTH, num_blocks=1000, block_size=16)


def decode(tables: list[list[int]]) -> tuple[np.ndarray, AttentionBatch]:
    """A row for each of these sequences, at the end of its last block."""
    contexts = np.array([16 * len(table) for table in tables], np.int32)
    padded = np.full((len(tables), max(map(len, tables))), -1, np.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    slots = np.array([16 * table[-1] + 15 for table in tables], np.int64)
    start = np.arange(len(tables) + 1, dtype=np.int32)
    return np.zeros(len(tables), np.int32), AttentionBatch(contexts - 1, slots, padded, start, contexts, len(tables), int(contexts.max()))


@pytest.mark.parametrize("graphs", [True, False])
def test_a_table_is_sent_as_far_as_it_is_used(sent: Sent, graphs: bool) -> None:
    batch = DeviceBatch(CupyDevice(), LIMITS, None, graphs)
    batch.set(*decode([[5 * i, 5 * i + 1, 5 * i + 2] for i in range(SEQUENCES)]))
    assert sum(sent) < 64 * 4 * 3 + 64 * (4 + 4 + 8 + 4 + 4) + 6 * 256  # the tables, all else of a row, and the gaps between arrays
    assert batch.rows.attention.block_tables.shape == (SEQUENCES, WIDTH if graphs else 3)


def test_a_graphs_table_follows_its_contexts_at_one_address(sent: Sent) -> None:
    batch = DeviceBatch(CupyDevice(), LIMITS, None, True)
    addresses = set()
    lives = [[[1]], [[1, 2], [3]], [[1, 2], [4]], [[1, 2], [4]], [[7, 8, 9]], [[1, 2], [4]], [[9] * (WIDTH - 1)], [[2, 3]], [[3, 3]]]
    for step, tables in enumerate(lives):
        token_ids, rows = decode(tables)
        expected = rows.block_tables.copy()
        sent.clear()
        batch.set(token_ids, rows)
        rows.block_tables.fill(0)  # it may change afterwards
        there = batch.rows.attention.block_tables
        addresses.add(there.data.ptr)
        assert there.shape == (batch.lanes, WIDTH)
        assert np.array_equal(there.get()[: len(expected), : expected.shape[1]], expected)
        assert len(sent) == 2 - (step == 3)  # the fourth is the third again
    assert len(addresses) == 1


def test_a_table_that_was_interrupted_is_sent_again(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CupyDevice()
    batch = DeviceBatch(device, LIMITS, None, True)
    batch.set(*decode([[1, 2]]))
    honest = device.fill

    def interrupted(*arguments: Any) -> None:
        honest(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(device, "fill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            batch.set(*decode([[3, 4]]))
    batch.set(*decode([[1, 2]]))
    assert batch.rows.attention.block_tables.get()[0, :2].tolist() == [1, 2]


def test_columns_of_a_matrix_are_filled_a_few_rows_at_a_time(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_device, "STAGE_BYTES", 100)
    monkeypatch.setattr(cupy_device, "SMALL_BYTES", 50)
    device, expected = CupyDevice(), np.zeros((7, 9), np.int32)
    matrix = device.upload(expected)
    for rows, columns in ((7, 5), (2, 6), (1, 3), (7, 9), (0, 2)):
        content = np.random.default_rng(columns).integers(0, 99, (rows, columns), np.int32)
        device.fill(matrix[:rows, :columns], content)
        expected[:rows, :columns] = content
        content[...] = -1
    assert np.array_equal(device.download(matrix), expected)
