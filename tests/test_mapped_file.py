"""Files are read where the system has them: no copies, no handle left behind, no memory of their size, no crash where one shrinks."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest

from cupaged.checkpoint import open_checkpoint
from cupaged.checkpoint.codecs import F32, U8, Codec
from cupaged.checkpoint.gguf_blocks import CODECS
from cupaged.checkpoint.mapped_file import CAN_GIVE_BACK, GIVE_BACK, MappedFile
from cupaged.checkpoint.stored_tensor import StoredTensor
from cupaged.config import ModelConfig
from cupaged.errors import CheckpointError
from tests.checkpoint_builders import CONFIG, random_tensors, write_folder, write_gguf, write_shards

MODEL = ModelConfig("llama", 40, 32, 64, 2, 4, 2, 16, 128, bos_token_id=1, eos_token_ids=(2,))

needs_handles = pytest.mark.skipif(not hasattr(psutil.Process, "num_fds"), reason="this system does not count handles")


def handles() -> int:
    return psutil.Process().num_fds()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of 40,000 bytes, byte i being i modulo 251."""
    (tmp_path / "file").write_bytes((np.arange(40_000) % 251).astype(np.uint8).tobytes())
    return tmp_path / "file"


def expected(start: int, stop: int) -> U8:
    return (np.arange(start, stop) % 251).astype(np.uint8)


# ---- no copies


def test_a_codec_decodes_the_mapped_bytes_themselves(path: Path) -> None:
    seen: list[U8] = []

    def decode(raw: U8, out: F32) -> None:
        seen.append(raw)
        out[:] = raw.view("<f4")

    file = MappedFile(path)
    StoredTensor("t", (100, 10), file, 8, Codec("F32", 1, 4, decode)).read(20, 30)
    assert np.shares_memory(seen[0], file.read(8 + 800, 8 + 1200, "t"))
    assert seen[0].nbytes == 400


def test_stored_rows_are_a_view_that_nobody_can_write(path: Path) -> None:
    file = MappedFile(path)
    tensor = StoredTensor("t", (100, 10), file, 5, CODECS["F32"])
    rows = tensor.read_blocks(3, 50)
    assert np.shares_memory(rows, tensor.read_blocks())
    assert np.shares_memory(rows, file.read(5 + 3 * 40, 5 + 3 * 40 + 1, "t"))
    with pytest.raises(ValueError, match="read-only"):
        rows[0, 0] = 1


@pytest.mark.parametrize("kind", CODECS)
def test_tensors_may_begin_at_any_byte(kind: str, tmp_path: Path) -> None:
    codec = CODECS[kind]
    raw = np.random.default_rng(6).integers(0, 60, (3, 2 * codec.block_bytes), dtype=np.uint8)
    (tmp_path / "t").write_bytes(bytes(7) + raw.tobytes())
    (tmp_path / "aligned").write_bytes(raw.tobytes())
    tensor = StoredTensor("t", (3, 2 * codec.block_values), MappedFile(tmp_path / "t"), 7, codec)
    np.testing.assert_array_equal(tensor.read_blocks(), raw)
    np.testing.assert_array_equal(tensor.read(), StoredTensor("t", tensor.shape, MappedFile(tmp_path / "aligned"), 0, codec).read())


# ---- handles


@needs_handles
@pytest.mark.parametrize(("kind", "files"), [("gguf", 1), ("folder", 1), ("shards", 2)])
def test_a_checkpoint_holds_its_files_from_the_first_read_until_it_is_closed(kind: str, files: int, tmp_path: Path) -> None:
    tensors, free = random_tensors(MODEL), handles()
    if kind == "gguf":
        path = write_gguf(tmp_path / "m.gguf", MODEL, tensors)
    elif kind == "folder":
        path = write_folder(tmp_path / "m", CONFIG, tensors)
    else:
        index = {name: f"{name.startswith('model.layers.')}.safetensors" for name in tensors}
        shards = {shard: {name: tensors[name] for name in tensors if index[name] == shard} for shard in set(index.values())}
        path = write_shards(tmp_path / "m", CONFIG, shards, index)
    checkpoint = open_checkpoint(path)
    assert handles() == free
    for _ in range(2):  # it can be read again after it was closed
        for source in checkpoint.tensors.values():
            source.read()
        assert handles() == free + files
        checkpoint.close()
        assert handles() == free
    next(iter(checkpoint.tensors.values())).read()
    del checkpoint, source
    assert handles() == free  # nobody has to close it


@needs_handles
def test_an_array_outlives_close_and_even_the_file(path: Path) -> None:
    file, free = MappedFile(path), handles()
    array = file.read(1000, 39_000, "t")
    file.close()
    path.unlink()
    np.testing.assert_array_equal(array, expected(1000, 39_000))
    with pytest.raises(CheckpointError, match=r"cannot read tensor t from .*: No such file"):
        file.read(0, 1, "t")
    del array
    assert handles() == free


def test_a_deleted_file_can_be_read_while_it_is_mapped(path: Path) -> None:
    file = MappedFile(path)
    file.read(0, 1, "t")
    path.unlink()
    np.testing.assert_array_equal(file.read(5, 40_000, "t"), expected(5, 40_000))


def test_threads_read_and_close_at_once(path: Path) -> None:
    file, wrong = MappedFile(path), list[int]()

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(300):
            start, stop = np.sort(rng.integers(0, 40_000, 2))
            if not np.array_equal(file.read(start, stop, "t"), expected(start, stop)):
                wrong.append(start)
            if rng.random() < 0.1:
                file.close()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- files that change


@pytest.mark.parametrize("length", [0, 1, 4096, 30_000, 39_999])
def test_a_file_cut_short_is_an_error_and_nothing_worse(path: Path, length: int) -> None:
    file = MappedFile(path)
    file.read(0, 40_000, "t")
    os.truncate(path, length)
    with pytest.raises(CheckpointError, match="file ends inside tensor t: it was cut short"):
        file.read(length, length + 1, "t")
    with pytest.raises(CheckpointError, match="cut short"):
        MappedFile(path).read(39_000, 40_000, "t")
    if length:
        np.testing.assert_array_equal(file.read(0, length, "t"), expected(0, length))
    os.truncate(path, 40_000)
    np.testing.assert_array_equal(file.read(0, 40_000, "t")[:length], expected(0, length))


def test_a_tensor_that_is_cut_while_it_is_decoded(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(bytes(4 << 20))

    def decode(raw: U8, out: F32) -> None:
        os.truncate(path, 1 << 20)

    with pytest.raises(CheckpointError, match="cut short"):
        StoredTensor("t", (1024, 1024), MappedFile(path), 0, Codec("F32", 1, 4, decode)).read()


# ---- memory


@pytest.mark.skipif(not CAN_GIVE_BACK, reason="this system takes pages back when it likes")
def test_a_file_of_any_size_takes_a_few_megabytes(tmp_path: Path) -> None:
    size, piece = 16 * GIVE_BACK, GIVE_BACK // 4
    with open(tmp_path / "large", "wb") as hole:
        hole.truncate(size)
    file, resident = MappedFile(tmp_path / "large"), psutil.Process().memory_info
    before, most = resident().rss, 0
    for start in range(0, size, piece):
        assert not file.read(start, start + piece, "t").any()
        most = max(most, resident().rss - before)
    assert GIVE_BACK // 2 < most < 2 * GIVE_BACK  # mapped pages are seen, and they go
    del file
    assert resident().rss - before < GIVE_BACK // 2
