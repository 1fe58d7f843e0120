"""Zarr arrays with a codec pipeline of their own choice, whatever zarr's configuration says."""

from __future__ import annotations

import lzma
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.codec import Codec, CodecPipeline
from zarr.codecs import Crc32cCodec, ShardingCodec
from zarr.codecs._v2 import V2Codec
from zarr.core.array import AsyncArray
from zarr.core.array_spec import ArrayConfig, ArraySpec
from zarr.core.buffer import cpu
from zarr.core.codec_pipeline import BatchedCodecPipeline, FusedCodecPipeline
from zarr.core.metadata import ArrayMetadata, ArrayV2Metadata, ArrayV3Metadata
from zarr.core.metadata.v3 import RegularChunkGridMetadata
from zarr.storage import LocalStore, StorePath
from zarrs.pipeline import (
    UnsupportedMetadataError,
    ZarrsCodecPipeline,
    get_codec_pipeline_impl,
)

from scgpu_tasks.errors import CorruptChunkError, FormatError, StoreError
from scgpu_tasks.io.elements import Files, Node
from scgpu_tasks.io.layout import ArrayLayout, analyse_array, parse_shard_index

DECODE_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    OSError,
    EOFError,
    LookupError,
    ArithmeticError,
    zlib.error,
    lzma.LZMAError,
    struct.error,
)
"""What the codecs of zarr, zarrs and numcodecs raise on bytes that they cannot decode."""

REWRITE = "write the store again from its source, or restore this file from a copy"
"""What to do about a damaged file."""

Stat = tuple[int, int, int]
_MAX_KNOWN_SHARDS = 4096
_LONG = 2**22
"""Values of two arrays that are worth a second thread."""


def attach_pipeline(array: zarr.Array[Any], pipeline: CodecPipeline) -> zarr.Array[Any]:
    """Let `pipeline` encode and decode this array, whichever zarr's configuration names.

    Returns
    -------
    The same array.
    """
    object.__setattr__(array.async_array, "codec_pipeline", pipeline)
    return array


def host_pipeline(array: zarr.Array[Any]) -> CodecPipeline:
    """Return zarrs' pipeline for reading this array, or the fused one where zarrs cannot.

    Reading a part of a shard, zarrs leaves checksums of chunks unchecked; the fused pipeline
    checks them.
    """
    metadata, store = array.async_array.metadata, array.async_array.store_path.store
    codecs = _codecs(metadata)
    inner = codecs[0].codecs if isinstance(codecs[0], ShardingCodec) else codecs
    checked = any(isinstance(codec, Crc32cCodec) for codec in inner)
    if isinstance(store, LocalStore) and array.dtype.isnative and not checked:
        try:
            impl = get_codec_pipeline_impl(metadata, store, strict=True)
        except UnsupportedMetadataError:
            pass
        else:
            slow = BatchedCodecPipeline.from_codecs(codecs)
            return ZarrsCodecPipeline(metadata, store, impl, slow)
    return fused_pipeline(array)


def fused_pipeline(array: zarr.Array[Any]) -> CodecPipeline:
    """Return zarr's fused pipeline: it alone writes a shard in chunk order."""
    metadata = array.async_array.metadata
    dtype = metadata.dtype if isinstance(metadata, ArrayV2Metadata) else metadata.data_type
    spec = ArraySpec(
        shape=tuple(array.shards or array.chunks),
        dtype=dtype,
        fill_value=metadata.fill_value,
        config=ArrayConfig.from_dict({}),
        prototype=cpu.buffer_prototype,
    )
    pipeline = FusedCodecPipeline.from_codecs(_codecs(metadata))
    return pipeline.evolve_from_array_spec(spec)


def _gpu_pipeline(array: zarr.Array[Any]) -> CodecPipeline:
    from scgpu_tasks.io.pipeline import KvikioCodecPipeline

    fallback = type(host_pipeline(array))
    return KvikioCodecPipeline(
        metadata=array.async_array.metadata,
        store=array.async_array.store_path.store,
        fallback_path=f"{fallback.__module__}.{fallback.__qualname__}",
    )


def _codecs(metadata: ArrayMetadata) -> list[Codec]:
    if isinstance(metadata, ArrayV2Metadata):
        return [V2Codec(filters=metadata.filters, compressor=metadata.compressor)]
    return list(metadata.codecs)


@dataclass(frozen=True)
class Visit:
    """What a read of some rows finds on disk.

    Attributes
    ----------
    stored_bytes
        Bytes of the stored chunks, with the shard indices.
    missing
        Key and first and last row (exclusive) of each file that does not exist.
    """

    stored_bytes: int
    missing: tuple[tuple[str, int, int], ...] = ()


