"""Rows that a later visit needs again: in this process's memory up to a budget, or in a file.

What is held may be gone when it is asked for (evicted, another process, a lost file); whoever
asks then reads the matrix again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scgpu_tasks.kernels.arrays import is_on_gpu
from scgpu_tasks.kernels.rows import Rows

# Bytes that one process holds, with the tables that a run has of all cells; small beside a
# block and its decoding.
BUDGET = 80 * 1024**2
# What those tables take of each cell: its name, metrics, filters.
BYTES_PER_CELL = 100
# Share of a GPU's memory for rows that are on it.
GPU_SHARE = 0.25

Key = tuple[str, int]


class _Memory:
    """Rows by run and span. A run that was cut short is the first to make room."""

    def __init__(self, budget: int | None) -> None:
        self.budget = budget
        self._rows: OrderedDict[Key, list[Rows]] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, key: Key, rows: Sequence[Rows], taken: int = 0) -> bool:
        """Hold rows, if there is room beside those of the same run and what else is taken."""
        with self._lock:
            if self.budget is None:
                self.budget = _gpu_budget()
            room = self.budget - taken
            others = [other for other in self._rows if other[0] != key[0]]
            while self._size() + _size(rows) > room and others:
                del self._rows[others.pop(0)]
            if self._size() + _size(rows) > room:
                return False
            self._rows[key] = list(rows)
            return True

    def take(self, key: Key) -> list[Rows] | None:
        """Hand rows back, and hold them no longer."""
        with self._lock:
            return self._rows.pop(key, None)

    def drop(self, run: str) -> None:
        """Forget all that a run holds."""
        with self._lock:
            for key in [key for key in self._rows if key[0] == run]:
                del self._rows[key]

    def _size(self) -> int:
        return sum(_size(rows) for rows in self._rows.values())


def _size(rows: Sequence[Rows]) -> int:
    return sum(r.indptr.nbytes + r.indices.nbytes + r.data.nbytes for r in rows)


def _gpu_budget() -> int:
    from scgpu_tasks.kernels._gpu.module import memory_limit

    return int(GPU_SHARE * memory_limit())


memory = _Memory(BUDGET)
# The budget is known once there is a GPU to ask.
gpu_memory = _Memory(None)


def hold(key: Key, rows: Sequence[Rows], scratch: str | None, n_cells: int = 0) -> bool:
    """Hold rows of a span in memory, else in a file in `scratch`, if there is one.

    The tables of many cells leave less memory for rows, so that a run of many cells takes no
    more than one of few.

    Rows on a GPU are held there or not at all: reading them again is as quick as a file.

    Returns
    -------
    Whether they are held.
    """
    if any(is_on_gpu(r.data) for r in rows):
        return gpu_memory.put(key, rows)
    if memory.put(key, rows, BYTES_PER_CELL * n_cells):
        return True
    if scratch is None:
        return False
    parts = {
        f"{name}{i}": getattr(r, name)
        for i, r in enumerate(rows)
        for name in ("indptr", "indices", "data")
    }
    path = _file(key, scratch)
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb") as file:
        np.savez(file, n_cols=np.array([r.n_cols for r in rows]), **parts)
    unfinished.rename(path)
    return True


def recall(key: Key, scratch: str | None) -> list[Rows] | None:
    """Give back rows that were held, and hold them no longer; None if they are gone."""
    rows = memory.take(key) or gpu_memory.take(key)
    if rows is not None or scratch is None:
        return rows
    path = _file(key, scratch)
    try:
        with np.load(path) as parts:
            rows = [
                Rows(parts[f"indptr{i}"], parts[f"indices{i}"], parts[f"data{i}"], int(n))
                for i, n in enumerate(parts["n_cols"])
            ]
    except FileNotFoundError:
        return None
    path.unlink()
    return rows


def drop(run: str, scratch: str | None) -> None:
    """Forget all that a run holds in this process and in `scratch`."""
    memory.drop(run)
    gpu_memory.drop(run)
    if scratch is not None:
        for path in Path(scratch).glob(f"rows-{run}-*"):
            path.unlink(missing_ok=True)


def _file(key: Key, scratch: str) -> Path:
    return Path(scratch) / f"rows-{key[0]}-{key[1]}.npz"
