"""zstd frames of an array's chunks, made by this machine's processors."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import zstandard

_local = threading.local()
_MOST_SLOTS = 17  # log2: a table of half a MiB


def compress(values: bytes | memoryview | np.ndarray, level: int) -> bytes:
    """Return one zstd frame with the content size and a checksum.

    The checksum costs next to nothing, and lets every reader notice a flipped bit that would
    otherwise decode to other values.
    """
    view = memoryview(values)
    frame: bytes = _compressor(level, view.nbytes, numbers=False).compress(view)
    return frame


def compress_chunks(
    values: np.ndarray, nbytes: int, level: int, *, numbers: bool = False
) -> tuple[bytes, list[int]]:
    """Compress bytes chunk by chunk, into frames such as `compress` gives.

    All of it happens in one call without the interpreter's lock: taken for each chunk, the lock
    keeps many threads waiting for each other.

    Parameters
    ----------
    values
        Bytes, contiguous.
    nbytes
        Of each chunk; the length of `values` is a multiple of it.
    level
        Of zstd.
    numbers
        They are column numbers of a sparse matrix: see `_parameters`.

    Returns
    -------
    The frames one after another, and the size of each.
    """
    parts = np.empty((len(values) // nbytes, 2), np.uint64)
    parts[:, 0], parts[:, 1] = np.arange(len(parts)) * nbytes, nbytes
    chunks = zstandard.BufferWithSegments(memoryview(values), parts.tobytes())
    compressor = _compressor(level, nbytes, numbers=numbers)
    frames = compressor.multi_compress_to_buffer(chunks, threads=1)
    found: list[Any] = [frames[i] for i in range(len(frames))]
    return b"".join(found), [len(frame) for frame in found]


def decompress_chunks(frames: bytes, sizes: np.ndarray, nbytes: int) -> list[np.ndarray]:
    """Decode frames that lie one after another, and compare their checksums.

    Parameters
    ----------
    frames
        What `compress_chunks` returns, or a stretch of a shard.
    sizes
        Of each frame.
    nbytes
        Of each chunk.

    Raises
    ------
    ValueError
        One does not decode to this many bytes.
    """
    parts = np.empty((len(sizes), 2), np.uint64)
    parts[:, 0], parts[:, 1] = np.cumsum(sizes) - sizes, sizes
    wanted = np.full(len(sizes), nbytes, np.uint64).tobytes()
    try:
        found = _decompressor().multi_decompress_to_buffer(
            zstandard.BufferWithSegments(frames, parts.tobytes()),
            decompressed_sizes=wanted,
            threads=1,
        )
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    chunks: list[Any] = [found[i] for i in range(len(sizes))]
    return [np.frombuffer(chunk, np.uint8) for chunk in chunks]


def _decompressor() -> zstandard.ZstdDecompressor:
    if "decompressor" not in _local.__dict__:
        _local.decompressor = zstandard.ZstdDecompressor()
    found: zstandard.ZstdDecompressor = _local.decompressor
    return found


def _compressor(level: int, nbytes: int, *, numbers: bool) -> zstandard.ZstdCompressor:
    key = level, nbytes, numbers
    if _local.__dict__.get("key") != key:
        made = zstandard.ZstdCompressor(compression_params=_parameters(*key))
        _local.key, _local.compressor = key, made
    found: zstandard.ZstdCompressor = _local.compressor
    return found


def _parameters(level: int, nbytes: int, numbers: bool) -> Any:
    """Parameters of a level, zstd's own; for column numbers, others of the same worth.

    Levels like 3 look for long matches before short ones. In rows of ascending numbers hardly
    any are long, so one table is enough, of a slot for every other byte of the chunk: that is
    1.2 to 1.9 times as fast for 3 % more bytes at most, measured on made-up matrices of 2,000
    to 200,000 columns; panels of some hundred columns, which compress well, take 6 % more.
    """
    found = zstandard.ZstdCompressionParameters.from_level(
        level, source_size=nbytes, write_checksum=True, write_content_size=True
    )
    if not numbers or found.strategy != zstandard.STRATEGY_DFAST:
        return found
    return zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST,
        window_log=found.window_log,
        hash_log=min(_MOST_SLOTS, max(found.hash_log, nbytes.bit_length() - 2)),
        chain_log=found.chain_log,
        search_log=1,
        min_match=5,
        target_length=0,
        write_checksum=True,
        write_content_size=True,
    )


def encoder_version() -> str:
    """Name of what decides the stored bytes of equal values."""
    return f"zstd {'.'.join(map(str, zstandard.ZSTD_VERSION))}, 2"
