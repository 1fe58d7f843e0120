"""Arrays and selections for reads, drawn one integer at a time.

The same draws serve Hypothesis, which shrinks them, and a random generator, which makes ten
thousand of them in seconds on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec, ZstdCodec
from zarr.core.indexing import (
    BasicIndexer,
    BlockIndexer,
    CoordinateIndexer,
    MaskIndexer,
    OrthogonalIndexer,
)
from zarr.core.sync import sync

Draw = Callable[[int, int], int]

DTYPES = ("bool", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")

CHAINS: dict[str, list[Any]] = {
    "zstd": [ZstdCodec(level=1)],
    "zstd with checksum": [ZstdCodec(level=3, checksum=True)],
    "zstd, crc32c": [ZstdCodec(level=0), Crc32cCodec()],
    "raw": [],
    "raw, crc32c": [Crc32cCodec()],
}


@dataclass
class ArrayCase:
    """An array on disk and what it holds."""

    path: Path
    values: np.ndarray
    order: str


def draw_case(draw: Draw, folder: Path) -> ArrayCase:
    """Write an array of any shape, chunks, shards, dtype and codecs; part of it is absent."""
    ndim = draw(0, 3)
    longest = (1, 400, 30, 12)[ndim]
    shape = tuple(draw(1, longest) for _ in range(ndim))
    chunks = tuple(draw(1, max(1, n // draw(1, 4))) for n in shape)
    chain = list(CHAINS.values())[draw(0, len(CHAINS) - 1)]
    dtype = np.dtype(DTYPES[draw(0, len(DTYPES) - 1)])
    fill = np.array(draw(0, 100)).astype(dtype)[()]
    rng = np.random.default_rng(draw(0, 2**16))
    values = rng.integers(0, 50, shape).astype(dtype)
    if draw(0, 2) == 0 and ndim:
        values[tuple(slice(n // 3, n // 3 + n // 2) for n in shape)] = fill
    sharded = draw(0, 3) > 0
    serializer: Any = BytesCodec()
    compressors = chain
    file_shape = chunks
    if sharded:
        file_shape = tuple(c * draw(1, 4) for c in chunks)
        serializer = ShardingCodec(
            chunk_shape=chunks,
            codecs=[BytesCodec(), *chain],
            index_location="end" if draw(0, 1) else "start",
            subchunk_write_order="morton" if draw(0, 1) else "lexicographic",
        )
        compressors = []
    order = "F" if draw(0, 3) == 0 else "C"
    array = zarr.create_array(
        folder,
        shape=shape,
        chunks=file_shape,
        dtype=dtype,
        serializer=serializer,
        compressors=compressors,
        filters=None,
        fill_value=fill,
        overwrite=True,
    )
    array[...] = values
    return ArrayCase(folder, values, order)


def open_with(path: Path, order: str, pipeline: Any) -> zarr.Array[Any]:
    """Open an array with a pipeline class of our choice."""
    array = zarr.open_array(path, mode="r", config={"order": order})
    inner = array.async_array
    made = pipeline.from_array_metadata_and_store(inner.metadata, inner.store_path.store)
    object.__setattr__(inner, "codec_pipeline", made)
    return array


def draw_slice(draw: Draw, n: int) -> slice:
    start, stop = sorted((draw(0, n), draw(0, n)))
    return slice(start, stop, draw(1, 3) if draw(0, 2) == 0 else 1)


def draw_axis(draw: Draw, n: int) -> Any:
    kind = draw(0, 5)
    if kind == 0:
        return draw(0, n - 1)
    if kind in (1, 2):
        return draw_slice(draw, n)
    if kind == 3:
        return slice(None)
    if kind == 4:
        return np.array([draw(0, n - 1) for _ in range(draw(1, 6))])
    mask = np.zeros(n, dtype=bool)
    mask[[draw(0, n - 1) for _ in range(draw(1, 6))]] = True
    return mask


def draw_selection(draw: Draw, shape: tuple[int, ...]) -> tuple[str, Any]:
    """Draw a selection of any kind that zarr has."""
    kind = ("basic", "orthogonal", "coordinate", "mask")[draw(0, 3)]
    if kind == "basic" or not shape:
        take = [draw_axis(draw, n) for n in shape]
        return "basic", tuple(s if isinstance(s, (int, slice)) else slice(None) for s in take)
    if kind == "orthogonal":
        return kind, tuple(draw_axis(draw, n) for n in shape)
    points = draw(1, 12)
    at = tuple(np.array([draw(0, n - 1) for _ in range(points)]) for n in shape)
    if kind == "coordinate":
        return kind, at
    mask = np.zeros(shape, dtype=bool)
    mask[at] = True
    return kind, mask


INDEXERS = {
    "basic": BasicIndexer,
    "orthogonal": OrthogonalIndexer,
    "coordinate": CoordinateIndexer,
    "mask": MaskIndexer,
    "block": BlockIndexer,
}


def read(
    array: zarr.Array[Any], kind: str, selection: Any, prototype: Any, out: Any = None
) -> Any:
    """Read as zarr does, without the copy to the host that ends some selections."""
    indexer = INDEXERS[kind](selection, array.shape, array.async_array._chunk_grid)
    return sync(array.async_array._get_selection(indexer, prototype=prototype, out=out))


def expect(values: np.ndarray, kind: str, selection: Any) -> np.ndarray:
    """What NumPy takes."""
    if kind in ("basic", "mask"):
        return values[selection]
    if kind == "coordinate":
        return values[selection].reshape(-1)
    axes = [
        np.arange(n)[s] if isinstance(s, slice) else np.atleast_1d(_numbers(s))
        for s, n in zip(selection, values.shape, strict=True)
    ]
    dropped = tuple(i for i, s in enumerate(selection) if isinstance(s, int))
    return values[np.ix_(*axes)].squeeze(axis=dropped)


def _numbers(selector: Any) -> np.ndarray:
    found = np.asarray(selector)
    return np.flatnonzero(found) if found.dtype == bool else found


def same_bytes(got: Any, want: np.ndarray) -> bool:
    got = np.asarray(got)
    return (
        got.shape == want.shape
        and got.dtype == want.dtype
        and got.tobytes() == np.asarray(want).tobytes()
    )


def seeded(seed: int) -> Draw:
    rng = np.random.default_rng(seed)
    return lambda low, high: int(rng.integers(low, high + 1))
