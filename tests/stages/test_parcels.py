"""Large results reach the client through shared memory, or else as any other result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scgpu_tasks.errors import OutputError
from scgpu_tasks.stages import parcels
from scgpu_tasks.stages.parcels import FileArray, LocalArray, Mailbox, Parcel, pack, unpack_sent


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(parcels, "SHARED_MEMORY", tmp_path)
    return tmp_path


def test_arrays_in_a_parcel_come_back_as_they_were() -> None:
    rng = np.random.default_rng(0)
    sent = {
        "scores": rng.random((100_000, 3)).astype(np.float32),
        "columns": np.asfortranarray(rng.random((100, 200))),
        "strided": np.arange(500_000)[::2],
        "none": np.zeros((0, 4)),
        "text": "x",
    }
    box = Mailbox()
    packed = pack(sent, box.address)
    assert isinstance(packed, Parcel)
    assert len(packed.pickled) < 3_000_000
    got = box.open(packed)
    box.close()
    for name in ("scores", "columns", "strided", "none"):
        assert got[name].tobytes() == sent[name].tobytes()
        got[name][...] = 1
    assert got["text"] == "x"


def test_small_results_travel_as_they_are() -> None:
    box = Mailbox()
    assert pack("x" * 10, box.address) == "x" * 10
    assert box.open([1]) == [1]
    box.close()


def test_workers_elsewhere_send_their_results() -> None:
    large = np.zeros(1 << 20)
    assert pack(large, "/nowhere/at/all") is large
    assert pack(large, None) is large


def test_no_room_in_shared_memory_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    box = Mailbox()
    monkeypatch.setattr("os.posix_fallocate", full)
    large = np.zeros(1 << 20)
    assert pack(large, box.address) is large
    assert box.array((10, 2), np.float32) is None
    box.close()


def test_closing_leaves_no_file(memory: Path) -> None:
    box = Mailbox()
    pack(np.zeros(1 << 20), box.address)
    box.close()
    assert list(memory.iterdir()) == []


def test_no_shared_memory_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "SHARED_MEMORY", Path("/nowhere"))
    box = Mailbox()
    assert box.address is None
    assert box.array((1,), np.int8) is None
    box.close()


def test_the_mailbox_of_a_killed_process_is_swept(memory: Path) -> None:
    code = (
        "import os, pathlib; from scgpu_tasks.stages import parcels; "
        f"parcels.SHARED_MEMORY = pathlib.Path({str(memory)!r}); "
        "parcels.Mailbox(); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert len(list(memory.iterdir())) == 1
    living = Mailbox()
    assert [str(path) for path in memory.iterdir()] == [living.address]
    other = Mailbox()
    assert len(list(memory.iterdir())) == 2
    living.close()
    other.close()


@pytest.mark.parametrize("kind", ["local", "shared"])
def test_rows_written_by_tasks_are_in_the_array(kind: str) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    box = Mailbox()
    shared = box.array((6, 3), np.float32)
    assert shared is not None
    array = shared.map() if kind == "shared" else np.zeros((6, 3), np.float32)
    target = shared if kind == "shared" else LocalArray(array)
    assert target.write(2, rows)
    assert target.write(0, rows[:0])
    box.close()
    np.testing.assert_array_equal(array[2:], rows)
    np.testing.assert_array_equal(array[:2], 0)
    if kind == "shared":
        assert not target.write(0, rows)


def test_what_was_sent_can_be_unpacked_twice_and_stays_as_it_was() -> None:
    box = Mailbox()
    sent = box.send({"values": np.arange(1 << 18, dtype=np.float64)})
    assert isinstance(sent, Parcel)
    first = unpack_sent(sent)
    first["values"][0] = 7
    assert unpack_sent(sent)["values"][0] == 0
    box.discard(sent)
    with pytest.raises(FileNotFoundError):
        unpack_sent(sent)
    box.close()


def test_rows_of_a_shared_array_land_at_their_place() -> None:
    box = Mailbox()
    shared = box.array((5_000, 3), np.float32)
    assert shared is not None
    for first in (0, 1_234, 4_999):
        assert shared.write(first, np.full((1, 3), first + 1.0))
    assert shared.write(5_000, np.empty((0, 3)))
    found = shared.map()
    assert found[[0, 1_234, 4_999], 2].tolist() == [1, 1_235, 5_000]
    assert np.count_nonzero(found) == 9
    box.close()
    assert not shared.write(0, np.zeros((1, 3)))


def test_a_file_is_filled_by_those_who_see_the_witness(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).random((7, 3)).astype(np.float32)
    file, box = FileArray.create(tmp_path / "a.npy", (7, 3), np.float32), Mailbox()
    target = box.reach(file)
    assert target is not None
    assert target.write(2, rows[2:])
    box.close()
    # As a worker on another machine, which sees the file, but not the mailbox.
    assert not target.write(0, rows[:2] + 1)
    assert file.write(0, rows[:2])
    assert not Path(file.path).exists()
    assert file.map().tobytes() == np.load(file.path).tobytes() == rows.tobytes()
    file.discard()
    assert [path.name for path in tmp_path.iterdir()] == ["a.npy"]


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.npy").mkdir()
    with pytest.raises(OutputError, match=r"a\.npy: something that is no file"):
        FileArray.create(tmp_path / "a.npy", (7, 3), np.float32)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npy"]


def test_a_file_that_the_disk_has_no_room_for_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OutputError, match=r"a\.npy: the disk is full; free some space"):
        FileArray.create(tmp_path / "a.npy", (7, 3), np.float32)
