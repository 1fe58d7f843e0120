"""Columns of strings read into Arrow memory, without an object for each string.

The names of ten million cells take zarr and pandas many seconds, all of them in the
interpreter; the stored bytes differ from Arrow's own form only by where the lengths stand.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import google_crc32c
import numpy as np
import pandas as pd
import pyarrow as pa
import zarr
from anndata.experimental import read_dispatched
from numba import njit
from numcodecs.zstd import Zstd
from numpy.typing import NDArray
from zarr.codecs import ShardingCodec, VLenUTF8Codec, ZstdCodec
from zarr.core.buffer import cpu
from zarr.core.metadata import ArrayV3Metadata
from zarr.core.sync import sync

_FEW = 50_000
_NONE = 2**64 - 1
_KINDS = ("string-array", "nullable-string-array")


def read_element(node: zarr.Group | zarr.Array[Any]) -> Any:
    """As ``anndata.io.read_elem``, with long columns of strings as Arrow arrays.

    Returns
    -------
    The same values in the same types, except that a long array of strings which is read by
    itself comes as a pandas array.
    """
    return read_dispatched(node, _read_one)


def _read_one(read: Callable[[Any], Any], _: str, node: Any, *, iospec: Any) -> Any:
    if iospec.encoding_type in _KINDS:
        strings = _strings(node)
        if strings is not None:
            return strings
    return read(node)


def _strings(node: zarr.Group | zarr.Array[Any]) -> Any:
    """Return the strings of an element; None where anndata has to read them."""
    values: Any = node
    if isinstance(node, zarr.Group):
        mask: Any = node["mask"]
        values = node["values"]
        if mask.shape[0] >= _FEW and np.any(mask[...]):
            return None
    if values.ndim != 1 or values.shape[0] < _FEW:
        return None
    parts = read_strings(values)
    if parts is None:
        return None
    kind = pd.StringDtype("pyarrow", na_value=np.nan)
    return pd.array(pa.chunked_array(parts), dtype=kind)


def read_strings(array: zarr.Array[Any]) -> list[pa.LargeStringArray] | None:
    """Read an array of strings, chunk by chunk.

    Parameters
    ----------
    array
        zarr v3, one axis, ``vlen-utf8`` chunks, as they are or in zstd, in shards or not.

    Returns
    -------
    One array for each chunk; None where the array is of another kind, or something about its
    bytes is not as it should be: zarr can read the one, and tell what is wrong with the other.
    """
    inner = _inner_chunks(array.metadata)
    if inner is None:
        return None
    compressed, per_chunk = inner
    n_files = -(-array.shape[0] // _per_file(array.metadata))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            files = pool.map(lambda i: _file(array, i), range(n_files))
            raw = [chunk for file in files for chunk in file]
            needed = -(-array.shape[0] // per_chunk)
            left = [min(per_chunk, array.shape[0] - i * per_chunk) for i in range(needed)]
            return list(pool.map(lambda r, n: _parse(r, n, compressed), raw[:needed], left))
        except (ValueError, RuntimeError, OSError, pa.ArrowInvalid):
            return None


def file_reader(array: zarr.Array[Any]) -> tuple[int, Callable[[int], list[bytes]]] | None:
    """Find out how to read the bytes of an array of strings file by file.

    Parameters
    ----------
    array
        As of `read_strings`.

    Returns
    -------
    Strings in a file, and a function that returns the decoded ``vlen-utf8`` chunks of the file
    of a number; it raises ValueError, RuntimeError or OSError where bytes are not as they
    should be. None for other kinds of arrays.
    """
    inner = _inner_chunks(array.metadata)
    if inner is None:
        return None
    compressed, per_chunk = inner
    empty = per_chunk.to_bytes(4, "little") + bytes(4 * per_chunk)

    def read(number: int) -> list[bytes]:
        found = _file(array, number)
        return [
            empty if raw is None else Zstd().decode(raw) if compressed else raw for raw in found
        ]

    return _per_file(array.metadata), read


def _inner_chunks(metadata: Any) -> tuple[bool, int] | None:
    """Whether chunks are zstd frames, and their length; None for codecs of other kinds."""
    if not isinstance(metadata, ArrayV3Metadata) or metadata.fill_value != "":
        return None
    codecs, length = list(metadata.codecs), _per_file(metadata)
    if len(codecs) == 1 and isinstance(codecs[0], ShardingCodec):
        length, index = codecs[0].chunk_shape[0], codecs[0]
        where = getattr(index.index_location, "value", index.index_location)
        if where != "end" or len(index.index_codecs) != 2:
            return None
        codecs = list(codecs[0].codecs)
    if not codecs or not isinstance(codecs[0], VLenUTF8Codec):
        return None
    if len(codecs) == 1:
        return False, length
    return (True, length) if len(codecs) == 2 and isinstance(codecs[1], ZstdCodec) else None


def _per_file(metadata: Any) -> int:
    return int(metadata.chunk_grid.chunk_shape[0])


def _file(array: zarr.Array[Any], number: int) -> list[bytes | None]:
    """Return the stored bytes of each chunk of a file; None for those that are not stored."""
    path = array.store_path / array.metadata.encode_chunk_key((number,))
    found = sync(path.get(prototype=cpu.buffer_prototype))
    raw = None if found is None else found.to_bytes()
    if array.shards is None:
        return [raw]
    n = array.shards[0] // array.chunks[0]
    if raw is None:
        return [None] * n
    index, stored = raw[-16 * n - 4 : -4], raw[-4:]
    if len(index) != 16 * n or google_crc32c.value(index) != int.from_bytes(stored, "little"):
        msg = "a damaged index"
        raise ValueError(msg)
    pairs = np.frombuffer(index, "<u8").reshape(n, 2).tolist()
    return [None if at == _NONE else raw[at : at + size] for at, size in pairs]


def _parse(raw: bytes | None, n: int, compressed: bool) -> pa.LargeStringArray:
    if raw is None:
        return pa.array([""] * n, pa.large_string())
    data = np.frombuffer(Zstd().decode(raw) if compressed else raw, np.uint8)
    offsets = np.zeros(n + 1, np.int64)
    text = np.empty(len(data), np.uint8)
    if not _unpack(data, offsets, text):
        msg = "lengths that do not fit the chunk"
        raise ValueError(msg)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(text[: offsets[-1]])]
    strings = pa.Array.from_buffers(pa.large_string(), n, buffers)
    strings.validate(full=True)
    return strings


@njit(nogil=True, cache=True)
def _unpack(
    data: NDArray[np.uint8], offsets: NDArray[np.int64], text: NDArray[np.uint8]
) -> bool:
    """Move lengths and bytes of ``vlen-utf8`` apart: a count, then length and bytes of each."""
    n, end, at, out = len(offsets) - 1, len(data), 4, 0
    if end < 4 or _word(data, 0) < n:
        return False
    for i in range(n):
        if at + 4 > end:
            return False
        length = _word(data, at)
        at += 4
        if at + length > end:
            return False
        for j in range(length):
            text[out + j] = data[at + j]
        at += length
        out += length
        offsets[i + 1] = out
    return True


@njit(nogil=True, cache=True, inline="always")
def _word(data: NDArray[np.uint8], at: int) -> Any:
    """Four bytes as a little-endian number."""
    word = np.int64(0)
    for k in range(4):
        word |= np.int64(data[at + k]) << (8 * k)
    return word
