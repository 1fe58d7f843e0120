"""Killed, out of space, two at once, changed underneath: the right end or a named error."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pytest
import zarr

from scgpu_tasks.errors import (
    CorruptChunkError,
    FormatError,
    OutputError,
    ParameterError,
    StoreError,
)
from scgpu_tasks.io.convert import (
    ConvertSpec,
    Progress,
    convert_zarr,
    is_current,
    manifest_path,
    read_manifest,
)

from .test_convert_round_trip import assert_same, atlas, read, write

KILLS = int(os.environ.get("SCGPU_KILLS", "6"))
SPEC = ConvertSpec(chunk_bytes=1024, shard_bytes=8 * 1024, csr=True, sum_duplicates=True)
# Imports once, and forks a process for each line of source, target, workers, small or not.
SCRIPT = """
import os, resource, sys
from scgpu_tasks.io.convert import ConvertSpec, convert_zarr
small = ConvertSpec(chunk_bytes=1024, shard_bytes=8 * 1024, csr=True, sum_duplicates=True)
for line in sys.stdin:
    source, target, workers, size = line.rstrip().split("|")
    child = os.fork()
    if child == 0:
        spec = small if size == "small" else ConvertSpec()
        result = convert_zarr(source, target, spec=spec, workers=int(workers))
        print("reused", result.shards_reused, flush=True)
        print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, flush=True)
        os._exit(0)
    print("started", child, flush=True)
    _, status = os.waitpid(child, 0)
    print("ended", status, flush=True)
"""


class Converter:
    """Starts conversions in processes of their own."""

    def __init__(self) -> None:
        self.peak = 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def convert(
        self,
        source: Path,
        target: Path,
        workers: int,
        kill_after: float | None = None,
        size: str = "small",
    ) -> tuple[bool, int]:
        """Return whether it was killed, and the number of shards it used again.

        `peak` is the most memory that the last one took, in bytes.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = "|".join(map(str, (source, target, workers, size)))
        print(line, file=self._process.stdin, flush=True)
        _, child = self._process.stdout.readline().split()
        if kill_after is not None:
            time.sleep(kill_after)
            with contextlib.suppress(ProcessLookupError):  # it was faster this time
                os.kill(int(child), signal.SIGKILL)
        reused = 0
        while True:
            word, number = self._process.stdout.readline().split()
            if word == "ended":
                assert int(number) in (0, signal.SIGKILL)
                return int(number) == signal.SIGKILL, reused
            if word == "peak":
                self.peak = int(number)
            else:
                reused = int(number)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def converter() -> Iterator[Converter]:
    """One process that starts all conversions."""
    made = Converter()
    yield made
    made.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gzip h5ad with a CSC matrix, raw, a layer."""
    adata = atlas(600, 300)
    adata.X = adata.X.tocsc()
    path = tmp_path_factory.mktemp("source") / "a.h5ad"
    write(adata, path, "h5ad", 1)
    return path


def contents(store: Path) -> dict[str, bytes]:
    """Every file of a store."""
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of a store that was written without interruption."""
    target = tmp_path_factory.mktemp("whole") / "b.zarr"
    convert_zarr(source, target, spec=SPEC, workers=1)
    return contents(target)


def test_killed_at_any_moment_it_goes_on_and_ends_with_the_same_bytes(
    tmp_path: Path, converter: Converter, source: Path, whole: dict[str, bytes]
) -> None:
    chance = random.Random(5)
    target = tmp_path / "b.zarr"
    converter.convert(source, target, 2)
    shutil.rmtree(target)
    begun = time.monotonic()
    converter.convert(source, target, 2)
    duration = time.monotonic() - begun
    assert contents(target) == whole
    shutil.rmtree(target)
    kills = reused_at_all = 0
    for _ in range(4 * KILLS):
        if kills == KILLS:
            break
        # Each in a part of the time of its own, so that some come late enough to keep shards.
        moment = (kills + chance.random()) / KILLS * duration
        killed, _ = converter.convert(source, target, chance.choice((1, 3)), moment)
        kills += killed
        # The machine may have been busier when the time was taken.
        duration *= 1 if killed else 0.8
        # Killed between the last rename and its end, it has tidying up to do.
        if not target.exists() or target.with_name("b.zarr.converting").exists():
            _, reused = converter.convert(source, target, 2)
            reused_at_all += reused
        assert contents(target) == whole
        assert not target.with_name("b.zarr.converting").exists()
        shutil.rmtree(target)
    converter.convert(source, target, 2)
    assert kills == KILLS
    assert reused_at_all
    assert not target.with_name("b.zarr.converting").exists()


