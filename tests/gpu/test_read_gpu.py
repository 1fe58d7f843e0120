"""Reads into GPU memory, byte for byte against what was written."""

from __future__ import annotations

import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numcodecs.zstd import Zstd
from zarr.codecs import BloscCodec, BytesCodec, ZstdCodec
from zarr.core.buffer import gpu

from scgpu_tasks.errors import FormatError
from scgpu_tasks.io import gpu_packages, scratch
from scgpu_tasks.io.counters import read_statistics, reset_statistics
from tests.gpu.read_helpers import PROTOTYPE, gpu_missing, open_gpu, reads_as, to_host
from tests.io.read_cases import (
    CHAINS,
    DTYPES,
    draw_case,
    draw_selection,
    expect,
    read,
    same_bytes,
    seeded,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(gpu_missing()), reason=gpu_missing()),
    pytest.mark.usefixtures("all_on_the_gpu"),
]


def counts() -> dict[str, Any]:
    (found,) = read_statistics().values()
    return found


def write(path: Path, values: np.ndarray, **options: Any) -> Path:
    zarr.create_array(path, data=values, overwrite=True, **options)
    return path


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_array_of_every_dtype_and_codec_is_decoded_by_the_gpu(
    tmp_path: Path, dtype: str, chain: str
) -> None:
    values = np.random.default_rng(0).integers(0, 99, (301, 47)).astype(dtype)
    for shards in (None, (100, 40)):
        path = write(
            tmp_path / f"a{shards is None}",
            values,
            chunks=(50, 20),
            shards=shards,
            compressors=CHAINS[chain],
        )
        array = open_gpu(path, strict=True)
        assert reads_as(array, "basic", (slice(None), slice(None)), values)
        assert reads_as(array, "basic", (slice(7, 290, 3), 5), values[7:290:3, 5])
    for found in read_statistics().values():
        assert found["gpu_chunks"] > 0
        assert not found["refused_chunks"]
        assert not found["host_requests"]


@pytest.mark.parametrize(
    ("small_request", "threads", "seeds"),
    # One thread alone reads a chunk or two on zarr's event loop.
    [(0, 4, range(100)), (16, 4, range(100, 180)), (16, 1, range(180, 200))],
)
def test_ten_thousand_random_selections_of_random_arrays(
    tmp_path: Path, small_request: int, threads: int, seeds: range
) -> None:
    gpu_packages.configure(replace(gpu_packages.settings(), small_request=small_request))

    def some(seed: int) -> int:
        draw = seeded(seed)
        case = draw_case(draw, tmp_path / f"a{seed}")
        array = open_gpu(case.path, case.order, strict=True)
        for i in range(50):
            kind, selection = draw_selection(draw, case.values.shape)
            want = expect(case.values, kind, selection)
            assert reads_as(array, kind, selection, want), (seed, i, kind, selection)
        return 50

    # Most of the time goes by waiting for the decoder.
    with ThreadPoolExecutor(threads) as pool:
        assert sum(pool.map(some, seeds)) == 50 * len(seeds)
    found = read_statistics().values()
    assert not any(f["host_requests"] for f in found)
    assert any(f["small_chunks"] for f in found) == bool(small_request)


def test_a_few_chunks_are_decoded_on_the_host_and_many_by_the_gpu(tmp_path: Path) -> None:
    values = np.random.default_rng(0).poisson(1.0, 60_000).astype("f4")
    array = open_gpu(write(tmp_path / "a", values, chunks=(1_000,)), strict=True)
    gpu_packages.configure(replace(gpu_packages.settings(), small_request=16))
    for start, stop in ((5, 6), (999, 15_001), (7, 44_000), (0, 60_000)):
        reset_statistics()
        assert reads_as(array, "basic", (slice(start, stop),), values[start:stop])
        n = (stop - 1) // 1_000 - start // 1_000 + 1
        found = counts()
        assert found["small_chunks"] == (n if n <= 16 else 0)
        assert found["gpu_chunks"] == (n if n > 16 else 0)


