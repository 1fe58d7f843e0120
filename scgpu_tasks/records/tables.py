"""cells.parquet and genes.parquet: every cell and gene with its metrics, passed or not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from scgpu_tasks.records.files import in_one_step

ROWS_PER_GROUP = 500_000


def write_table(path: str | Path, table: pd.DataFrame) -> Path:
    """Write a table of metrics as Parquet, one row group at a time.

    Parameters
    ----------
    path
        File to write; replaced if there.
    table
        Rows indexed by cell or gene name.

    Returns
    -------
    The path. `pandas.read_parquet` returns the same table with the same index.
    """
    path = Path(path)
    with in_one_step(path) as partial:
        # The schema comes from the whole table's dtypes: row groups cannot disagree.
        head = pa.Table.from_pandas(_text_index(table.iloc[:0]), preserve_index=True)
        floats = [f.name for f in head.schema if pa.types.is_floating(f.type)]
        with pq.ParquetWriter(
            partial,
            head.schema,
            compression="zstd",
            # Hardly a value comes twice; bytes of like weight side by side compress.
            use_dictionary=[f.name for f in head.schema if pa.types.is_dictionary(f.type)],
            use_byte_stream_split=floats,
        ) as writer:
            for start in range(0, max(len(table), 1), ROWS_PER_GROUP):
                rows = _text_index(table.iloc[start : start + ROWS_PER_GROUP])
                writer.write_table(_arrow(rows, head.schema))
    return path


def _arrow(rows: pd.DataFrame, schema: pa.Schema) -> pa.Table:
    """Return rows as Arrow has them; numbers are not copied."""
    columns = []
    for field in schema:
        index = field.name not in rows.columns
        values = rows.index if index else rows[field.name]
        if isinstance(values.dtype, np.dtype) and values.dtype.kind in "iuf":
            columns.append(pa.array(values.to_numpy(), type=field.type))
        else:
            columns.append(pa.array(values, type=field.type, from_pandas=True))
    return pa.Table.from_arrays([_one(column) for column in columns], schema=schema)


def _one(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _text_index(table: pd.DataFrame) -> pd.DataFrame:
    names = table.index
    if isinstance(names.dtype, pd.StringDtype):
        return table
    return table.set_axis(names.astype("str").rename(names.name), axis=0)