def test_killed_again_and_again_it_still_ends(
    tmp_path: Path, converter: Converter, source: Path, whole: dict[str, bytes]
) -> None:
    target = tmp_path / "b.zarr"
    for round_ in range(KILLS):
        if target.exists():
            break
        converter.convert(source, target, 2, kill_after=0.1 * round_)
    converter.convert(source, target, 2) if not target.exists() else None
    assert contents(target) == whole


class StopError(Exception):
    """Raised by a progress callback."""


def stop_after(n: int) -> Any:
    """Return a progress function that ends the conversion after n shards."""

    def report(state: Progress) -> None:
        if state.done_shards >= n:
            raise StopError

    return report


def test_finished_shards_are_not_written_again(
    tmp_path: Path, source: Path, whole: dict[str, bytes]
) -> None:
    target = tmp_path / "b.zarr"
    with pytest.raises(StopError):
        convert_zarr(source, target, spec=SPEC, workers=1, progress=stop_after(30))
    assert not target.exists()
    result = convert_zarr(source, target, spec=SPEC, workers=3)
    assert 30 <= result.shards_reused < result.shards
    assert contents(target) == whole


def test_an_unfinished_store_that_somebody_deleted_is_made_again(
    tmp_path: Path, source: Path, whole: dict[str, bytes]
) -> None:
    target = tmp_path / "b.zarr"
    for n in (5, 30):
        with pytest.raises(StopError):
            convert_zarr(source, target, spec=SPEC, workers=1, progress=stop_after(n))
        shutil.rmtree(tmp_path / "b.zarr.converting" / "store")
    assert convert_zarr(source, target, spec=SPEC).shards_reused == 0
    assert contents(target) == whole


@pytest.mark.parametrize(
    ("damaged", "change"),
    [
        ("uns/*/zarr.json", "delete"),
        ("obs/**/c/0", "empty"),
        ("obs/_index/**/zarr.json", "empty"),
        ("obs/_index/**/c/0", "delete"),
        ("zarr.json", "empty"),
        ("zarr.json", "attributes"),
    ],
)
def test_damage_to_small_elements_of_an_unfinished_store_is_made_good(
    tmp_path: Path, damaged: str, change: str
) -> None:
    adata = atlas()
    adata.uns["note"] = {"of": 3.5}
    adata.obs["text"] = [f"cell {n}" for n in range(adata.n_obs)]
    write(adata, tmp_path / "a.zarr", "zarr v3", 0)
    convert_zarr(tmp_path / "a.zarr", tmp_path / "whole.zarr", spec=SPEC)
    with pytest.raises(StopError):
        convert_zarr(
            tmp_path / "a.zarr", tmp_path / "b.zarr", spec=SPEC, progress=stop_after(30)
        )
    store = tmp_path / "b.zarr.converting" / "store"
    (path, *_) = sorted(store.glob(damaged))
    if change == "delete":
        path.unlink()
    else:
        path.write_text("" if change == "empty" else path.read_text().replace("anndata", "x"))
    convert_zarr(tmp_path / "a.zarr", tmp_path / "b.zarr", spec=SPEC)
    assert contents(tmp_path / "b.zarr") == contents(tmp_path / "whole.zarr")


def test_a_damaged_shard_of_an_unfinished_store_is_written_again(
    tmp_path: Path, source: Path, whole: dict[str, bytes]
) -> None:
    target = tmp_path / "b.zarr"
    with pytest.raises(StopError):
        convert_zarr(source, target, spec=SPEC, workers=1, progress=stop_after(30))
    shards = list((tmp_path / "b.zarr.converting/store/X").rglob("c/*"))
    for shard, damage in zip(shards, (b"", None), strict=False):
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(damage if damage is not None else bytes(data))
    convert_zarr(source, target, spec=SPEC)
    assert contents(target) == whole


