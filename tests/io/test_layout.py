"""Which arrays a GPU can decode, and where their chunks lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.codecs import (
    BloscCodec,
    BytesCodec,
    Crc32cCodec,
    GzipCodec,
    ShardingCodec,
    TransposeCodec,
    ZstdCodec,
)

from scgpu_tasks.errors import CorruptChunkError
from scgpu_tasks.io.layout import (
    ArrayLayout,
    Refusal,
    analyse_array,
    parse_shard_index,
    refuse_store,
    whole_file_table,
)

ABSENT = 2**64 - 1


def layout_of(**options: Any) -> ArrayLayout | Refusal:
    options = {"shape": (100, 60), "chunks": (10, 20), "dtype": "f4", **options}
    return analyse_array(zarr.create_array({}, **options).metadata)


def accepted(**options: Any) -> ArrayLayout:
    found = layout_of(**options)
    assert isinstance(found, ArrayLayout), found
    return found


def test_sharded_zstd_is_accepted_with_its_geometry() -> None:
    found = accepted(shards=(40, 60), dtype="u2", fill_value=3)
    assert found.file_shape == (40, 60)
    assert found.chunk_shape == (10, 20)
    assert found.grid == (4, 3)
    assert found.chunks_per_file == 12
    assert found.index_nbytes == 12 * 16 + 4
    assert found.chunk_nbytes == 400
    assert found.zstd
    assert found.index_at_end
    assert not found.crc32c
    assert found.fill_value == 3


def test_unsharded_raw_and_checksummed_chunks_are_accepted() -> None:
    assert not accepted(compressors=None).zstd
    assert accepted().index_nbytes == 0
    found = accepted(compressors=[ZstdCodec(checksum=True), Crc32cCodec()])
    assert found.zstd
    assert found.crc32c
    assert not accepted(compressors=[Crc32cCodec()]).zstd


def test_an_index_before_the_chunks_is_accepted() -> None:
    codec = ShardingCodec(chunk_shape=(10, 20), index_location="start")
    assert not accepted(chunks=(20, 20), serializer=codec, compressors=None).index_at_end


@pytest.mark.parametrize("dtype", ["bool", "i1", "u8", "f2", "c16"])
def test_numbers_of_every_width_are_accepted(dtype: str) -> None:
    assert accepted(dtype=dtype).dtype == np.dtype(dtype)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"compressors": BloscCodec()}, "codec blosc"),
        ({"compressors": GzipCodec()}, "codec gzip"),
        ({"compressors": [Crc32cCodec(), ZstdCodec()]}, "codec zstd"),
        ({"filters": [TransposeCodec(order=(1, 0))]}, "codec transpose"),
        ({"serializer": BytesCodec(endian="big")}, "big-endian chunks"),
        ({"zarr_format": 2}, "zarr format 2"),
        ({"dtype": "M8[s]"}, "dtype datetime64[s]"),
        ({"shards": (40, 60), "compressors": BloscCodec()}, "codec blosc"),
        (
            {"serializer": ShardingCodec(chunk_shape=(5, 5)), "compressors": ZstdCodec()},
            "codec zstd around the shards",
        ),
        (
            {
                "serializer": ShardingCodec(chunk_shape=(5, 5), index_codecs=[BytesCodec()]),
                "compressors": None,
            },
            "index codecs other than bytes, crc32c",
        ),
        (
            {
                "serializer": ShardingCodec(
                    chunk_shape=(10, 10), codecs=[ShardingCodec(chunk_shape=(5, 5))]
                ),
                "compressors": None,
            },
            "codec sharding_indexed",
        ),
        ({"shape": (2**31,), "chunks": (2**31,), "dtype": "u1"}, "chunks of 2 GiB or more"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_everything_else_is_refused_by_name(options: dict[str, Any], reason: str) -> None:
    found = layout_of(**options)
    assert isinstance(found, Refusal)
    assert found.reason == reason


def test_only_plain_local_stores_have_files_to_read(tmp_path: Path) -> None:
    assert refuse_store(zarr.storage.LocalStore(tmp_path)) is None
    refused = refuse_store(zarr.storage.MemoryStore())
    assert refused is not None
    assert refused.reason == "store MemoryStore"

    class Renamed(zarr.storage.LocalStore):
        pass

    assert refuse_store(Renamed(tmp_path)) is not None


LAYOUT = accepted(shards=(20, 60))  # 6 chunks of 800 bytes


def index_of(pairs: Any) -> bytes:
    raw = np.asarray(pairs, dtype="<u8").tobytes()
    return raw + int(google_crc32c.value(raw)).to_bytes(4, "little")


def parse(raw: bytes, size: int, layout: ArrayLayout = LAYOUT) -> Any:
    return parse_shard_index(raw, size, layout, store="s", array="X/data", shard="c/3")


entry = st.one_of(
    st.integers(0, 2**64 - 1),
    st.integers(0, 3000),
    st.sampled_from([0, 1, 2**63, ABSENT - 1, ABSENT]),
)


@given(st.lists(st.tuples(entry, entry), min_size=6, max_size=6), st.integers(100, 3000))
def test_entries_are_usable_exactly_where_they_lie_inside_the_file(
    pairs: list[tuple[int, int]], size: int
) -> None:
    for layout in (LAYOUT, accepted(shards=(20, 60), compressors=None)):
        found = parse(index_of(pairs), size, layout)
        for i, (offset, nbytes) in enumerate(pairs):
            absent = offset == nbytes == ABSENT
            right = nbytes >= 1 if layout.zstd else nbytes == 800
            usable = not absent and right and offset + nbytes <= size - 100
            assert found.damage[i] == (not absent and not usable)
            assert (found.size[i] == -1) == absent
            if usable:
                assert (found.offset[i], found.size[i]) == (offset, nbytes)


def test_an_index_before_the_chunks_shifts_what_is_inside() -> None:
    codec = ShardingCodec(chunk_shape=(10, 20), index_location="start")
    layout = accepted(chunks=(20, 60), serializer=codec, compressors=None)
    pairs = [(100 + 800 * i, 800) for i in range(6)]
    assert not parse(index_of(pairs), 4900, layout).damage.any()
    pairs[0] = (99, 800)
    assert parse(index_of(pairs), 4900, layout).damage.tolist() == [True] + [False] * 5


@given(st.integers(0, 99), st.integers(0, 7))
def test_every_flipped_bit_of_an_index_is_found(byte: int, bit: int) -> None:
    raw = bytearray(index_of([(100 * i, 100) for i in range(6)]))
    raw[byte] ^= 1 << bit
    with pytest.raises(CorruptChunkError, match="checksum") as caught:
        parse(bytes(raw), 800)
    assert (caught.value.array, caught.value.shard) == ("X/data", "c/3")


def test_a_shard_without_room_for_its_index_is_named() -> None:
    with pytest.raises(CorruptChunkError, match="50 bytes, too few for its index of 100"):
        parse(b"\0" * 50, 50)


def test_an_empty_unsharded_chunk_is_damaged_and_a_raw_one_of_wrong_size() -> None:
    assert whole_file_table(0, accepted()).damage.tolist() == [True]
    assert whole_file_table(799, accepted(compressors=None)).damage.tolist() == [True]
    assert whole_file_table(800, accepted(compressors=None)).damage.tolist() == [False]
