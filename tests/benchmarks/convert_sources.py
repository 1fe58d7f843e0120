"""The sources of the conversion benchmark, written on all cores.

anndata writes an h5ad on one core, which takes minutes for a billion values. The files made
here have the same form, chunks and codecs.
"""

from __future__ import annotations

import os
import shutil
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numcodecs
import numpy as np
import zarr

from scgpu_tasks.datasets import SyntheticAtlas

SOURCES = ("blosc.zarr", "gzip.h5ad")
_CELLS = 1_000
# h5py's default level.
_GZIP = 4


def prepare(folder: Path, cells: int, genes: int) -> None:
    """Write a blosc zarr v2 store and a gzip h5ad of one atlas, if they are not there yet."""
    if all((folder / name).exists() for name in SOURCES):
        return
    folder.mkdir(parents=True, exist_ok=True)
    atlas = SyntheticAtlas(genes)
    rest = ad.AnnData(obs=atlas.obs(cells), var=atlas.var())
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arrays = draw(atlas, cells, pool)
        for name, write in zip(SOURCES, (write_zarr, write_h5ad), strict=True):
            part = folder / f"{name}.part"
            shutil.rmtree(part, ignore_errors=True)
            write(part, rest, arrays, (cells, genes), pool)
            part.rename(folder / name)


def draw(atlas: SyntheticAtlas, cells: int, pool: ThreadPoolExecutor) -> dict[str, np.ndarray]:
    """X of an atlas as the arrays of a CSR matrix; indices are int32, as most stores have."""
    starts = range(0, cells, _CELLS)
    parts = list(pool.map(lambda a: atlas.cells(a, min(a + _CELLS, cells)), starts))
    ends = np.cumsum([0, *(len(data) for data, _, _ in parts)])
    made = {
        "data": np.empty(ends[-1], np.float32),
        "indices": np.empty(ends[-1], np.int32),
        "indptr": np.zeros(cells + 1, np.int32 if ends[-1] < 2**31 else np.int64),
    }

    def place(n: int) -> None:
        data, indices, indptr = parts[n]
        made["data"][ends[n] : ends[n + 1]] = data
        made["indices"][ends[n] : ends[n + 1]] = indices
        at = n * _CELLS + 1
        made["indptr"][at : at + len(indptr) - 1] = indptr[1:] + ends[n]

    list(pool.map(place, range(len(parts))))
    return made


def _attrs(shape: tuple[int, int]) -> dict[str, Any]:
    return {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": list(shape)}


def write_zarr(
    path: Path,
    rest: ad.AnnData,
    arrays: dict[str, np.ndarray],
    shape: tuple[int, int],
    pool: ThreadPoolExecutor,
) -> None:
    """Write a zarr v2 store in blosc (lz4, level 5, byte shuffle)."""
    blosc = numcodecs.Blosc("lz4", 5, numcodecs.Blosc.SHUFFLE)
    root = zarr.open_group(path, mode="w", zarr_format=2)
    ad.io.write_elem(root, "/", rest, dataset_kwargs={"compressor": blosc})
    group = root.create_group("X", attributes=_attrs(shape), overwrite=True)
    for name, values in arrays.items():
        array = group.create_array(
            name, shape=values.shape, dtype=values.dtype, compressors=blosc
        )
        size = array.chunks[0]

        def write(at: int, array: Any = array, values: Any = values, size: int = size) -> None:
            chunk = _padded(values[at : at + size], size)
            (path / array.path / str(at // size)).write_bytes(blosc.encode(chunk))

        list(pool.map(write, range(0, len(values), size)))


def write_h5ad(
    path: Path,
    rest: ad.AnnData,
    arrays: dict[str, np.ndarray],
    shape: tuple[int, int],
    pool: ThreadPoolExecutor,
) -> None:
    """Write an h5ad file as ``write_h5ad(compression="gzip")`` does."""
    with h5py.File(path, "w") as file:
        ad.io.write_elem(file, "/", rest, dataset_kwargs={"compression": "gzip"})
        group = file.create_group("X")
        group.attrs.update(_attrs(shape))
        for name, values in arrays.items():
            array = group.create_dataset(
                name, values.shape, values.dtype, compression="gzip", maxshape=(None,)
            )
            size = array.chunks[0]

            def deflate(at: int, values: Any = values, size: int = size) -> bytes:
                return zlib.compress(_padded(values[at : at + size], size), _GZIP)

            starts = range(0, len(values), size)
            for at, chunk in zip(starts, pool.map(deflate, starts), strict=True):
                array.id.write_direct_chunk((at,), chunk)


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate((values, np.zeros(size - len(values), values.dtype)))
