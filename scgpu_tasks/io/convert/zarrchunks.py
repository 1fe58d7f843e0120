"""Chunks of a zarr array in a local folder, one a file, decoded outside zarr's event loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.core.metadata import ArrayV2Metadata
from zarr.storage import LocalStore

from scgpu_tasks.io.convert import chunks as decode
from scgpu_tasks.io.convert.chunks import Bytes, Chunks, Decoder
from scgpu_tasks.io.source import reading

_DECODERS: dict[str, Decoder] = {
    "": decode.raw,
    "blosc": decode.decode_blosc,
    "zstd": decode.decode_zstd,
    "gzip": decode.inflate_gzip,
    "zlib": decode.inflate_zlib,
    "lz4": decode.decode_lz4,
}


class ZarrChunks(Chunks):
    """An array with at most one codec and one chunk a file.

    Use `ZarrChunks.of`, which returns None for an array that needs zarr.
    """

    def __init__(
        self, array: zarr.Array[Any], folder: Path, codec: str, stored: np.dtype
    ) -> None:
        super().__init__(str(folder), array.path, array.shape, array.chunks, stored)
        self._folder, self._codec = folder / array.path, codec
        self._prefix = f"{self._folder}/"
        fill = array.metadata.fill_value
        self._fill = 0 if fill is None else fill
        self._key = array.metadata.encode_chunk_key

    @classmethod
    def of(cls, array: zarr.Array[Any]) -> ZarrChunks | None:
        """Return a reader of the array, or None where only zarr can read it."""
        store, metadata = array.store, array.metadata
        if type(store) is not LocalStore or not array.shape or 0 in array.shape:
            return None
        if isinstance(metadata, ArrayV2Metadata):
            stored = metadata.dtype.to_native_dtype()
            compressor: Any = metadata.compressor
            codec = compressor.codec_id if compressor is not None else ""
            if metadata.filters or metadata.order != "C":
                return None
        else:
            stored = metadata.data_type.to_native_dtype()
            found = _v3_codec(metadata, stored)
            if found is None:
                return None
            codec, stored = found
        if codec not in _DECODERS or stored.kind not in "biufc":
            return None
        return cls(array, Path(store.root), codec, stored)

    def chunk(self, at: tuple[int, ...]) -> np.ndarray:
        """Return one chunk."""
        data = self._stored(at)
        if data is None:
            return np.full(self.chunks, self._fill, self.stored)
        with self._decoding(at):
            decoded = _DECODERS[self._codec](data, self.chunk_bytes)
        return self.as_chunk(decoded, at)

    def chunk_into(self, at: tuple[int, ...], out: np.ndarray) -> bool:
        """Decode one chunk to where it is wanted."""
        if self._codec != "blosc" or out.dtype != self.stored:
            return False
        data = self._stored(at)
        if data is None:
            return False
        with self._decoding(at):
            decode.decode_blosc_into(data, out)
        return True

    def _stored(self, at: tuple[int, ...]) -> bytes | None:
        """Return the bytes of one chunk in its file, if there is one."""
        name = self.name_of(at)
        with reading(self.store, f"chunk {name} of {self.array}"):
            try:
                with open(f"{self._prefix}{name}", "rb", buffering=0) as file:  # noqa: PTH123
                    return file.read()
            except FileNotFoundError:
                return None

    @contextmanager
    def _decoding(self, at: tuple[int, ...]) -> Iterator[None]:
        try:
            yield
        except (ValueError, RuntimeError) as error:
            found = f"a chunk does not decode ({error})"
            raise self.corrupt(found, self.name_of(at)) from error

    def name_of(self, at: tuple[int, ...]) -> str:
        """Return the chunk's key in the folder of its array."""
        return self._key(at)

    def stream(self, at: tuple[int, ...]) -> Iterator[Bytes] | None:
        """Return the decoded bytes of one chunk a piece at a time."""
        path = self._folder / self._key(at)
        if not path.exists():
            return None
        blocks = self.pread_blocks(path, 0, path.stat().st_size)
        match self._codec:
            case "":
                return blocks
            case "zstd":
                return decode.stream_zstd(blocks)
            case "gzip" | "zlib":
                return decode.stream_deflate(blocks, 31 if self._codec == "gzip" else 15)
        return None


def _v3_codec(metadata: Any, stored: np.dtype) -> tuple[str, np.dtype] | None:
    """Name of the one codec after ``bytes``, and the dtype in its byte order."""
    codecs = [codec.to_dict() for codec in metadata.codecs]
    if codecs[0]["name"] != "bytes" or len(codecs) > 2 or metadata.storage_transformers:
        return None
    if metadata.chunk_grid.to_dict().get("name") != "regular":
        return None
    order = codecs[0].get("configuration", {}).get("endian", "little")
    stored = stored.newbyteorder(">" if order == "big" else "<")
    return (codecs[1]["name"] if len(codecs) == 2 else ""), stored
