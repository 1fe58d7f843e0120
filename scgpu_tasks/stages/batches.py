"""The table of the cells: perhaps still on its way, and how it cuts them into batches."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pandas as pd

from scgpu_tasks.errors import FormatError, ParameterError


class DeferredTable:
    """The table of a matrix's cells, perhaps read in a thread; checked when it is there."""

    def __init__(
        self, table: pd.DataFrame | Callable[[], pd.DataFrame], shape: tuple[int, int]
    ) -> None:
        self.shape = shape
        self._future: Future[pd.DataFrame] = Future()
        if callable(table):
            pool = ThreadPoolExecutor(1, thread_name_prefix="scgpu-obs")
            self._future = pool.submit(table)
            pool.shutdown(wait=False)
        else:
            self._future.set_result(table)
            self.result()

    def result(self) -> pd.DataFrame:
        """Wait for the table.

        Raises
        ------
        FormatError
            It has another number of rows.
        """
        table = self._future.result()
        n_cells, n_genes = self.shape
        if len(table) != n_cells:
            msg = f"obs has {len(table)} rows, but X is {n_cells} x {n_genes}"
            raise FormatError(msg)
        return table


def batch_groups(obs: pd.DataFrame, batch_key: str | None) -> tuple[np.ndarray, list[Any]]:
    """Find each cell's batch number, one past the last where it has none; and the names."""
    if batch_key is None:
        return np.zeros(len(obs), np.int32), ["all"]
    if batch_key not in obs.columns:
        some = ", ".join(map(str, obs.columns[:20])) or "none"
        msg = f"batch_key {batch_key!r} is not a column of obs; its columns are: {some}"
        raise ParameterError(msg)
    column = obs[batch_key].astype("category")
    codes = column.cat.codes.to_numpy().astype(np.int32)
    categories = list(column.cat.categories)
    codes[codes < 0] = len(categories)
    return codes, categories
