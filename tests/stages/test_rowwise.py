"""Work on long arrays in pieces, on threads."""

from __future__ import annotations

import numpy as np
import pytest

from scgpu_tasks.stages import tables
from scgpu_tasks.stages.qc_visits import CellPart
from scgpu_tasks.stages.rowwise import by_rows


@pytest.mark.parametrize("n_rows", [0, 1, 7, 8, 100])
def test_every_row_is_worked_on_once(n_rows):
    done = np.zeros(n_rows, int)
    by_rows(lambda rows: done.__setitem__(rows, done[rows] + 1), n_rows, 8)
    assert (done == 1).all()


def test_an_error_in_one_piece_reaches_the_caller():
    def fail(rows):
        if rows.start == 48:
            msg = "broken"
            raise ValueError(msg)

    with pytest.raises(ValueError, match="broken"):
        by_rows(fail, 100, 8)


def test_columns_of_many_cells_are_those_of_plain_numpy():
    n = 400_000
    rng = np.random.default_rng(0)
    n_genes, total = rng.integers(0, 5_000, n), rng.integers(0, 20_000, n).astype(float)
    total[::1_000] = 0
    sets, tops = np.floor(total[:, None] * rng.random((n, 2))), total[:, None] * 0.5
    found = tables.cell_metrics(CellPart(n_genes, total, sets, tops), ["mt", "ribo"], (50,))
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = {
            "n_genes_by_counts": n_genes,
            "log1p_n_genes_by_counts": np.log1p(n_genes),
            "total_counts": total,
            "log1p_total_counts": np.log1p(total),
            "pct_counts_in_top_50_genes": tops[:, 0] / total * 100,
            "total_counts_mt": sets[:, 0],
            "log1p_total_counts_mt": np.log1p(sets[:, 0]),
            "pct_counts_mt": sets[:, 0] / total * 100,
            "total_counts_ribo": sets[:, 1],
            "log1p_total_counts_ribo": np.log1p(sets[:, 1]),
            "pct_counts_ribo": sets[:, 1] / total * 100,
        }
    assert list(found) == list(expected)
    for name, want in expected.items():
        np.testing.assert_array_equal(found[name], want, err_msg=name)