@pytest.mark.parametrize("what", ["options", "source", "plan"])
def test_what_has_changed_starts_anew_and_says_so(tmp_path: Path, what: str) -> None:
    write(atlas(), tmp_path / "a.h5ad", "h5ad", 1)
    target = tmp_path / "b.zarr"
    with pytest.raises(StopError):
        convert_zarr(tmp_path / "a.h5ad", target, progress=stop_after(4), workers=1)
    spec, expected = ConvertSpec(), "the source's content"
    if what == "options":
        spec, expected = ConvertSpec(level=5), "options"
    elif what == "source":
        write(atlas(seed=1), tmp_path / "a.h5ad", "h5ad", 1)
    else:
        (tmp_path / "b.zarr.converting/plan.json").write_text("{")
        expected = "damaged"
    result = convert_zarr(tmp_path / "a.h5ad", target, spec=spec)
    assert result.shards_reused == 0
    assert any("started anew" in note and expected in note for note in result.notes)
    assert_same(read(tmp_path / "a.h5ad"), read(target))


def test_the_bytes_do_not_depend_on_the_workers(
    tmp_path: Path, source: Path, whole: dict[str, bytes]
) -> None:
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0"
        ) as cluster,
        Client(cluster),
    ):
        convert_zarr(source, tmp_path / "b.zarr", spec=SPEC)
    assert contents(tmp_path / "b.zarr") == whole


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root and the right to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_too_small_is_noticed_before_writing(
    tmp_path: Path, small_disk: Path
) -> None:
    write(atlas(4_000, 600), tmp_path / "a.h5ad", "h5ad", 0)
    with pytest.raises(OutputError, match=r"needs about [\d.]+ MiB, and \d\.\d MiB are free"):
        convert_zarr(tmp_path / "a.h5ad", small_disk / "b.zarr")
    assert not (small_disk / "b.zarr").exists()


def test_a_disk_that_fills_up_is_an_error_and_nothing_is_lost(
    tmp_path: Path, small_disk: Path, source: Path, whole: dict[str, bytes]
) -> None:
    target, ballast = small_disk / "b.zarr", small_disk / "ballast"

    def fill(state: Progress) -> None:
        if state.done_shards == 20 and not ballast.exists():
            with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass

    with pytest.raises(
        OutputError, match=r"the disk is full; free some space, and run the same"
    ):
        convert_zarr(source, target, spec=SPEC, workers=1, progress=fill)
    ballast.unlink()
    result = convert_zarr(source, target, spec=SPEC)
    assert result.shards_reused >= 19
    assert contents(target) == whole


