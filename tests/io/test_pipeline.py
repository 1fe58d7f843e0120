"""The codec pipeline as zarr uses it, with NumPy in the place of device memory."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from dask.base import tokenize
from numcodecs.zstd import Zstd
from zarr.codecs import BloscCodec, ZstdCodec
from zarr.core.buffer import cpu
from zarr.core.codec_pipeline import BatchedCodecPipeline, FusedCodecPipeline
from zarr.registry import get_pipeline_class
from zarrs import ZarrsCodecPipeline

from scgpu_tasks.errors import CorruptChunkError, FormatError, StoreError
from scgpu_tasks.io.counters import read_statistics, reset_statistics
from scgpu_tasks.io.pipeline import FALLBACK_KEY, PATH, STRICT_KEY, KvikioCodecPipeline
from scgpu_tasks.io.request import Request, decode_chunk
from tests.io.damage import damage
from tests.io.host_executor import HostPipeline, on_event_loop
from tests.io.read_cases import CHAINS, open_with, read, same_bytes, seeded

P = cpu.buffer_prototype
ALL = (slice(None),)


@pytest.fixture(autouse=True)
def _fresh_counts() -> None:
    reset_statistics()


def counts() -> dict[str, Any]:
    (found,) = read_statistics().values()
    return found


def write(path: Path, values: np.ndarray, **options: Any) -> Path:
    zarr.create_array(path, data=values, overwrite=True, **options)
    return path


def test_zarr_finds_the_pipeline_by_its_entry_point() -> None:
    (entry,) = entry_points(group="zarr.codec_pipeline", name="kvikio")
    assert entry.load() is KvikioCodecPipeline
    with zarr.config.set({"codec_pipeline.path": PATH}):
        assert get_pipeline_class() is KvikioCodecPipeline


def test_importing_it_loads_no_gpu_library() -> None:
    code = (
        "import sys, scgpu_tasks.io.pipeline, scgpu_tasks.io.switch;"
        "print([m for m in sys.modules if m.split('.')[0] in"
        " ('cupy', 'cupyx', 'kvikio', 'rmm', 'nvidia', 'dask_cuda')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_reading_and_writing_on_the_host_is_the_fallbacks_work(tmp_path: Path) -> None:
    values = np.arange(600).reshape(30, 20)
    with zarr.config.set(
        {"codec_pipeline.path": PATH, FALLBACK_KEY: "zarrs.ZarrsCodecPipeline"}
    ):
        array = zarr.create_array(
            tmp_path / "a", shape=(30, 20), chunks=(5, 4), shards=(10, 20), dtype="i8"
        )
        array[...] = values
        array[3:7, 2] = -1
        pipeline = array.async_array.codec_pipeline
    values[3:7, 2] = -1
    assert isinstance(pipeline, KvikioCodecPipeline)
    assert isinstance(pipeline.fallback, ZarrsCodecPipeline)
    assert same_bytes(array[...], values)
    assert same_bytes(array[::3, 5], values[::3, 5])
    assert read_statistics() == {}


@pytest.mark.parametrize("store", ["memory", "v2"])
def test_arrays_that_zarrs_pipelines_serve_work_as_before(store: str, tmp_path: Path) -> None:
    target: Any = zarr.storage.MemoryStore() if store == "memory" else tmp_path / "a"
    options = {"zarr_format": 2} if store == "v2" else {}
    with zarr.config.set({"codec_pipeline.path": PATH}):
        array = zarr.create_array(target, shape=(50,), chunks=(7,), dtype="<U5", **options)
        array[:] = np.array([f"s{i}" for i in range(50)])
        assert isinstance(array.async_array.codec_pipeline, KvikioCodecPipeline)
        assert isinstance(array.async_array.codec_pipeline.fallback, FusedCodecPipeline)
        assert array[3:6].tolist() == ["s3", "s4", "s5"]


def test_zarrs_slow_default_is_replaced_as_fallback_and_others_are_kept() -> None:
    made = KvikioCodecPipeline.from_codecs
    array = zarr.create_array({}, shape=(4,), dtype="i4")
    codecs = array.metadata.codecs
    assert isinstance(made(codecs), FusedCodecPipeline)
    batched = "zarr.core.codec_pipeline.BatchedCodecPipeline"
    for path, kind in (
        (batched, FusedCodecPipeline),
        (PATH, FusedCodecPipeline),
        ("zarrs.ZarrsCodecPipeline", BatchedCodecPipeline),  # what zarrs itself returns here
    ):
        with zarr.config.set({FALLBACK_KEY: path}):
            assert isinstance(made(codecs), kind)
    with (
        zarr.config.set({FALLBACK_KEY: "pathlib.Path"}),
        pytest.raises(FormatError, match=r"pathlib\.Path is no codec pipeline"),
    ):
        made(codecs)


def test_pickles_are_small_and_tokens_stable(tmp_path: Path) -> None:
    values = np.arange(10_000, dtype="u2")
    path = write(tmp_path / "a", values, chunks=(100,), shards=(5_000,))
    array = open_with(path, "C", HostPipeline)
    token = tokenize(array.async_array.codec_pipeline)
    read(array, "basic", ALL, P)
    assert tokenize(array.async_array.codec_pipeline) == token
    raw = pickle.dumps(array)
    assert len(raw) < 10_000
    again = pickle.loads(raw)
    assert again.async_array.codec_pipeline == array.async_array.codec_pipeline
    assert same_bytes(read(again, "basic", ALL, P), values)


def test_what_cannot_be_decoded_falls_back_and_is_counted(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 9, (40, 30)).astype("i4")
    path = write(tmp_path / "a", values, chunks=(10, 10), compressors=BloscCodec())
    array = open_with(path, "F", HostPipeline)
    assert same_bytes(read(array, "basic", (slice(3, 30), 4), P), values[3:30, 4])
    assert counts()["host_requests"] == {"codec blosc": 1}
    assert counts()["host_bytes"] == 27 * 4
    with zarr.config.set({STRICT_KEY: True}):
        strict = open_with(path, "C", HostPipeline)
    with pytest.raises(FormatError, match=r"cannot decode .*a: codec blosc; convert the store"):
        read(strict, "basic", (slice(3, 30), 4), P)


def test_an_output_of_another_dtype_is_cast(tmp_path: Path) -> None:
    array = open_with(write(tmp_path / "a", np.arange(9, dtype="i4")), "C", HostPipeline)
    out = np.zeros(9)
    read(array, "basic", ALL, P, cpu.NDBuffer(out))
    assert out.tolist() == list(range(9))
    assert list(counts()["host_requests"]) == ["output of dtype float64 for an array of int32"]


def test_missing_files_are_reported_as_missing(tmp_path: Path) -> None:
    values = np.arange(40, dtype="f4")
    path = write(tmp_path / "a", values, chunks=(10,), fill_value=9)
    (path / "c/1").unlink()
    (path / "c/2").unlink()
    (path / "c/2").mkdir()  # no chunk either, for zarr
    array = open_with(path, "C", HostPipeline)
    want = values.copy()
    want[10:30] = 9
    assert same_bytes(read(array, "basic", ALL, P), want)
    assert (counts()["gpu_chunks"], counts()["absent_chunks"]) == (2, 2)
    strict = zarr.open_array(path, config={"read_missing_chunks": False})
    pipeline = array.async_array.codec_pipeline
    object.__setattr__(strict.async_array, "codec_pipeline", pipeline)
    with pytest.raises(zarr.errors.ChunkNotFoundError, match="c/1"):
        strict[:]
    assert same_bytes(strict[:10], values[:10])


def test_random_damage_ends_in_right_values_the_hosts_values_or_a_named_error(
    tmp_path: Path,
) -> None:
    found = set()
    for seed in range(250):
        draw = seeded(seed)
        name = list(CHAINS)[draw(0, len(CHAINS) - 1)]
        values = np.random.default_rng(seed).poisson(1.5, 2_000).astype("f4")
        path = tmp_path / "a"
        write(path, values, chunks=(100,), shards=(800,), compressors=CHAINS[name])
        damage(draw, sorted((path / "c").iterdir()), 8)
        try:
            got = read(open_with(path, "C", HostPipeline), "basic", ALL, P)
        except CorruptChunkError as error:
            found.add(f"error in {error.shard[:2]}")
            continue
        if not same_bytes(got, values):
            assert same_bytes(got, zarr.open_array(path)[:])
            found.add("as the host")
    assert found == {"error in c/", "as the host"}


def test_damage_names_array_shard_and_chunk(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "g", mode="w")
    values = np.random.default_rng(0).random((40, 40))
    group.create_array("X/dense", data=values, chunks=(5, 10), shards=(20, 20))
    shard = tmp_path / "g/X/dense/c/1/0"
    raw = bytearray(shard.read_bytes())
    index = np.frombuffer(bytes(raw[-132:-4]), "<u8").reshape(8, 2)
    raw[int(index[5, 0])] ^= 0xFF
    shard.write_bytes(raw)
    array = zarr.open_group(tmp_path / "g")["X/dense"]
    inner = array.async_array
    made = HostPipeline.from_array_metadata_and_store(inner.metadata, inner.store_path.store)
    object.__setattr__(inner, "codec_pipeline", made)
    with pytest.raises(CorruptChunkError) as caught:
        array[...]
    error = caught.value
    assert (error.array, error.shard, error.chunk) == ("X/dense", "c/1/0", (6, 1))
    assert error.store == str(tmp_path / "g")
    assert same_bytes(array[:20], values[:20])


def test_a_file_replaced_between_index_and_chunks_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "a", np.arange(1_000), chunks=(10,), shards=(100,))
    array = open_with(path, "C", HostPipeline)
    pipeline = array.async_array.codec_pipeline
    store_path = array.async_array.store_path
    spec = None
    batch = [(store_path / "c/0", spec, (slice(0, 100),), (slice(0, 100),), True)]
    request = Request(
        pipeline._layout,
        batch,
        2,
        (100,),
        (8,),
        (),
        lambda path: Path(path).open("rb"),  # noqa: SIM115  the request closes it
    )
    request.close()
    raw = (path / "c/0").read_bytes()
    (path / "c/0").unlink()
    (path / "c/0").write_bytes(raw + b"x")
    with request, pytest.raises(StoreError, match="changed while it was read"):
        request.handle(0)


def test_frames_of_other_writers_decode_on_the_host() -> None:
    array = zarr.create_array({}, shape=(500,), chunks=(500,), dtype="u1")
    layout = HostPipeline(array.metadata, array.store)._layout
    assert not hasattr(layout, "reason")
    raw = bytes(range(250)) * 2
    halves = bytes(Zstd().encode(raw[:250])) + bytes(Zstd().encode(raw[250:]))
    skipped = b"\x50\x2a\x4d\x18\x04\0\0\0skip" + bytes(Zstd().encode(raw))
    for frame in (bytes(Zstd().encode(raw)), halves, skipped):
        assert decode_chunk(frame, layout).tobytes() == raw  # type: ignore[arg-type]
    huge = b"\x28\xb5\x2f\xfd\xe0" + (2**60).to_bytes(8, "little") + bytes(20)
    with pytest.raises(ValueError, match="a frame of 1152921504606846976 bytes"):
        decode_chunk(huge, layout)  # type: ignore[arg-type]


def test_many_threads_may_read_at_once(tmp_path: Path) -> None:
    values = np.random.default_rng(1).integers(0, 9, 20_000).astype("u1")
    options = {"chunks": (500,), "shards": (4_000,), "compressors": ZstdCodec()}
    array = open_with(write(tmp_path / "a", values, **options), "C", HostPipeline)
    starts = list(range(0, 16_000, 333))

    def one(start: int) -> bool:
        got = read(array, "basic", (slice(start, start + 4_000),), P)
        return same_bytes(got, values[start : start + 4_000])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, starts))


def test_only_what_takes_no_time_is_read_on_zarrs_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    class Watched(HostPipeline):
        def _execute(self, *args: Any) -> Any:
            seen.append(on_event_loop())
            return super()._execute(*args)

    values = np.arange(4000, dtype="f4")
    write(tmp_path / "a", values, chunks=(100,), shards=(1000,))
    write(tmp_path / "raw", values, chunks=(100,), shards=(1000,), compressors=None)
    array, raw = (open_with(tmp_path / name, "C", Watched) for name in ("a", "raw"))
    steps = [
        slice(250, 350),
        slice(200, 300),
        slice(200, 401),
        slice(900, 1100),
        slice(5, 999, 400),
    ]
    for part in steps:
        assert same_bytes(read(array, "basic", (part,), P), values[part])
    # One chunk or two of one file; three chunks, two files, and three far apart are too much.
    assert seen == [True, True, False, False, False]
    seen.clear()
    read(raw, "basic", (slice(0, 50),), P)
    monkeypatch.setattr(Watched, "_can_begin", lambda *_: False)
    read(array, "basic", (slice(0, 50),), P)
    assert seen == [False, False]


def test_small_requests_of_many_threads_wait_for_the_disk_together(tmp_path: Path) -> None:
    lock, running, most = threading.Lock(), [0], [0]

    class Slow(HostPipeline):
        def _execute(self, *args: Any) -> Any:
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            time.sleep(0.3)
            with lock:
                running[0] -= 1
            return super()._execute(*args)

    values = np.arange(4000, dtype="f4")
    write(tmp_path / "a", values, chunks=(100,), shards=(1000,))
    array = open_with(tmp_path / "a", "C", Slow)
    # Whoever is first keeps the event loop; the others find each other waiting for it.
    with ThreadPoolExecutor(4) as pool:
        starts = range(0, 400, 100)
        found = list(pool.map(lambda a: read(array, "basic", (slice(a, a + 50),), P), starts))
    for start, part in zip(starts, found, strict=True):
        assert same_bytes(part, values[start : start + 50])
    assert most[0] >= 3


def test_statistics_are_plain_values(tmp_path: Path) -> None:
    path = write(tmp_path / "a", np.arange(100), compressors=BloscCodec())
    read(open_with(path, "C", HostPipeline), "basic", ALL, P)
    assert json.loads(json.dumps(read_statistics())) == read_statistics()
