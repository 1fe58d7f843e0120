"""CSC to CSR on disk: memory holds a few million entries at a time, whatever the size.

Columns are read in runs; a run's entries are sorted by row and written as one file, with the
places where each band of rows begins. Then each band gathers its entries from all runs, sorts
them by row (columns are in order already) and is written as one file. Runs and bands do not
depend on each other and are written under their names when complete, so both can be done by
many workers, and be gone on with.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np

from scgpu_tasks.errors import CorruptChunkError
from scgpu_tasks.io.convert import sorting
from scgpu_tasks.io.convert.rearrange import row_blocks

RUN = 1 << 21
BAND = 1 << 21
Rows = Callable[[int, int], np.ndarray]


class Transposition:
    """One CSC matrix on its way to CSR.

    Parameters
    ----------
    folder
        Where runs and bands are kept.
    columns
        Column borders of the source, int64.
    rows
        Row borders of the result, int64.
    indices, data
        Functions that return entries start:stop of the source.
    dtype
        Of the values.
    """

    def __init__(
        self,
        folder: Path,
        columns: np.ndarray,
        rows: np.ndarray,
        indices: Rows,
        data: Rows,
        dtype: np.dtype,
    ) -> None:
        self.folder, self._columns, self.rows = folder, columns, rows
        self._indices, self._data = indices, data
        n_rows, n_columns = len(rows) - 1, len(columns) - 1
        self.record = np.dtype(
            [
                ("row", np.uint32 if n_rows <= 2**32 else np.uint64),
                ("column", np.uint32 if n_columns <= 2**32 else np.uint64),
                ("value", dtype),
            ]
        )
        self.runs = list(row_blocks(columns, 0, n_columns, RUN))
        self.bands = list(row_blocks(rows, 0, n_rows, BAND))
        self._starts = np.array([int(rows[a]) for a, _ in self.bands] + [int(rows[-1])])

    @property
    def scratch_bytes(self) -> int:
        """Most bytes that runs and bands take on the disk."""
        return int(self.rows[-1]) * (self.record.itemsize + self._band_dtype.itemsize)

    @property
    def _band_dtype(self) -> np.dtype:
        return np.dtype([(name, self.record[name]) for name in ("column", "value")])

    def make_run(self, number: int) -> None:
        """Read columns and write their entries sorted by row."""
        path = self.folder / f"run.{number}"
        if path.exists():
            return
        a, b = self.runs[number]
        low, high = int(self._columns[a]), int(self._columns[b])
        entries = np.empty(high - low, self.record)
        rows = self._indices(low, high)
        n_rows = len(self.rows) - 1
        # Counting costs a pass over all rows of the matrix.
        if n_rows <= 4 * len(rows):
            order = sorting.order_by_row(rows, 0, n_rows)
        else:
            order = np.argsort(rows, kind="stable")
        entries["row"] = rows[order]
        del rows
        widths = np.diff(self._columns[a : b + 1])
        entries["column"] = np.repeat(np.arange(a, b), widths)[order]
        entries["value"] = self._data(low, high)[order]
        edges = [start for start, _ in self.bands]
        index = np.searchsorted(entries["row"], np.array(edges, dtype=self.record["row"]))
        _write(path, np.append(index, len(entries)).astype(np.int64), entries)

    def make_band(self, number: int) -> None:
        """Gather rows from all runs and write their entries in order."""
        path = self.folder / f"band.{number}"
        if path.exists():
            return
        a, b = self.bands[number]
        total = int(self.rows[b] - self.rows[a])
        entries = np.empty(total, self.record)
        at = 0
        for run in range(len(self.runs)):
            part = self._segment(run, number)
            entries[at : at + len(part)] = part
            at += len(part)
        if at != total:
            msg = f"a run of the transposition is damaged: {at} entries instead of {total}"
            raise CorruptChunkError(msg, store=str(self.folder), shard=f"band.{number}")
        order = sorting.order_by_row(entries["row"], a, b - a)
        band = np.empty(total, self._band_dtype)
        for name in ("column", "value"):
            band[name] = entries[name][order]
        _write(path, band["column"].copy(), band["value"].copy())

    def _segment(self, run: int, band: int) -> np.ndarray:
        head = 8 * (len(self.bands) + 1)
        with (self.folder / f"run.{run}").open("rb") as file:
            fd = file.fileno()
            start, stop = np.frombuffer(os.pread(fd, 16, 8 * band), np.int64)
            size = self.record.itemsize
            data = os.pread(fd, int(stop - start) * size, head + int(start) * size)
        return np.frombuffer(data, self.record)

    def drop_runs(self) -> None:
        """Free the disk space of the runs, once all bands are there."""
        for number in range(len(self.runs)):
            (self.folder / f"run.{number}").unlink(missing_ok=True)

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Column numbers of entries start:stop of the result."""
        return self._read("column", start, stop)

    def data(self, start: int, stop: int) -> np.ndarray:
        """Values of entries start:stop of the result."""
        return self._read("value", start, stop)

    def _read(self, field: str, start: int, stop: int) -> np.ndarray:
        out = np.empty(stop - start, self.record[field])
        band = int(np.searchsorted(self._starts, start, "right")) - 1
        at = start
        while at < stop:
            low, high = int(self._starts[band]), int(self._starts[band + 1])
            end = min(stop, high)
            skip = 0 if field == "column" else (high - low) * self.record["column"].itemsize
            values = np.memmap(
                self.folder / f"band.{band}", out.dtype, "r", skip, (high - low,)
            )
            out[at - start : end - start] = values[at - low : end - low]
            at = end
            band += 1
        return out


def _write(path: Path, *parts: np.ndarray) -> None:
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    with part.open("wb") as file:
        for values in parts:
            values.tofile(file)
    part.replace(path)
