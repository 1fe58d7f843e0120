"""Read back what was written, through zarr, and compare it with the source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.storage import LocalStore

from scgpu_tasks.errors import CorruptChunkError
from scgpu_tasks.io.arrays import attach_pipeline, host_pipeline
from scgpu_tasks.io.convert.layout import Layout
from scgpu_tasks.io.convert.progress import Job
from scgpu_tasks.io.convert.values import Values


class FileCheck:
    """Reads a file back through zarr and compares every byte with the source.

    Parameters
    ----------
    values
        What it should hold.
    store
        Folder of the store.
    job
        The file.
    """

    def __init__(self, values: Values, store: Path, job: Job) -> None:
        self._store, self._job = store, job
        self._layout, self._rows = values.plan.array(job.path).layout, values.rows(job.path)
        # A path in a string would be parsed, and may hold a "#".
        self._array: zarr.Array[Any] = zarr.open_array(
            LocalStore(store, read_only=True), path=job.path, mode="r", zarr_format=3
        )
        attach_pipeline(self._array, host_pipeline(self._array))

    def __call__(self, start: int, stop: int) -> None:
        """Compare some rows; threads may do so at once.

        Raises
        ------
        CorruptChunkError
            They differ: names the array, shard, chunk, position and both values.
        """
        job, store = self._job, self._store
        want = self._rows(start, stop)
        try:
            found = np.asarray(self._array[start:stop])
        except (RuntimeError, ValueError, OSError) as error:
            msg = f"rows {start}:{stop} cannot be read back ({error}); run the conversion again"
            raise CorruptChunkError(
                msg, store=str(store), array=job.path, shard=job.key
            ) from error
        if not same_bytes(want, found):
            raise _difference(want, found, start, self._layout, store, job)


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are the same to the last bit, so that NaN equals NaN."""
    if a.shape != b.shape or a.dtype.newbyteorder("=") != b.dtype.newbyteorder("="):
        return False
    left, right = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return bool((left.reshape(-1).view(np.uint8) == right.reshape(-1).view(np.uint8)).all())


def _difference(
    want: np.ndarray, found: np.ndarray, start: int, layout: Layout, store: Path, job: Job
) -> CorruptChunkError:
    raw = [np.ascontiguousarray(v).view(f"V{v.dtype.itemsize}") for v in (want, found)]
    place = np.argwhere(raw[0] != raw[1])[0]
    position = (start + int(place[0]), *(int(i) for i in place[1:]))
    chunk = tuple(p // c for p, c in zip(position, layout.chunk, strict=True))
    msg = (
        f"position {', '.join(map(str, position))} holds {found[tuple(place)]!r} instead of "
        f"the source's {want[tuple(place)]!r}; run the conversion again"
    )
    return CorruptChunkError(msg, store=str(store), array=job.path, shard=job.key, chunk=chunk)
