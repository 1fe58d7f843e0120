"""Time and memory of writing a run record.

Run it with ``python tests/benchmarks/write_record.py --cells 11.4e6``.

The values are made up, as many of them as QC and PCA of an atlas of that size leave.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from scgpu_tasks.job.saved import save_qc
from scgpu_tasks.records import report, results, tables, write_made
from scgpu_tasks.records.made import Computed
from scgpu_tasks.stages.pca import PCAResult
from scgpu_tasks.stages.qc import QCResult

N_GENES, N_HVG, N_COMPS = 25_000, 2_000, 50


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def made_up(n: int) -> Computed:
    rng = np.random.default_rng(0)
    cell_names = pd.Index(np.char.add("cell-", np.arange(n).astype("U8"))).astype("str")
    kinds = {"batch": 100, "cell_type": 12}
    obs = pd.DataFrame(
        {
            name: pd.Categorical.from_codes(
                rng.integers(0, k, n), [f"{name} {i}" for i in range(k)]
            )
            for name, k in kinds.items()
        },
        index=cell_names,
    )
    total = rng.lognormal(8, 0.6, n).round()
    pct_mt = rng.gamma(2, 3, n)
    kept = pct_mt < 20
    cells = pd.DataFrame(
        {
            "n_genes_by_counts": (total**0.8).astype(np.int64),
            "log1p_n_genes_by_counts": np.log1p(total**0.8),
            "total_counts": total,
            "log1p_total_counts": np.log1p(total),
            "total_counts_mt": total * pct_mt / 100,
            "log1p_total_counts_mt": np.log1p(total * pct_mt / 100),
            "pct_counts_mt": pct_mt,
            "passed_qc": kept,
        },
        index=cell_names,
    )
    var = pd.DataFrame(index=[f"GENE{i}" for i in range(N_GENES)])
    genes = pd.DataFrame(
        {
            "total_counts": rng.lognormal(3, 2, N_GENES),
            "means": rng.random(N_GENES),
            "dispersions_norm": rng.normal(size=N_GENES),
            "passed_qc": True,
            "highly_variable": np.arange(N_GENES) < N_HVG,
        },
        index=var.index,
    )
    n_kept = int(kept.sum())
    summary = {
        "n_cells": n,
        "n_genes": N_GENES,
        "n_cells_kept": n_kept,
        "n_genes_kept": N_GENES,
        "n_hvg": N_HVG,
        "thresholds": {"max_pct_mt": 20.0},
        "lost": {"cells": {"max_pct_mt": n - n_kept}, "genes": {}},
        "gene_sets": {"mt": 13},
    }
    variance = np.linspace(50, 1, N_COMPS)
    pca = PCAResult(
        X_pca=rng.standard_normal((n_kept, N_COMPS), dtype=np.float32),
        PCs=rng.random((N_HVG, N_COMPS)),
        variance=variance,
        variance_ratio=variance / 5_000,
        mean=np.zeros(N_HVG),
    )
    return Computed(obs, var, QCResult(cells, genes, summary), pca)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=float, default=1e6, help="number of cells")
    n = int(parser.parse_args().cells)
    found = made_up(n)
    run = {"flow": "f", "name": "n", "state": "completed", "parameters": {}, "stages": {}}
    print(f"{n:,} cells; values made, peak {peak_gb():.1f} GB")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = folder / "made"
        made.mkdir()
        save_qc(found.qc, made)
        parts: dict[str, Callable[[Path], object]] = {
            # What a run does: tables are there already, the rest is written and drawn at once.
            "all": lambda path: write_made(path, run, replace(found, tables=made)),
            "cells.parquet": lambda path: tables.write_table(path, found.qc.cells),
            "results.zarr": lambda path: results.write_results(
                path, found.obs, found.var, found.qc, found.pca
            ),
            "report.html": lambda path: path.write_text(report.render(run, found.view(run))),
        }
        for file, write in parts.items():
            start, used = time.perf_counter(), time.process_time()
            write(folder / file)
            seconds, cpu = time.perf_counter() - start, time.process_time() - used
            print(f"{file}: {seconds:.1f} s, {cpu:.1f} s CPU, peak {peak_gb():.1f} GB")


if __name__ == "__main__":
    main()