def test_two_converters_on_one_destination_do_not_meet(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "b.zarr"
    inside, leave = threading.Event(), threading.Event()

    def wait(state: Progress) -> None:
        inside.set()
        leave.wait(60)

    first = threading.Thread(
        target=convert_zarr, args=(source, target), kwargs={"progress": wait}
    )
    first.start()
    inside.wait(60)
    try:
        with pytest.raises(OutputError, match=rf"another converter \(process {os.getpid()} on"):
            convert_zarr(source, target)
    finally:
        leave.set()
        first.join()
    assert_same(read(source), read(target))


@pytest.mark.parametrize("what", ["rewritten", "removed"])
def test_a_file_that_is_replaced_meanwhile_is_told_from_a_damaged_one(
    tmp_path: Path, what: str
) -> None:
    path, other, target = tmp_path / "a.h5ad", tmp_path / "b.h5ad", tmp_path / "b.zarr"
    write(atlas(600, 300), path, "h5ad", 1)
    write(atlas(600, 300, seed=2), other, "h5ad", 1)

    def change(state: Progress) -> None:
        if state.done_shards == 3 and what == "removed":
            path.unlink(missing_ok=True)
        elif state.done_shards == 3:
            # In place, as h5py does: whoever has it open reads parts of both.
            path.write_bytes(other.read_bytes())

    with pytest.raises(StoreError, match="changed, or was removed, while it was converted"):
        convert_zarr(path, target, spec=SPEC, progress=change)
    assert not target.exists()


def test_a_source_that_changes_meanwhile_gives_no_store(tmp_path: Path) -> None:
    path, target = tmp_path / "a.zarr", tmp_path / "b.zarr"
    write(atlas(), path, "zarr v3", 0)

    def change(state: Progress) -> None:
        if state.done_shards == 3:
            array = zarr.open_array(path / "X/data", mode="r+")
            array[:] = np.asarray(array[:]) + 1

    with pytest.raises(StoreError, match="changed, or was removed, while it was converted"):
        convert_zarr(path, target, progress=change, verify=False)
    assert not target.exists()
    convert_zarr(path, target)
    assert_same(read(path), read(target))


def test_a_truncated_h5ad_is_named_damaged(tmp_path: Path, source: Path) -> None:
    data = source.read_bytes()
    (tmp_path / "a.h5ad").write_bytes(data[: len(data) // 2])
    with pytest.raises(StoreError, match=r"cannot be opened as HDF5.*truncated"):
        convert_zarr(tmp_path / "a.h5ad", tmp_path / "b.zarr")


@pytest.mark.parametrize("form", ["h5ad", "zarr v2", "zarr v3"])
def test_a_damaged_chunk_of_the_source_is_named(tmp_path: Path, form: str) -> None:
    path = tmp_path / ("a.h5ad" if form == "h5ad" else "a.zarr")
    write(atlas(), path, form, 1)
    if form == "h5ad":
        with h5py.File(path) as file:
            place = file["X/data"].id.get_chunk_info(0)
        with path.open("r+b") as raw:
            raw.seek(place.byte_offset + place.size // 2)
            raw.write(b"damaged!")
    else:
        chunk = path / ("X/data/0" if form == "zarr v2" else "X/data/c/0")
        chunk.write_bytes(chunk.read_bytes()[:-9])
    with pytest.raises(
        CorruptChunkError, match=r"the source is damaged.*array X/data"
    ) as caught:
        convert_zarr(path, tmp_path / "b.zarr")
    assert caught.value.shard or form == "zarr v3"
    assert not (tmp_path / "b.zarr").exists()


@pytest.mark.parametrize("form", ["zarr v2", "zarr v3", "converted"])
@pytest.mark.parametrize(
    ("array", "found"),
    [
        ("X/data", "values would read as zeros"),
        ("X/indices", "the file is missing"),
        ("raw/X/data", "values would read as zeros"),
        ("obs/_index", "names would read as empty"),
    ],
)
def test_a_file_that_the_source_has_lost_is_named(
    tmp_path: Path, form: str, array: str, found: str
) -> None:
    path, target = tmp_path / "a.zarr", tmp_path / "b.zarr"
    write(atlas(), path, form.replace("converted", "zarr v3"), 1)
    if form == "converted":
        path, found = tmp_path / "c.zarr", "the converter wrote this file"
        convert_zarr(tmp_path / "a.zarr", path)
    folder = path / array
    if not any((folder / name).exists() for name in ("0", "c")):
        folder /= "values"
    chunk = next(p for p in sorted(folder.rglob("*")) if p.is_file() and p.name.isdigit())
    chunk.unlink()
    with pytest.raises(CorruptChunkError, match=found) as caught:
        convert_zarr(path, target)
    assert path / caught.value.array / caught.value.shard == chunk
    assert not target.exists()


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_an_array_that_was_removed_from_a_converted_store_is_not_missed(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    write(atlas(), tmp_path / "source.zarr", "zarr v3", 1)
    convert_zarr(tmp_path / "source.zarr", path)
    shutil.rmtree(path / "raw")
    zarr.consolidate_metadata(path)
    convert_zarr(path, tmp_path / "b.zarr")
    assert_same(read(path), read(tmp_path / "b.zarr"))


def test_a_write_that_went_wrong_is_found_by_reading_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scgpu_tasks.io.convert import encode

    write(atlas(), tmp_path / "a.zarr", "zarr v3", 0)
    right = encode.compress_chunks

    def wrong(
        values: np.ndarray, nbytes: int, level: int, *, numbers: bool
    ) -> tuple[bytes, list[int]]:
        damaged = values.copy()
        if len(damaged) > 40_000:
            damaged[12] ^= 255
        return right(damaged, nbytes, level, numbers=numbers)

    monkeypatch.setattr(encode, "compress_chunks", wrong)
    with pytest.raises(CorruptChunkError, match=r"position 3 holds .* instead of the source's"):
        convert_zarr(tmp_path / "a.zarr", tmp_path / "b.zarr")
    monkeypatch.undo()
    convert_zarr(tmp_path / "a.zarr", tmp_path / "b.zarr")
    assert_same(read(tmp_path / "a.zarr"), read(tmp_path / "b.zarr"))


def test_an_existing_store_is_refused_and_replaced_only_at_the_end(tmp_path: Path) -> None:
    write(atlas(), tmp_path / "a.zarr", "zarr v3", 0)
    write(atlas(seed=1), tmp_path / "new.zarr", "zarr v3", 0)
    target = tmp_path / "b.zarr"
    convert_zarr(tmp_path / "a.zarr", target)
    before = contents(target)
    with pytest.raises(OutputError, match=r"exists; choose another name, or allow overwriting"):
        convert_zarr(tmp_path / "new.zarr", target)
    with pytest.raises(StopError):
        convert_zarr(tmp_path / "new.zarr", target, overwrite=True, progress=stop_after(4))
    assert contents(target) == before
    convert_zarr(tmp_path / "new.zarr", target, overwrite=True)
    assert_same(read(tmp_path / "new.zarr"), read(target))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zarr", "b.zarr", "new.zarr"]


def test_places_that_would_do_harm_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    write(atlas(), path, "zarr v3", 0)
    before = contents(path)
    link = tmp_path / "link"
    link.symlink_to(path)
    for target in (path, path / "inside.zarr", tmp_path / "x/../a.zarr", link / "in.zarr"):
        with pytest.raises(ParameterError, match=r"source"):
            convert_zarr(path, target, overwrite=True)
    with pytest.raises(ParameterError, match="lies inside the destination"):
        convert_zarr(path, tmp_path, overwrite=True)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/thesis.txt").touch()
    with pytest.raises(
        OutputError, match="is no zarr store; it is not going to be overwritten"
    ):
        convert_zarr(path, tmp_path / "precious", overwrite=True)
    assert contents(path) == before


def test_a_folder_without_the_right_to_write_is_a_named_error(tmp_path: Path) -> None:
    write(atlas(), tmp_path / "a.zarr", "zarr v3", 0)
    # Root may write anywhere but where there is no file system for it.
    folder = Path("/proc/sys") if os.geteuid() == 0 else tmp_path / "closed"
    if os.geteuid() != 0:
        folder.mkdir(mode=0o500)
    with pytest.raises(OutputError, match="cannot write beside"):
        convert_zarr(tmp_path / "a.zarr", folder / "b.zarr")


@pytest.mark.parametrize(
    ("name", "content", "error", "match"),
    [
        ("none.h5ad", None, StoreError, "does not exist"),
        ("text.h5ad", b"not HDF5 at all", FormatError, "neither an h5ad file"),
        ("empty.zarr", {}, FormatError, "is not a zarr group"),
    ],
)
def test_what_is_no_source_is_refused(
    tmp_path: Path, name: str, content: Any, error: type[Exception], match: str
) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
    with pytest.raises(error, match=match):
        convert_zarr(path, tmp_path / "b.zarr")
    assert not (tmp_path / "b.zarr.converting").exists()


def test_a_zarr_group_that_is_no_anndata_is_refused(tmp_path: Path) -> None:
    zarr.open_group(tmp_path / "a.zarr", mode="w").create_group("images")
    with pytest.raises(
        FormatError, match=r"no AnnData: it has no obs and var \(found images\)"
    ):
        convert_zarr(tmp_path / "a.zarr", tmp_path / "b.zarr")


def test_the_manifest_has_a_checksum_of_every_shard(tmp_path: Path) -> None:
    import google_crc32c

    write(atlas(), tmp_path / "a.zarr", "zarr v3", 0)
    target = tmp_path / "b.zarr"
    convert_zarr(tmp_path / "a.zarr", target)
    manifest = read_manifest(target)
    assert manifest is not None
    assert manifest["verified"] is True
    numbers = {
        str(path.relative_to(target))
        for name in ("X", "raw/X", "layers", "obsm")
        for path in (target / name).rglob("c/*")
        if path.is_file()
    }
    assert numbers <= manifest["shards"].keys()
    for key, shard in manifest["shards"].items():
        data = (target / key).read_bytes()
        assert shard == {"size": len(data), "crc32c": f"{google_crc32c.value(data):08x}"}
    assert json.loads(manifest_path(target).read_text()) == manifest


def test_without_verification_the_manifest_says_so(tmp_path: Path) -> None:
    write(atlas(), tmp_path / "a.zarr", "zarr v3", 0)
    result = convert_zarr(tmp_path / "a.zarr", tmp_path / "b.zarr", verify=False)
    assert not result.verified
    assert read_manifest(tmp_path / "b.zarr")["verified"] is False


def test_a_store_is_current_until_source_or_options_change(tmp_path: Path) -> None:
    path, target = tmp_path / "a.zarr", tmp_path / "b.zarr"
    write(atlas(), path, "zarr v3", 0)
    assert not is_current(path, target)
    convert_zarr(path, target)
    assert is_current(path, target)
    assert not is_current(path, target, ConvertSpec(level=4))
    zarr.open_array(path / "X/data", mode="r+")[0] = 5
    assert not is_current(path, target)


def test_a_giant_chunk_is_decoded_once_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scgpu_tasks.io.convert import readers

    monkeypatch.setattr(readers, "BAND_BYTES", 1024)
    adata = atlas(200, 60)
    adata.layers["dense"] = adata.X.toarray()
    for form, choice in (
        ("h5ad", 1),
        ("h5ad", 2),
        ("h5ad", 3),
        ("zarr v2", 0),
        ("zarr v2", 1),
        ("zarr v2", 2),
        ("zarr v2", 3),
    ):
        path = tmp_path / ("a.h5ad" if form == "h5ad" else "a.zarr")
        write(adata, path, form, choice)
        result = convert_zarr(path, tmp_path / "b.zarr", spec=SPEC, overwrite=True)
        assert any("decoded once" in note for note in result.notes), (form, choice)
        found = read(tmp_path / "b.zarr")
        assert_same(read(path).layers["dense"], found.layers["dense"])
        assert (abs(found.X - adata.X)).nnz == 0
        for old in (path, tmp_path / "b.zarr"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()


def test_progress_tells_bytes_shards_rate_and_time(tmp_path: Path) -> None:
    write(atlas(), tmp_path / "a.zarr", "zarr v3", 0)
    states: list[Progress] = []
    result = convert_zarr(
        tmp_path / "a.zarr", tmp_path / "b.zarr", progress=states.append, workers=1
    )
    assert states[0].done_shards == 0
    assert states[0].seconds_left is None
    assert [state.done_shards for state in states] == list(range(result.shards + 1))
    last = states[-1]
    assert last.done_bytes == last.total_bytes == result.decoded_bytes
    assert last.rate > 0
    assert last.seconds_left == 0


def test_memory_does_not_grow_with_the_source(tmp_path: Path, converter: Converter) -> None:
    peaks = []
    for rows in (10_000, 160_000):
        with h5py.File(tmp_path / "a.h5ad", "w") as file:
            ad.io.write_elem(file, "/", ad.AnnData(shape=(rows, 200)))
            data = file.create_dataset("X", (rows, 200), "f4", chunks=(1_000, 200))
            data.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
            block = np.arange(10_000 * 200, dtype="f4").reshape(10_000, 200)
            for at in range(0, rows, 10_000):
                data[at : at + 10_000] = block + at
        shutil.rmtree(tmp_path / "b.zarr", ignore_errors=True)
        converter.convert(tmp_path / "a.h5ad", tmp_path / "b.zarr", 2, size="large")
        peaks.append(converter.peak)
    # The larger source holds 120 MB more; strings of cell names are the rest.
    assert peaks[0] > 100e6
    assert peaks[1] - peaks[0] < 70e6
