"""cells.parquet and genes.parquet: every cell and gene with its metrics, passed or not."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

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
    partial = path.with_name(f".{path.name}.partial")
    # The schema comes from the whole table's dtypes, so that row groups cannot disagree.
    head = table.iloc[:0]
    schema = pa.Table.from_pandas(_text_index(head), preserve_index=True).schema
    try:
        with pq.ParquetWriter(partial, schema, compression="zstd") as writer:
            for start in range(0, max(len(table), 1), ROWS_PER_GROUP):
                rows = _text_index(table.iloc[start : start + ROWS_PER_GROUP])
                part = pa.Table.from_pandas(rows, schema=schema, preserve_index=True)
                writer.write_table(part)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return path


def _text_index(table: pd.DataFrame) -> pd.DataFrame:
    names = table.index
    if isinstance(names.dtype, pd.StringDtype):
        return table
    return table.set_axis(names.astype("str").rename(names.name), axis=0)
