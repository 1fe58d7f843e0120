"""Random blocks of rows for the kernel tests, and what the kernels should make of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from scgpu_tasks.kernels.rows import Rows


def random_rows(
    n_rows: int,
    n_cols: int,
    *,
    seed: int = 0,
    index: Any = np.uint16,
    value: Any = np.float32,
    per_row: int = 60,
    largest: float = 400,
    whole: bool = True,
    shuffled: bool = False,
    repeats: bool = False,
) -> Rows:
    """Rows on the host: some empty, some columns empty, explicit zeros, mostly ones."""
    rng = np.random.default_rng(seed)
    lengths = rng.poisson(per_row, n_rows).clip(0, n_cols - 3)
    lengths[rng.random(n_rows) < 0.05] = 0
    parts = []
    for n in lengths:
        # The last three columns stay empty.
        columns = np.sort(rng.choice(n_cols - 3, n, replace=False))
        if repeats and n > 4:
            columns[rng.integers(0, n, 3)] = columns[0]
        parts.append(rng.permutation(columns) if shuffled else np.sort(columns))
    indices = np.concatenate([*parts, np.zeros(0, np.int64)]).astype(index)
    data = np.minimum(rng.geometric(0.6, len(indices)), largest).astype(np.float64)
    big = rng.random(len(data)) < 0.02
    data[big] = rng.integers(1, int(largest) + 1, int(big.sum()))
    if not whole:
        data += rng.random(len(data)) * 0.5
    data[rng.random(len(data)) < 0.03] = 0
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Rows(indptr, indices, data.astype(value), n_cols)


def on_gpu(rows: Rows) -> Rows:
    """The same rows on the device."""
    import cupy

    return Rows(*(cupy.asarray(part) for part in rows[:3]), rows.n_cols)


def dense(rows: Rows) -> np.ndarray:
    """The rows as a dense float64 array; repeated entries added up."""
    out = np.zeros((rows.n_rows, rows.n_cols))
    of = np.repeat(np.arange(rows.n_rows), np.diff(rows.indptr))
    np.add.at(out, (of, rows.indices.astype(np.int64)), rows.data.astype(np.float64))
    return out


def host(array: Any) -> np.ndarray:
    """NumPy array of a device's array."""
    return array.get() if hasattr(array, "get") else np.asarray(array)


@dataclass(frozen=True)
class HostDecoded:
    """Row blocks that the host decodes and the GPU works on."""

    rows: Any

    device = "gpu"

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.shape

    @property
    def bounds(self) -> Any:
        return self.rows.bounds

    def read(self, start: int, stop: int) -> Any:
        import cupy

        block = self.rows.read(start, stop)
        for name in ("data", "indices", "values"):
            array = getattr(block, name)
            if array is not None:
                setattr(block, name, cupy.asarray(array))
        return block
