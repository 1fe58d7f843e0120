"""What must never happen to a conversion: wrong values, a hang, lost edits, rests."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import google_crc32c
import numpy as np
import pytest
import scipy.sparse as sp
import zarr

from scgpu_tasks.__main__ import main
from scgpu_tasks.errors import (
    ClusterError,
    CorruptChunkError,
    FormatError,
    OutputError,
    StoreError,
)
from scgpu_tasks.io.convert import ConvertSpec, convert_zarr, read_manifest, verify_store
from scgpu_tasks.io.convert.many import convert_if_changed
from scgpu_tasks.io.convert.prepared import file_name
from scgpu_tasks.io.convert.progress import Job
from scgpu_tasks.io.rows import open_rows

from .test_convert_round_trip import assert_same, atlas, read, write

SMALL = ConvertSpec(chunk_bytes=1024, shard_bytes=8 * 1024)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small zarr store."""
    write(atlas(), tmp_path / "a.zarr", "zarr v3", 0)
    return tmp_path / "a.zarr"


def flip(file: Path, at: int) -> None:
    """Flip one bit."""
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize("csr", [False, True])
def test_layers_with_look_alike_paths_keep_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, csr: bool
) -> None:
    from scgpu_tasks.io.convert import readers

    monkeypatch.setattr(readers, "BAND_BYTES", 1024)
    rng = np.random.default_rng(0)
    form = sp.csc_matrix if csr else sp.csr_matrix
    adata = atlas(200, 90)
    adata.layers["x"] = form(rng.poisson(3, (200, 90)).astype(np.float64))
    adata.layers["x~data"] = rng.random((200, 90))
    adata.layers["layers~x"] = form(rng.poisson(1, (200, 90)).astype(np.float64))
    write(adata, tmp_path / "a.zarr", "zarr v2", 0)
    convert_zarr(tmp_path / "a.zarr", tmp_path / "b.zarr", spec=ConvertSpec(csr=csr), workers=1)
    found = read(tmp_path / "b.zarr")
    for name in ("x", "x~data", "layers~x"):
        want, got = (
            layer.toarray() if sp.issparse(layer) else layer
            for layer in (adata.layers[name], found.layers[name])
        )
        np.testing.assert_array_equal(got, want)


def test_names_of_scratch_files_differ_and_fit_any_file_system() -> None:
    paths = ["layers/x/data", "layers/x~data", "layers~x/data", "layers/X/data", "é/" * 200]
    names = [file_name(path).casefold() for path in paths]
    assert len(set(names)) == len(paths)
    assert max(map(len, names)) < 200


def test_a_scratch_file_of_another_array_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scgpu_tasks.io.convert import readers
    from scgpu_tasks.io.source import open_source

    monkeypatch.setattr(readers, "BAND_BYTES", 1024)
    adata = atlas(200, 90)
    adata.layers["a"], adata.layers["b"] = np.zeros((200, 90)), np.ones((200, 90))
    write(adata, tmp_path / "a.zarr", "zarr v2", 0)
    scratch = tmp_path / "scratch"
    with open_source(tmp_path / "a.zarr") as opened:
        for name in "ab":
            readers.ArrayReader(opened, f"layers/{name}", scratch)(0, 3)
        files = [scratch / f"{file_name(f'layers/{name}')}.0" for name in "ab"]
        shutil.copyfile(files[0], files[1])
        with pytest.raises(CorruptChunkError, match=r"scratch file .*layers/a.*layers/b"):
            readers.ArrayReader(opened, "layers/b", scratch)(0, 3)


def test_a_damaged_chunk_ends_with_one_error_that_is_not_its_own_cause(
    tmp_path: Path, source: Path
) -> None:
    from distributed import Client, LocalCluster

    chunk = source / "X/data/c/0"
    chunk.write_bytes(chunk.read_bytes()[:-9])

    def refused(**options: Any) -> None:
        with pytest.raises(CorruptChunkError, match="array X/data") as caught:
            convert_zarr(source, tmp_path / "b.zarr", **options)
        seen: list[BaseException] = []
        error: BaseException | None = caught.value
        while error is not None:
            assert all(error is not other for other in seen)
            seen.append(error)
            error = error.__cause__

    refused(workers=1)
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0"
        ) as cluster,
        Client(cluster),
    ):
        refused()


