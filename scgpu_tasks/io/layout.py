"""Where the chunks of a zarr array lie in its files, and whether a GPU can decode them.

Pure: NumPy and zarr's metadata classes, no file is opened and no GPU is touched.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray
from zarr.abc.codec import Codec
from zarr.abc.store import Store
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec, ZstdCodec
from zarr.core.metadata import ArrayV3Metadata
from zarr.core.metadata.v3 import RegularChunkGridMetadata
from zarr.storage import LocalStore

from scgpu_tasks.errors import CorruptChunkError

ABSENT = np.uint64(2**64 - 1)
"""Offset and size of a chunk that a shard does not hold."""

MAX_CHUNK_BYTES = 2**31 - 1
"""Largest decoded chunk that nvCOMP takes."""

KINDS = "biufc"
"""Kinds of dtype whose bytes need no further decoding."""


@dataclass(frozen=True)
class Refusal:
    """Why the GPU cannot decode an array or a request, and what would change that.

    Parameters
    ----------
    reason
        Short and stable; read statistics count by it.
    remedy
        What to do about it.
    """

    reason: str
    remedy: str = "convert the store with scgpu-tasks convert"

    def __str__(self) -> str:
        """Reason, then remedy."""
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason


@dataclass(frozen=True)
class ArrayLayout:
    """How one array is stored, where "zstd, then reinterpret" decodes it.

    Parameters
    ----------
    dtype
        Native dtype of the elements, of kind b, i, u, f or c.
    file_shape
        Elements of one file, a shard or an unsharded chunk, along each axis.
    chunk_shape
        Elements of one compressed chunk along each axis.
    sharded
        Whether a file holds many chunks and an index.
    index_at_end
        Whether the index follows the chunks; zarr can also put it before them.
    zstd
        Whether chunks are zstd frames; raw bytes otherwise.
    crc32c
        Whether the CRC-32C of its stored bytes follows every chunk.
    fill_value
        What a chunk that is not stored holds.
    checksum
        Whether all damage to a chunk is found: by the hash that ends a zstd frame, or crc32c.
    """

    dtype: np.dtype[Any]
    file_shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    sharded: bool
    index_at_end: bool
    zstd: bool
    crc32c: bool
    fill_value: Any
    checksum: bool = False

    @cached_property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.chunk_shape)

    @cached_property
    def chunk_nbytes(self) -> int:
        """Bytes of one decoded chunk; chunks at the array's edge are stored in full."""
        return prod(self.chunk_shape) * self.dtype.itemsize

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """Chunks of one file along each axis."""
        return tuple(f // c for f, c in zip(self.file_shape, self.chunk_shape, strict=True))

    @cached_property
    def chunks_per_file(self) -> int:
        """Chunks of one file."""
        return prod(self.grid)

    @cached_property
    def index_nbytes(self) -> int:
        """Bytes of the shard index with its checksum; 0 where there is none."""
        return 16 * self.chunks_per_file + 4 if self.sharded else 0

    @cached_property
    def max_stored_nbytes(self) -> int:
        """Most bytes that a plausible stored chunk of this size takes."""
        checksum = 4 if self.crc32c else 0
        if not self.zstd:
            return self.chunk_nbytes + checksum
        # zstd's own bound is n + n/256 + a little; other encoders may add a few headers.
        return self.chunk_nbytes + self.chunk_nbytes // 128 + 1024 + checksum


def analyse_array(metadata: Any) -> ArrayLayout | Refusal:
    """Tell whether a GPU can decode this array by zstd alone.

    Parameters
    ----------
    metadata
        ``array.metadata`` of a zarr array.

    Returns
    -------
    The layout, or the reason why not.
    """
    if not isinstance(metadata, ArrayV3Metadata):
        return Refusal("zarr format 2")
    dtype = metadata.data_type.to_native_dtype()
    if dtype.kind not in KINDS:
        return Refusal(f"dtype {dtype}", "")
    if not dtype.isnative or sys.byteorder != "little":
        return Refusal(f"byte order of dtype {dtype}")
    if not isinstance(metadata.chunk_grid, RegularChunkGridMetadata):
        return Refusal("irregular chunk grid")
    if metadata.storage_transformers:
        return Refusal("storage transformers")
    file_shape = tuple(int(n) for n in metadata.chunk_grid.chunk_shape)
    codecs, chunk_shape, index_at_end = tuple(metadata.codecs), file_shape, True
    sharding = codecs[0] if isinstance(codecs[0], ShardingCodec) else None
    if sharding is not None:
        refused = _refuse_sharding(codecs, sharding)
        if refused is not None:
            return refused
        codecs, chunk_shape = sharding.codecs, tuple(int(n) for n in sharding.chunk_shape)
        index_at_end = sharding.index_location == "end"
    chain = _chunk_chain(codecs, dtype)
    if isinstance(chain, Refusal):
        return chain
    fill = metadata.fill_value
    layout = ArrayLayout(
        dtype=dtype,
        file_shape=file_shape,
        chunk_shape=chunk_shape,
        sharded=sharding is not None,
        index_at_end=index_at_end,
        zstd=chain[0],
        crc32c=chain[1],
        fill_value=metadata.data_type.default_scalar() if fill is None else fill,
        checksum=chain[1] or any(isinstance(c, ZstdCodec) and c.checksum for c in codecs),
    )
    if layout.chunk_nbytes > MAX_CHUNK_BYTES:
        return Refusal("chunks of 2 GiB or more")
    return layout


def _refuse_sharding(codecs: Sequence[Codec], sharding: ShardingCodec) -> Refusal | None:
    if len(codecs) > 1:
        return Refusal(f"codec {_name(codecs[1])} around the shards")
    index = tuple(sharding.index_codecs)
    plain = (
        len(index) == 2
        and isinstance(index[0], BytesCodec)
        and index[0].endian == "little"
        and isinstance(index[1], Crc32cCodec)
    )
    return None if plain else Refusal("index codecs other than bytes, crc32c")


def _chunk_chain(codecs: Sequence[Codec], dtype: np.dtype[Any]) -> tuple[bool, bool] | Refusal:
    """Return (zstd, crc32c) of a codec chain bytes[, zstd][, crc32c]."""
    first, rest = codecs[0], list(codecs[1:])
    if not isinstance(first, BytesCodec):
        return Refusal(f"codec {_name(first)}")
    if dtype.itemsize > 1 and first.endian != "little":
        return Refusal("big-endian chunks")
    zstd = bool(rest) and isinstance(rest[0], ZstdCodec)
    if zstd:
        rest.pop(0)
    crc32c = bool(rest) and isinstance(rest[0], Crc32cCodec)
    if crc32c:
        rest.pop(0)
    return Refusal(f"codec {_name(rest[0])}") if rest else (zstd, crc32c)


def _name(codec: Codec) -> str:
    known = codec.to_dict().get("name")
    return str(known) if known else type(codec).__name__


def refuse_store(store: Store) -> Refusal | None:
    """Return why files of this store cannot be read by path, or None where they can."""
    # A subclass may change what a key means, so only the class itself will do.
    if type(store) is LocalStore:
        return None
    return Refusal(
        f"store {type(store).__name__}", "copy the store to a local disk to read it by GPU"
    )


@dataclass(frozen=True)
class ChunkTable:
    """Where the chunks of one file lie.

    Parameters
    ----------
    offset, size
        int64, one entry a chunk in C order of the file's chunk grid; size −1 where absent.
    damage
        None, or an entry a chunk: whether its entry in the index cannot be true.
    """

    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    damage: NDArray[np.bool_]


def parse_shard_index(
    raw: bytes, file_size: int, layout: ArrayLayout, *, store: str, array: str, shard: str
) -> ChunkTable:
    """Read the index of a shard and check it against the file.

    Parameters
    ----------
    raw
        The index with its checksum, ``layout.index_nbytes`` bytes.
    file_size
        Size of the shard's file in bytes.

    Returns
    -------
    The table; ``damage`` marks entries that lie outside the file, reach into the index,
    or have a size that no such chunk has.

    Raises
    ------
    CorruptChunkError
        The index is cut off, or its checksum does not fit.

    Notes
    -----
    Layout of the index: zarr v3 specification, sharding codec.
    """
    place: dict[str, Any] = {"store": store, "array": array, "shard": shard}
    if len(raw) < layout.index_nbytes:
        msg = (
            f"the shard has {file_size} bytes, too few for its index of {layout.index_nbytes}: "
            "it was cut off; write it again from the source"
        )
        raise CorruptChunkError(msg, **place)
    stored = int.from_bytes(raw[-4:], "little")
    found = google_crc32c.value(raw[:-4])
    if stored != found:
        msg = (
            f"the checksum of the shard's index is {found:08x}, stored is {stored:08x}; "
            "write the shard again from the source"
        )
        raise CorruptChunkError(msg, **place)
    pairs = np.frombuffer(raw, dtype="<u8", count=2 * layout.chunks_per_file).reshape(-1, 2)
    return _table_of(pairs[:, 0], pairs[:, 1], file_size, layout)


def _table_of(
    offset: NDArray[np.uint64], size: NDArray[np.uint64], file_size: int, layout: ArrayLayout
) -> ChunkTable:
    absent = (offset == ABSENT) & (size == ABSENT)
    first = 0 if layout.index_at_end else layout.index_nbytes
    stop = file_size - layout.index_nbytes if layout.index_at_end else file_size
    end = np.uint64(max(stop, 0))
    # Comparisons in this order cannot wrap around, whatever the entries hold.
    inside = (
        (offset >= np.uint64(first)) & (offset <= end) & (size <= end - np.minimum(offset, end))
    )
    least = (4 if layout.crc32c else 0) + (1 if layout.zstd else layout.chunk_nbytes)
    plausible = size >= np.uint64(least)
    if not layout.zstd:
        plausible &= size == np.uint64(least)
    damage = ~absent & ~(inside & plausible)
    usable = ~absent & ~damage
    none = np.uint64(0)
    # Views: NumPy 2.1 was seen to warn of casting what stands for absent.
    return ChunkTable(
        np.where(usable, offset, none).view(np.int64),
        np.where(usable, size, np.where(absent, ABSENT, none)).view(np.int64),
        damage,
    )


def whole_file_table(file_size: int, layout: ArrayLayout) -> ChunkTable:
    """Return the table of a file that is one unsharded chunk."""
    size = np.array([file_size], dtype=np.uint64)
    return _table_of(np.zeros(1, dtype=np.uint64), size, file_size, layout)


def absent_table(layout: ArrayLayout) -> ChunkTable:
    """Return the table of a file that does not exist: every chunk is absent."""
    n = layout.chunks_per_file
    return ChunkTable(
        np.zeros(n, dtype=np.int64), np.full(n, -1, dtype=np.int64), np.zeros(n, dtype=bool)
    )