class RowArray:
    """One stored array, read in ranges of its first axis.

    Parameters
    ----------
    files
        The files of its store.
    node
        Its metadata.
    device
        Where the values go: ``"cpu"`` or ``"gpu"``.

    Raises
    ------
    FormatError
        The metadata describe no array that zarr can read here.
    """

    def __init__(self, files: Files, node: Node, *, device: str = "cpu") -> None:
        self.files = files
        self.name = node.name
        self.device = device
        self.array = _open(files, node)
        metadata = self.array.async_array.metadata
        if isinstance(metadata, ArrayV3Metadata) and not isinstance(
            metadata.chunk_grid, RegularChunkGridMetadata
        ):
            msg = f"{self.name} of {files.path} has an irregular chunk grid; rewrite it"
            raise FormatError(msg)
        self.dtype = self.array.dtype
        self.shape = self.array.shape
        self._file_shape = tuple(self.array.shards or self.array.chunks)
        self._chunk_shape = tuple(self.array.chunks)
        layout = analyse_array(metadata)
        self.layout = layout if isinstance(layout, ArrayLayout) else None
        self._sizes: dict[str, tuple[Stat, NDArray[np.int64]]] = {}
        # CuPy knows native byte order only; other arrays take the way through the host.
        self._to_gpu = device == "gpu" and self.dtype.isnative
        attach_pipeline(
            self.array, (_gpu_pipeline if self._to_gpu else host_pipeline)(self.array)
        )

    def read(self, start: int, stop: int) -> Any:
        """Read rows ``start:stop`` as a NumPy or CuPy array of native byte order.

        Chunk files that do not exist read as fill values; `visit` tells of them.

        Raises
        ------
        CorruptChunkError
            A chunk of them cannot be decoded.
        StoreError
            The file system refused to read.
        """
        try:
            if self._to_gpu:
                return self._read_gpu(start, stop)
            values = self._read_host(start, stop)
        except CorruptChunkError:
            raise
        except DECODE_ERRORS as error:
            found = self._find_damage(start, stop)
            if found is not None:
                raise found from error
            if isinstance(error, OSError):
                msg = f"rows {start} to {stop} of {self.name} cannot be read: {error}"
                raise StoreError(msg) from error
            raise
        if not values.dtype.isnative:
            values = values.astype(values.dtype.newbyteorder("="))
        if self.device == "gpu":
            import cupy

            return cupy.asarray(values)
        return values

    def read_with(self, other: RowArray, start: int, stop: int) -> tuple[Any, Any]:
        """Read rows ``start:stop`` of this array and of another, on an idle GPU together.

        Where other threads read too, there is enough at the same time already.

        Raises
        ------
        CorruptChunkError, StoreError
            As `read`; this array's error where both fail.
        """
        if not (self._to_gpu and other._to_gpu and stop - start >= _LONG):
            return self.read(start, stop), other.read(start, stop)
        import cupy

        from scgpu_tasks.io.scratch import reads_running

        # Memory belongs to the stream of the thread that asks for it, as in `read`.
        device, stream = cupy.cuda.Device(), cupy.cuda.get_current_stream()
        if reads_running(device.id):
            return self.read(start, stop), other.read(start, stop)

        def read_other() -> Any:
            with device, stream:
                return other.read(start, stop)

        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(read_other)
            return self.read(start, stop), second.result()

    def _read_host(self, start: int, stop: int) -> NDArray[Any]:
        # zarr would allocate in the order of the metadata, and zarrs fills C order only.
        values = np.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        if values.size:
            out, prototype = cpu.NDBuffer(values), cpu.buffer_prototype
            self.array.get_basic_selection(slice(start, stop), out=out, prototype=prototype)
        return values

    def _read_gpu(self, start: int, stop: int) -> Any:
        import cupy
        from zarr.core.buffer import gpu

        # zarr allocates on a thread of its own, whose device need not be this thread's.
        out = cupy.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        # Memory comes in the order of this thread's stream. The pipeline waits for the default
        # stream, but cannot see any other.
        stream = cupy.cuda.get_current_stream()
        if stream.ptr:
            stream.synchronize()
        if out.size:
            self.array.get_basic_selection(
                slice(start, stop), out=gpu.NDBuffer(out), prototype=gpu.buffer_prototype
            )
        return out

    def visit(self, start: int, stop: int) -> Visit:
        """Look up the stored chunks that hold rows ``start:stop``, without reading them.

        Raises
        ------
        CorruptChunkError
            The index of a shard among them is damaged.
        """
        total = 0
        missing = []
        rows = self._file_shape[0]
        encode = self.array.async_array.metadata.encode_chunk_key
        for coords in self._file_coords(start, stop):
            key = encode(coords)
            first = coords[0] * rows
            a, b = max(start - first, 0), min(stop - first, rows)
            stat = self.files.stat(f"{self.name}/{key}")
            if stat is None:
                missing.append((key, first + a, first + b))
            elif self.array.shards is None:
                total += stat[0]
            elif self.layout is None:
                total += stat[0] * (b - a) // rows
            else:
                sizes = self._chunk_sizes(coords, key, stat, self.layout)
                step = self._chunk_shape[0]
                total += int(sizes[a // step : -(-b // step)].sum()) + self.layout.index_nbytes
        return Visit(total, tuple(missing))

    def missing_rows(self) -> int:
        """Rows at the start whose files do not exist; of an array of one axis."""
        encode = self.array.async_array.metadata.encode_chunk_key
        n_files = -(-self.shape[0] // self._file_shape[0])
        for i in range(n_files):
            if self.files.stat(f"{self.name}/{encode((i,))}") is not None:
                return i * self._file_shape[0]
        return self.shape[0]

    def _file_coords(self, start: int, stop: int) -> list[tuple[int, ...]]:
        if stop <= start or 0 in self.shape:
            return []
        files = self._file_shape
        ranges = [range(start // files[0], -(-stop // files[0]))]
        ranges += [range(-(-n // f)) for n, f in zip(self.shape[1:], files[1:], strict=True)]
        return list(product(*ranges))

    def _chunk_sizes(
        self, coords: tuple[int, ...], key: str, stat: Stat, layout: ArrayLayout
    ) -> NDArray[np.int64]:
        """Look up the stored sizes of a shard's chunks, in the shape of its chunk grid."""
        known = self._sizes.get(key)
        if known is not None and known[0] == stat:
            return known[1]
        nbytes = min(layout.index_nbytes, stat[0])
        start = stat[0] - nbytes if layout.index_at_end else 0
        raw = self.files.read_range(f"{self.name}/{key}", start, nbytes)
        table = parse_shard_index(
            raw, stat[0], layout, store=self.files.path, array=self.name, shard=key
        )
        if table.damage.any():
            within = np.unravel_index(int(np.argmax(table.damage)), layout.grid)
            grid = zip(coords, layout.grid, within, strict=True)
            msg = f"the index of the shard gives a chunk an impossible place; {REWRITE}"
            raise self.corrupt(msg, key, tuple(int(c * g + w) for c, g, w in grid))
        sizes = np.maximum(table.size, 0).reshape(layout.grid)
        if len(self._sizes) >= _MAX_KNOWN_SHARDS:
            self._sizes.clear()
        self._sizes[key] = (stat, sizes)
        return sizes

    def corrupt(
        self, message: str, shard: str, chunk: tuple[int, ...] | None = None
    ) -> CorruptChunkError:
        """Make the error for damage in this array."""
        place = {"store": self.files.path, "array": self.name, "shard": shard}
        return CorruptChunkError(message, chunk=chunk, **place)

    def _find_damage(self, start: int, stop: int) -> CorruptChunkError | None:
        """Find the first chunk of a failed read that fails alone."""
        try:
            self.visit(start, stop)
        except CorruptChunkError as error:
            return error
        steps, files = self._chunk_shape, self._file_shape
        ranges = [range(start // steps[0], -(-stop // steps[0]))]
        ranges += [range(-(-n // s)) for n, s in zip(self.shape[1:], steps[1:], strict=True)]
        encode = self.array.async_array.metadata.encode_chunk_key
        alone = self.array.with_config({})
        attach_pipeline(alone, fused_pipeline(self.array))
        for chunk in product(*ranges):
            where = tuple(slice(c * s, (c + 1) * s) for c, s in zip(chunk, steps, strict=True))
            file = tuple(c * s // f for c, s, f in zip(chunk, steps, files, strict=True))
            try:
                alone.get_basic_selection(where, prototype=cpu.buffer_prototype)
            except DECODE_ERRORS as error:
                msg = f"a chunk cannot be decoded ({error}); {REWRITE}"
                return self.corrupt(msg, encode(file), chunk)
        return None


def _open(files: Files, node: Node) -> zarr.Array[Any]:
    try:
        metadata: ArrayMetadata
        if node.zarr_format == 3:
            metadata = ArrayV3Metadata.from_dict(node.metadata)
        else:
            metadata = ArrayV2Metadata.from_dict(
                {**node.metadata, "attributes": node.attributes}
            )
    except (ValueError, TypeError, KeyError) as error:
        msg = f"{node.name} of {files.path} has metadata that zarr cannot use: {error}"
        raise FormatError(msg) from error
    config = ArrayConfig(order="C", write_empty_chunks=False)
    path = StorePath(files.zarr_store(), node.name)
    return zarr.Array(AsyncArray(metadata=metadata, store_path=path, config=config))