def test_a_client_that_was_closed_is_not_asked(tmp_path: Path) -> None:
    from distributed import Client

    write(atlas(), tmp_path / "a.h5ad", "h5ad", 1)
    with Client(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0"
    ) as client:
        client.close()
        # Still the current one of this block.
        assert Client.current() is client
        convert_zarr(tmp_path / "a.h5ad", tmp_path / "b.zarr")
    assert_same(read(tmp_path / "a.h5ad"), read(tmp_path / "b.zarr"))


@pytest.mark.parametrize("how", ["replaced", "in place"])
def test_workers_that_live_on_read_what_the_source_holds_now(tmp_path: Path, how: str) -> None:
    from distributed import Client, LocalCluster

    from scgpu_tasks.io.convert.worker import workers

    path, target = tmp_path / "a.h5ad", tmp_path / "b.zarr"
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0"
        ) as cluster,
        Client(cluster),
    ):
        for seed in range(3):
            adata = atlas(seed=seed)
            new = tmp_path / "new.h5ad" if how == "replaced" else path
            # HDF5 locks files, so writing in place fails while a worker has it open.
            write(adata, new, "h5ad", 1)
            if new != path:
                new.replace(path)
            convert_zarr(path, target, overwrite=True)
            assert_same(read(path), read(target))
            assert str(path) not in workers.sources()


def test_a_job_that_was_queued_when_its_conversion_failed_opens_and_writes_nothing(
    tmp_path: Path, source: Path
) -> None:
    from distributed import Client, Event, LocalCluster

    from scgpu_tasks.io.convert.worker import Task, forget, remote, workers

    task = Task(str(source), str(tmp_path / "w"), SMALL, True, "stamp")

    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        # The one thread is busy, so the job waits for it.
        leave = Event("leave")
        first = client.submit(Event.wait, leave, 30, pure=False)
        queued = client.submit(remote, task, "", "write", Job("X/data", (0,), 1), pure=False)
        client.run(forget, task)
        leave.set()
        with pytest.raises(ClusterError, match=rf"{source} has ended"):
            queued.result(30)
        assert first.result(30)
    assert str(source) not in workers.sources()
    assert not (tmp_path / "w").exists()


def test_a_source_is_closed_only_when_its_last_job_has_ended(
    tmp_path: Path, source: Path
) -> None:
    from scgpu_tasks.io.convert.worker import Task, _Workers

    pool = _Workers()
    closed: list[str] = []
    tasks = [Task(str(source), str(tmp_path / "w"), SMALL, True, "stamp") for _ in range(7)]
    assert len(set(tasks)) == 7
    inside, leave = threading.Event(), threading.Event()

    def job() -> None:
        with pool.use(tasks[0], "") as worker:
            worker.source._closers += (contextlib.closing(_Noted(closed)).thing,)
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=job)
    thread.start()
    inside.wait(30)
    for task in tasks[1:]:
        with pool.use(task, ""):
            pass
    pool.forget(tasks[0])
    assert not closed
    assert len(pool.sources()) == pool.LIMIT
    leave.set()
    thread.join()
    assert closed == ["closed"]


class _Noted:
    """Notes that it was closed."""

    def __init__(self, closed: list[str]) -> None:
        self._closed = closed

    def close(self) -> None:
        self._closed.append("closed")


def add_umap(store: Path) -> None:
    group = zarr.open_group(store, mode="a", use_consolidated=False)
    ad.io.write_elem(group["obsm"], "X_umap", np.ones((group["X"].attrs["shape"][0], 2)))


def set_value(store: Path) -> None:
    array = zarr.open_array(store / "X/data", mode="r+")
    array[0] = array[0] + 1


def note(store: Path) -> None:
    (store / "README.txt").write_text("mine")