def test_large_chunks_in_many_batches(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    values = rng.poisson(1.0, 5_000_000).astype("f4")
    path = write(tmp_path / "a", values, chunks=(65_536,), shards=(65_536 * 16,))
    gpu_packages.configure(replace(gpu_packages.settings(), batch_chunks=5))
    array = open_gpu(path, strict=True)
    assert reads_as(array, "basic", (slice(None),), values)
    assert reads_as(array, "basic", (slice(1_000_001, 4_321_987),), values[1_000_001:4_321_987])
    assert counts()["gpu_chunks"] >= 77


def test_chunks_in_place_at_odd_addresses(tmp_path: Path) -> None:
    values = np.random.default_rng(2).integers(0, 24_552, 900_000).astype("u2")
    options = {"compressors": ZstdCodec(level=3, checksum=True)}
    path = write(tmp_path / "a", values, chunks=(32_768,), shards=(32_768 * 8,), **options)
    array = open_gpu(path, strict=True)
    for start in (1, 3, 32_767, 65_537):
        assert reads_as(array, "basic", (slice(start, None),), values[start:])


def test_output_of_the_caller_with_any_strides(tmp_path: Path) -> None:
    import cupy

    values = np.random.default_rng(3).random((90, 70))
    array = open_gpu(
        write(tmp_path / "a", values, chunks=(30, 20), shards=(60, 40)), strict=True
    )
    big = cupy.full((180, 210), -1.0)
    for out in (
        big[::2, ::3],
        big[::-1][:90, :70],
        big.T[:90, :70],
        cupy.empty((90, 70), order="F"),
    ):
        read(array, "basic", (slice(None), slice(None)), PROTOTYPE, gpu.NDBuffer(out))
        assert same_bytes(np.ascontiguousarray(to_host(out)), values)
    assert float(big[1::2].min()) == -1.0 or float(big.min()) >= -1.0


def test_output_of_another_dtype_is_cast_on_the_way_through_the_host(tmp_path: Path) -> None:
    import cupy

    values = np.arange(1000, dtype="i4")
    array = open_gpu(write(tmp_path / "a", values, chunks=(100,)))
    out = cupy.empty(1000, dtype="f8")
    read(array, "basic", (slice(None),), PROTOTYPE, gpu.NDBuffer(out))
    assert same_bytes(to_host(out), values.astype("f8"))
    assert list(counts()["host_requests"]) == ["output of dtype float64 for an array of int32"]


def test_many_files_of_one_request(tmp_path: Path) -> None:
    values = np.random.default_rng(4).integers(0, 9, (40, 50)).astype("u1")
    path = write(tmp_path / "a", values, chunks=(1, 2))
    array = open_gpu(path, strict=True)
    assert reads_as(array, "basic", (slice(None), slice(None)), values)
    path = write(tmp_path / "b", values, chunks=(1, 1), shards=(2, 5))
    assert reads_as(open_gpu(path), "basic", (slice(None), slice(None)), values)


def test_missing_files_and_chunks_hold_the_fill_value(tmp_path: Path) -> None:
    values = np.full((40, 40), 7.5, dtype="f4")
    values[:10, :10] = 1
    path = write(tmp_path / "a", values, chunks=(5, 5), shards=(20, 20), fill_value=7.5)
    array = open_gpu(path, strict=True)
    assert reads_as(array, "basic", (slice(None), slice(None)), values)
    found = counts()
    assert found["gpu_chunks"] == 4
    assert found["absent_chunks"] == 60


def two_frames(raw: bytes) -> bytes:
    half = len(raw) // 2
    return bytes(Zstd(1).encode(raw[:half])) + bytes(Zstd(1).encode(raw[half:]))


def without_size(raw: bytes) -> bytes:
    # Two raw blocks in a frame of window 1 MiB that states no content size.
    blocks = b""
    for i, part in enumerate((raw[:500], raw[500:])):
        blocks += (len(part) << 3 | (i == 1)).to_bytes(3, "little") + part
    return b"\x28\xb5\x2f\xfd\x00\x50" + blocks


def skippable(raw: bytes) -> bytes:
    return b"\x50\x2a\x4d\x18\x04\0\0\0skip" + bytes(Zstd(1).encode(raw))


@pytest.mark.parametrize("encode", [two_frames, without_size, skippable])
def test_frames_that_only_the_host_decodes_are_right_and_counted(
    tmp_path: Path, encode: Any
) -> None:
    values = np.arange(1000, dtype="i4")
    path = write(tmp_path / "a", values, chunks=(250,), compressors=ZstdCodec(level=1))
    (path / "c/1").write_bytes(encode(values[250:500].tobytes()))
    assert reads_as(open_gpu(path), "basic", (slice(None),), values)
    assert sum(counts()["refused_chunks"].values()) == 1
    assert counts()["gpu_chunks"] == 3
    with pytest.raises(FormatError, match=r"zstd frame.*chunk \(1,\)"):
        read(open_gpu(path, strict=True), "basic", (slice(None),), PROTOTYPE)


@pytest.mark.parametrize("level", [-5, 0, 1, 3, 9, 19])
@pytest.mark.parametrize("kind", ["counts", "noise", "zeros", "text", "ramp"])
def test_frames_of_every_level_pass_the_checks(tmp_path: Path, kind: str, level: int) -> None:
    rng = np.random.default_rng(5)
    n = 300_000
    values = {
        "counts": rng.poisson(0.7, n),
        "noise": rng.integers(0, 2**31, n),
        "zeros": np.zeros(n),
        "text": np.tile(np.frombuffer(b"the quick brown fox jumps", "u1"), n // 25),
        "ramp": np.sort(rng.integers(0, 30_000, n)),
    }[kind].astype("i4")
    path = write(
        tmp_path / "a",
        values,
        chunks=(100_000,),
        compressors=ZstdCodec(level=level),
        config={"write_empty_chunks": True},
    )
    assert reads_as(open_gpu(path, strict=True), "basic", (slice(None),), values)
    assert counts()["gpu_chunks"] == 3


def test_what_the_gpu_cannot_decode_comes_through_the_host(tmp_path: Path) -> None:
    values = np.random.default_rng(6).integers(0, 99, (60, 50)).astype("i4")
    paths = {
        "codec blosc": write(
            tmp_path / "blosc", values, chunks=(20, 20), compressors=BloscCodec()
        ),
        "zarr format 2": write(tmp_path / "v2", values, chunks=(20, 20), zarr_format=2),
        "big-endian chunks": write(
            tmp_path / "big", values, chunks=(20, 20), serializer=BytesCodec(endian="big")
        ),
    }
    for reason, path in paths.items():
        reset_statistics()
        array = open_gpu(path)
        assert reads_as(array, "basic", (slice(3, 50), slice(None)), values[3:50])
        assert reads_as(array, "basic", (slice(3, 50, 7), 4), values[3:50:7, 4])
        assert counts()["host_requests"] == {reason: 2}
        with pytest.raises(FormatError, match=reason):
            read(open_gpu(path, strict=True), "basic", (slice(None), slice(None)), PROTOTYPE)


def test_other_stores_come_through_the_host(tmp_path: Path) -> None:
    from scgpu_tasks.io.switch import enable

    values = np.arange(600, dtype="f4").reshape(30, 20)
    with zarr.storage.ZipStore(tmp_path / "a.zip", mode="w") as store:
        zarr.create_array(store, data=values, chunks=(10, 10))
    memory = zarr.storage.MemoryStore()
    zarr.create_array(memory, data=values, chunks=(10, 10), shards=(20, 20))
    with enable():
        for store in (zarr.storage.ZipStore(tmp_path / "a.zip", mode="r"), memory):
            array = zarr.open_array(store, mode="r")
            assert reads_as(array, "basic", (slice(None), slice(5, 15)), values[:, 5:15])


def test_writing_a_gpu_array_goes_through_the_host(tmp_path: Path) -> None:
    import cupy

    values = np.random.default_rng(7).random((50, 40))
    path = write(tmp_path / "a", np.zeros((50, 40)), chunks=(20, 20), shards=(40, 40))
    array = zarr.open_array(path, mode="r+")
    inner = array.async_array
    made = type(open_gpu(path).async_array.codec_pipeline).from_array_metadata_and_store(
        inner.metadata, inner.store_path.store
    )
    object.__setattr__(inner, "codec_pipeline", made)
    array.set_basic_selection(slice(None), cupy.asarray(values), prototype=PROTOTYPE)
    assert same_bytes(zarr.open_array(path)[:], values)
    assert reads_as(array, "basic", (slice(None), slice(None)), values)


def test_eight_threads_read_at_once_and_scratch_stays_bounded(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    values = rng.poisson(1.0, 3_000_000).astype("f4")
    path = write(tmp_path / "a", values, chunks=(16_384,), shards=(16_384 * 32,))
    array = open_gpu(path, strict=True)
    spans = [sorted(rng.integers(0, len(values), 2).tolist()) for _ in range(400)]

    def one(span: list[int]) -> bool:
        start, stop = span
        return reads_as(array, "basic", (slice(start, stop),), values[start:stop])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, spans))
    held = scratch.scratch_held()
    assert 0 < held < 8 * 7.5 * 64 * 2**20
    assert scratch.release_memory() == held
    assert scratch.scratch_held() == 0
    assert one([0, len(values)])


def test_pickled_arrays_read_on(tmp_path: Path) -> None:
    values = np.arange(1000, dtype="u2")
    array = open_gpu(write(tmp_path / "a", values, chunks=(100,), shards=(500,)), strict=True)
    read(array, "basic", (slice(None),), PROTOTYPE)
    raw = pickle.dumps(array)
    assert len(raw) < 10_000
    assert reads_as(pickle.loads(raw), "basic", (slice(5, 995),), values[5:995])


# zarr warns that it copies shard indices to the GPU and back in this configuration.
@pytest.mark.filterwarnings("ignore:Creating a zarr.buffer.gpu:UserWarning")
def test_everything_while_zarr_is_configured_for_the_gpu(tmp_path: Path) -> None:
    from scgpu_tasks.io.switch import enable

    values = np.arange(6000, dtype="f4").reshape(100, 60)
    gpu_path = write(tmp_path / "a", values, chunks=(10, 10), shards=(40, 40))
    host_path = write(
        tmp_path / "b", values, chunks=(10, 10), shards=(40, 40), compressors=BloscCodec()
    )
    for before in ("zarrs.ZarrsCodecPipeline", "zarr.core.codec_pipeline.FusedCodecPipeline"):
        with zarr.config.set({"codec_pipeline.path": before}), enable():
            arrays = [zarr.open_array(p, mode="r") for p in (gpu_path, host_path)]
            with zarr.config.enable_gpu():
                for array, rows in itertools.product(arrays, (slice(None), slice(3, 90, 4))):
                    got = array[rows]
                    assert hasattr(got, "__cuda_array_interface__")
                    assert same_bytes(to_host(got), values[rows])


@pytest.mark.parametrize(("stop", "small_request"), [(4_000_000, 0), (50_000, 16)])
def test_work_on_the_default_stream_is_not_overtaken(
    tmp_path: Path, stop: int, small_request: int
) -> None:
    import cupy

    gpu_packages.configure(replace(gpu_packages.settings(), small_request=small_request))
    values = np.random.default_rng(9).random(4_000_000)
    array = open_gpu(write(tmp_path / "a", values, chunks=(50_000,), shards=(500_000,)))
    for _ in range(20):
        # Memory of a temporary may come back as the next output while kernels still use it.
        busy = cupy.full(4_000_000, 3.0)
        for _ in range(30):
            busy = busy * 1.0
        total = busy.sum()
        del busy
        got = read(array, "basic", (slice(0, stop),), PROTOTYPE)
        assert float(total) == 12_000_000.0
        assert same_bytes(to_host(got), values[:stop])
