from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from scgpu_tasks.records import files, tables


def test_every_cell_and_gene_comes_back_with_its_name(tmp_path: Path, finished) -> None:
    for name in ("cells", "genes"):
        table = getattr(finished.qc, name)
        path = tables.write_table(tmp_path / f"{name}.parquet", table)
        pd.testing.assert_frame_equal(pd.read_parquet(path), table)
        assert {"total_counts", "passed_qc"} <= set(table.columns)


def test_large_tables_are_written_in_row_groups(
    tmp_path: Path, finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "ROWS_PER_GROUP", 400)
    path = tables.write_table(tmp_path / "cells.parquet", finished.qc.cells)
    file = pq.ParquetFile(path)
    assert [file.metadata.row_group(i).num_rows for i in range(4)] == [400, 400, 400, 300]
    pd.testing.assert_frame_equal(pd.read_parquet(path), finished.qc.cells)


@pytest.mark.parametrize(
    "index",
    [
        pd.Index(["a", "a", "ü<&'\"\n"], name="gene $x$"),
        pd.Index([10, 20, 30]),
        pd.Index(["x", "y", "z"], dtype=object),
    ],
    ids=["repeated names", "numbers", "objects"],
)
def test_names_are_stored_as_text(tmp_path: Path, index: pd.Index) -> None:
    table = pd.DataFrame({"total_counts": [1.0, np.nan, 3.0]}, index=index)
    back = pd.read_parquet(tables.write_table(tmp_path / "t.parquet", table))
    assert list(back.index) == [str(name) for name in index]
    assert back.index.name == index.name
    np.testing.assert_array_equal(back["total_counts"], table["total_counts"])


def test_a_table_without_rows_keeps_its_columns(tmp_path: Path, finished) -> None:
    table = finished.qc.cells.iloc[:0]
    back = pd.read_parquet(tables.write_table(tmp_path / "t.parquet", table))
    pd.testing.assert_frame_equal(back, table)


def test_a_table_that_is_written_already_is_copied(tmp_path: Path) -> None:
    made = tables.write_table(
        tmp_path / "made.parquet", pd.DataFrame({"n": [1, 2]}, index=["a", "b"])
    )
    (tmp_path / "record").mkdir()
    given = tmp_path / "record" / "cells.parquet"
    given.write_bytes(b"old")
    assert files.copy(made, given)
    assert not given.samefile(made)
    made.unlink()
    assert list(pd.read_parquet(given).index) == ["a", "b"]
    assert not files.copy(made, given)
    assert [path.name for path in given.parent.iterdir()] == ["cells.parquet"]