@pytest.mark.parametrize("edit", [add_umap, set_value, note])
def test_a_store_that_was_edited_is_replaced_only_when_asked(
    tmp_path: Path, source: Path, edit: Any
) -> None:
    target = tmp_path / "b.zarr"
    convert_if_changed(source, target, spec=SMALL)
    edit(target)
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    set_value(source)
    with pytest.raises(OutputError, match=r"was changed since.*--overwrite"):
        convert_if_changed(source, target, spec=SMALL)
    assert {p: p.read_bytes() for p in target.rglob("*") if p.is_file()} == before
    assert not (tmp_path / "b.zarr.converting").exists()
    convert_if_changed(source, target, spec=SMALL, overwrite=True)
    assert_same(read(source), read(target))


def test_an_edit_made_during_the_conversion_is_kept(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "b.zarr"
    convert_if_changed(source, target, spec=SMALL)
    set_value(source)

    def edit(state: Any) -> None:
        if state.done_shards == 3:
            add_umap(target)

    with pytest.raises(OutputError, match="was changed since"):
        convert_if_changed(source, target, spec=SMALL, progress=edit)
    assert (target / "obsm/X_umap").exists()


def test_a_copy_of_a_store_that_nobody_edited_is_replaced(tmp_path: Path, source: Path) -> None:
    convert_if_changed(source, tmp_path / "first.zarr", spec=SMALL)
    shutil.copytree(tmp_path / "first.zarr", tmp_path / "b.zarr")
    set_value(source)
    result = convert_if_changed(source, tmp_path / "b.zarr", spec=SMALL)
    assert result is not None
    assert any("earlier state of the source" in line for line in result.notes)
    assert_same(read(source), read(tmp_path / "b.zarr"))


def test_a_conversion_that_wrote_nothing_leaves_nothing(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
        with pytest.raises(OutputError, match=r"needs about .* are free"):
            convert_zarr(source, tmp_path / "b.zarr")
    assert [path.name for path in tmp_path.iterdir()] == ["a.zarr"]


def test_a_refusal_keeps_what_an_earlier_run_wrote(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(state: Any) -> None:
        if state.done_shards == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_zarr(source, tmp_path / "b.zarr", spec=SMALL, workers=1, progress=stop)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
        with pytest.raises(OutputError, match=r"needs about .* are free"):
            convert_zarr(source, tmp_path / "b.zarr", spec=SMALL)
    assert convert_zarr(source, tmp_path / "b.zarr", spec=SMALL).shards_reused >= 5


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system without a free byte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root and the right to mount")
    with (folder / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_too_full_for_a_lock_is_named_and_left_as_it_was(
    source: Path, full_disk: Path
) -> None:
    with pytest.raises(OutputError, match=r"the disk is full|bytes? are free|MiB are free"):
        convert_zarr(source, full_disk / "b.zarr")
    assert [path.name for path in full_disk.iterdir()] == ["ballast"]


def test_verifying_names_every_file_that_differs(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "b.zarr"
    convert_zarr(source, store, spec=SMALL)
    assert verify_store(store) == []
    assert main(["check", str(store), "--verify"]) == 0
    flip(store / "X/data/c/1", 40)
    (store / "X/indices/c/0").write_bytes(b"short")
    (store / "X/indptr/c/0").unlink()
    (store / "obs/extra").touch()
    flip(store / "var/zarr.json", -2)
    found = verify_store(store)
    names = ["X/data/c/1", "X/indices/c/0", "X/indptr/c/0", "obs/extra", "var/zarr.json"]
    assert [line.split()[0] for line in found] == names
    words = ("CRC-32C", "has 5 bytes instead", "is missing", "was added", "CRC-32C")
    assert all(word in line for word, line in zip(words, found, strict=True))
    capsys.readouterr()
    assert main(["check", str(store), "--verify"]) == 1
    assert all(line in capsys.readouterr().out for line in [found[0]])
    assert main(["check", str(store), "--verify", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["differences"] == found


def test_the_manifest_lists_every_file_but_itself(tmp_path: Path, source: Path) -> None:
    store = tmp_path / "b.zarr"
    convert_zarr(source, store)
    manifest = read_manifest(store)
    assert manifest is not None
    listed = [*manifest["shards"], *manifest["files"]]
    files = {str(path.relative_to(store)) for path in store.rglob("*") if path.is_file()}
    assert len(listed) == len(set(listed))
    assert [Path(name).name for name in files - set(listed)] == [".scgpu-manifest.json"]


def test_what_cannot_be_verified_is_refused(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FormatError, match="no manifest"):
        verify_store(source)
    with pytest.raises(StoreError, match="no store at"):
        verify_store(tmp_path / "none.zarr")
    with pytest.raises(FormatError, match="on a file system"):
        verify_store("memory://a.zarr")
    assert main(["check", str(source), "--verify"]) == 1
    assert "no manifest" in capsys.readouterr().err


@pytest.mark.parametrize("array", ["data", "indices"])
def test_a_flipped_bit_of_a_converted_chunk_is_refused_wherever_it_is(
    tmp_path: Path, array: str
) -> None:
    store = tmp_path / "b.zarr"
    write(atlas(), tmp_path / "a.h5ad", "h5ad", 0)
    convert_zarr(tmp_path / "a.h5ad", store, spec=SMALL)
    file = store / f"X/{array}/c/0"
    whole = file.read_bytes()
    chunks = zarr.open_array(store / f"X/{array}", mode="r")
    n = chunks.shards[0] // chunks.chunks[0]
    index = np.frombuffer(whole[-16 * n - 4 : -4], "<u8").reshape(n, 2)
    rows = read(store).n_obs
    want = open_rows(store).read(0, rows).to_matrix()
    offset, size = map(int, index[1])
    # The magic number and the header, the payload, the checksum.
    for at in (0, 4, 5, size // 4, size // 2, 3 * size // 4, size - 5, size - 4, size - 1):
        flip(file, offset + at)
        found, told = want, None
        try:
            found = open_rows(store).read(0, rows).to_matrix()
        except CorruptChunkError as error:
            told = error
        if told is None:
            # The headers have a bit or two that nobody uses.
            assert at < 8
            assert (found != want).nnz == 0
        else:
            assert (told.array, told.shard) == (f"X/{array}", "c/0")
            assert told.chunk is not None
        file.write_bytes(whole)
    assert (open_rows(store).read(0, rows).to_matrix() != want).nnz == 0


def test_a_source_that_cannot_be_read_is_named_and_nothing_else_is_blamed(
    tmp_path: Path,
) -> None:
    source = tmp_path / "a.zarr"
    write(atlas(), source, "zarr v2", 1)
    # A folder where a file should be stands for a bad disk, and needs no rights of its own.
    place = source / "X/data/0"
    kept = place.rename(tmp_path / "kept")
    place.mkdir()
    told = r"a\.zarr: chunk 0 of X/data cannot be read \(Is a directory\)"
    with pytest.raises(StoreError, match=told):
        convert_zarr(source, tmp_path / "b.zarr")
    assert not (tmp_path / "b.zarr").exists()
    place.rmdir()
    kept.rename(place)
    convert_zarr(source, tmp_path / "b.zarr")
    assert_same(read(source), read(tmp_path / "b.zarr"))


def test_a_conversion_that_leaves_x_in_columns_says_so(tmp_path: Path) -> None:
    source = tmp_path / "a.h5ad"
    ad.AnnData(sp.random(60, 40, 0.2, "csc", np.float32)).write_h5ad(source)
    (note,) = convert_zarr(source, tmp_path / "a.zarr").notes
    assert note == "X stays by columns (CSC), so QC cannot read it; --csr makes it CSR"
    assert convert_zarr(source, tmp_path / "b.zarr", spec=ConvertSpec(csr=True)).notes == ()


def test_threads_that_cannot_start_end_the_conversion(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("convert_2"):
            msg = "can't start new thread"
            raise RuntimeError(msg)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        convert_zarr(source, tmp_path / "b.zarr", spec=SMALL, workers=4)
    monkeypatch.undo()
    assert not [t for t in threading.enumerate() if t.name.startswith("convert")]
    convert_zarr(source, tmp_path / "b.zarr", spec=SMALL)


def test_elements_with_names_like_leftovers_are_kept(tmp_path: Path) -> None:
    adata = atlas()
    adata.obs["q.partial"] = np.arange(adata.n_obs)
    adata.uns["deep"] = {"a.partial": np.arange(3), "y.__lock": "text"}
    write(adata, tmp_path / "a.zarr", "zarr v3", 0)
    convert_zarr(tmp_path / "a.zarr", tmp_path / "b.zarr")
    assert_same(read(tmp_path / "a.zarr"), read(tmp_path / "b.zarr"))


def damage_before_verifying(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Have a shard of X/data changed after it was written."""
    from scgpu_tasks.io.convert.encode import FileWriter

    finish = FileWriter.finish

    def wrong(self: FileWriter) -> Any:
        written = finish(self)
        if self._target.parts[-3:] == ("data", "c", "0") and "X" in self._target.parts:
            data = bytearray(self._target.read_bytes())
            change(data, self._index)
            self._target.write_bytes(data)
        return written

    monkeypatch.setattr(FileWriter, "finish", wrong)


def end_with_index(data: bytearray, index: np.ndarray) -> None:
    raw = index.tobytes()
    checksum = int(google_crc32c.value(raw)).to_bytes(4, "little")
    data[-len(raw) - 4 :] = raw + checksum


def clear_flag(data: bytearray, index: np.ndarray) -> None:
    data[int(index[9, 0]) + 4] ^= 4


def lengthen(data: bytearray, index: np.ndarray) -> None:
    index[-1, 1] += 1
    end_with_index(data, index)


def move_away(data: bytearray, index: np.ndarray) -> None:
    index[3, 0] += 2**40
    end_with_index(data, index)


def swap(data: bytearray, index: np.ndarray) -> None:
    index[[10, 12]] = index[[12, 10]]
    end_with_index(data, index)


@pytest.mark.parametrize("change", [clear_flag, lengthen, move_away, swap])
def test_what_zarr_could_not_read_is_not_called_verified(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    from scgpu_tasks.io.convert import encode

    # Several pieces: the first is read through zarr in any case.
    monkeypatch.setattr(encode, "PIECE_BYTES", 2048)
    damage_before_verifying(monkeypatch, change)
    spec = ConvertSpec(chunk_bytes=1024, shard_bytes=2**20)
    with pytest.raises(CorruptChunkError, match=r"run the conversion again"):
        convert_zarr(source, tmp_path / "b.zarr", spec=spec, workers=1)
    assert not (tmp_path / "b.zarr").exists()


def test_a_change_that_breaks_strings_is_told_as_a_change(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scgpu_tasks.io.convert import elements

    def replaced(*_: Any) -> None:
        (source / "obs" / "_index" / "new").write_text("x")
        msg = "cannot reshape array of size 1"
        raise ValueError(msg)

    monkeypatch.setattr(elements, "copy_strings", replaced)
    with pytest.raises(StoreError, match="changed, or was removed, while it was converted"):
        convert_zarr(source, tmp_path / "b.zarr", spec=SMALL)


def test_a_source_that_cannot_be_asked_any_more_hides_no_error(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scgpu_tasks.io.convert import elements
    from scgpu_tasks.io.source import Source

    def lost(*_: Any) -> None:
        msg = "the connection was lost"
        monkeypatch.setattr(Source, "stamp", lost)
        raise RuntimeError(msg)

    monkeypatch.setattr(elements, "copy_strings", lost)
    with pytest.raises(RuntimeError, match="the connection was lost") as raised:
        convert_zarr(source, tmp_path / "b.zarr", spec=SMALL)
    assert raised.value.__cause__ is None
    assert not (tmp_path / "b.zarr").exists()


ASKED: list[str] = []


def no_gpu(sizes: list[tuple[int, int]]) -> bool:
    """Travels to a worker of this process by its name."""
    ASKED.append(str(sizes))
    return False


def test_workers_without_a_gpu_compress_by_themselves(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distributed import Client

    from scgpu_tasks.io.convert import device

    ASKED.clear()
    monkeypatch.setattr(device, "_LEAST_BYTES", 0)
    monkeypatch.setattr(device, "suits", lambda _: True)
    monkeypatch.setattr(device, "_can_compress", no_gpu)
    with Client(processes=False, n_workers=1, threads_per_worker=2, dashboard_address=":0"):
        result = convert_zarr(source, tmp_path / "b.zarr", spec=SMALL)
    assert ASKED
    assert not any("GPU" in note for note in result.notes)
    assert_same(read(source), read(tmp_path / "b.zarr"))
