"""GPU, CPU and scanpy on a store of a million cells: the same numbers.

    python -m tests.gpu.parity_run STORE [--chunks auto 7000 30000 80000 200000] [--gpus 1 2]

STORE is made by
``tests.benchmarks.make_gpu_atlas STORE --n-obs 1000000 --genes-per-cell 1000``.
scanpy works in float64 in a process of its own, with the whole matrix in memory (some 60 GB),
while the GPUs and then the CPU run here. Every comparison is printed; the exit status is 1 if
one is beyond its tolerance.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

N_HVG, N_COMPS = 2000, 50
EXACT = ("n_genes_by_counts", "total_counts", "n_cells_by_counts")
# scanpy keeps dispersions_norm as float32.
TOLERANCE = {
    "dispersions_norm": 1e-6,
    "moments": 1e-9,
    "variance": 1e-6,
    "loadings": 1e-5,
    "X_pca": 1e-3,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", type=Path)
    parser.add_argument(
        "--chunks", nargs="+", default=["auto", "7000", "30000", "80000", "200000"]
    )
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--no-scanpy", action="store_true")
    args = parser.parse_args()
    context = mp.get_context("spawn")
    answer, answered = context.Pipe(duplex=False)
    other = context.Process(target=run_scanpy, args=(args.store, answered))
    if not args.no_scanpy:
        other.start()
    runs: dict[str, dict[str, Any]] = {}
    for gpus in args.gpus:
        for chunks in args.chunks if gpus == args.gpus[-1] else args.chunks[:1]:
            runs[f"GPU x{gpus}, chunks {chunks}"] = ours(args.store, "gpu", gpus, chunks)
    runs["CPU"] = ours(args.store, "cpu", None, "auto")
    first, *rest = runs
    wrong = [w for name in rest for w in compare(first, runs[first], name, runs[name])]
    if not args.no_scanpy:
        # Never for ever: a process that was killed sends nothing.
        if not answer.poll(400):
            raise SystemExit("scanpy did not answer")
        wrong += compare(first, runs[first], "scanpy", answer.recv())
        other.join()
    print("\n".join(["", "WRONG:", *wrong]) if wrong else "\nall within tolerance", flush=True)
    sys.exit(bool(wrong))


def ours(store: Path, device: str, gpus: int | None, chunks: str) -> dict[str, Any]:
    from anndata.io import read_elem
    from zarr import open_group

    from scgpu_tasks.cluster import start_cluster
    from scgpu_tasks.io.rows import open_rows
    from scgpu_tasks.specs import HVGSpec, PCASpec, QCSpec
    from scgpu_tasks.stages.pca import run_pca
    from scgpu_tasks.stages.qc import run_qc

    group = open_group(store, mode="r")
    obs, var = (read_elem(group[name])[[]] for name in ("obs", "var"))
    with start_cluster(device=device, **({"workers": gpus} if gpus else {})):
        size: Any = chunks if chunks == "auto" else int(chunks)
        rows = open_rows(store, device=device, chunks=size)
        started = time.perf_counter()
        qc = run_qc(rows, obs, var, QCSpec(), HVGSpec(n_top_genes=N_HVG))
        pca = run_pca(
            rows, qc.cells, qc.genes, qc.summary["target_sum"], PCASpec(n_comps=N_COMPS)
        )
        print(
            f"{device} {gpus} chunks {chunks}: {rows.n_blocks} blocks, "
            f"{time.perf_counter() - started:.1f} s",
            flush=True,
        )
    return {
        "cells": qc.cells,
        "genes": qc.genes,
        "variance": np.asarray(pca.variance),
        "PCs": np.asarray(pca.PCs),
        "X_pca": np.asarray(pca.X_pca),
    }


def run_scanpy(store: Path, answered: Any) -> None:
    import anndata as ad
    import scanpy as sc

    warnings.simplefilter("ignore")
    started = time.perf_counter()
    adata = ad.read_zarr(store)
    adata.X.indices = adata.X.indices.astype(np.int32)
    adata.X.indptr = adata.X.indptr.astype(np.int32)
    adata.X = adata.X.astype(np.float64)
    adata.var["mt"] = adata.var_names.str.upper().str.startswith("MT-")
    sc.pp.calculate_qc_metrics(
        adata, qc_vars=["mt"], percent_top=None, log1p=True, inplace=True
    )
    cells, genes = adata.obs.copy(), adata.var.copy()
    keep = (cells["n_genes_by_counts"] >= 200) & ~(cells["pct_counts_mt"] > 20)
    cells["passed_qc"] = keep
    kept = adata[keep.to_numpy()].copy()
    del adata
    passed, _ = sc.pp.filter_genes(kept.X, min_cells=3, inplace=False)
    genes["passed_qc"] = passed
    sc.pp.normalize_total(kept, target_sum=1e4)
    sc.pp.log1p(kept)
    kept = kept[:, passed].copy()
    sc.pp.highly_variable_genes(kept, n_top_genes=N_HVG)
    for column in ("means", "dispersions", "dispersions_norm"):
        genes[column] = kept.var[column].reindex(genes.index)
    chosen = kept.var["highly_variable"].reindex(genes.index)
    genes["highly_variable"] = chosen.fillna(value=False).astype(bool)
    dense = ad.AnnData(kept[:, kept.var["highly_variable"]].X.toarray())
    sc.pp.pca(dense, n_comps=N_COMPS, svd_solver="covariance_eigh")
    print(f"scanpy: {time.perf_counter() - started:.0f} s", flush=True)
    answered.send(
        {
            "cells": cells,
            "genes": genes,
            "variance": dense.uns["pca"]["variance"],
            "PCs": dense.varm["PCs"],
            "X_pca": dense.obsm["X_pca"].astype(np.float32),
        }
    )


def compare(a: str, mine: dict[str, Any], b: str, theirs: dict[str, Any]) -> list[str]:
    """Print the largest differences of two runs; return those beyond their tolerance."""
    found: dict[str, float] = {}
    exact: dict[str, bool] = {}
    for table in ("cells", "genes"):
        for column in theirs[table].columns.intersection(mine[table].columns):
            x, y = (run[table][column] for run in (mine, theirs))
            if column in EXACT or x.dtype == bool:
                exact[column + f" of {table}"] = bool(np.array_equal(x, y))
            elif column in ("means", "dispersions", "dispersions_norm"):
                found[column] = largest(x, y, each=column == "means")
    gaps = separated(mine["variance"])
    if exact["highly_variable of genes"]:
        found["variance"] = largest(mine["variance"], theirs["variance"])
        cosines = np.abs((mine["PCs"] * theirs["PCs"]).sum(axis=0))
        found["loadings"] = float((1 - cosines[gaps]).max())
        signs = np.sign((mine["PCs"] * theirs["PCs"]).sum(axis=0))
        off = np.abs(mine["X_pca"] - theirs["X_pca"] * signs)[:, gaps].max(axis=0)
        found["X_pca"] = float((off / np.abs(mine["X_pca"][:, gaps]).max(axis=0)).max())
    print(f"\n{a} against {b}: {int(gaps.sum())} separated components")
    print("  exactly equal:", ", ".join(k for k, v in exact.items() if v))
    print("  largest differences:", ", ".join(f"{k} {v:.1e}" for k, v in found.items()))
    wrong = [f"{b}: {name} differ" for name, same in exact.items() if not same]
    for name, value in found.items():
        if not value <= TOLERANCE.get(name, TOLERANCE["moments"]):
            wrong.append(f"{b}: {name} differ by {value:.1e}")
    return wrong


def largest(x: Any, y: Any, *, each: bool = False) -> float:
    """Largest difference, relative to each value of the first column or to its largest."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    both = ~(pd.isna(x) | pd.isna(y))
    if not both.any():
        return float("nan")
    scale = np.maximum(np.abs(x[both]), 1e-300) if each else np.abs(x[both]).max()
    return float((np.abs(x - y)[both] / scale).max())


def separated(variance: np.ndarray) -> np.ndarray:
    """Components whose variance is at least 0.1 % from those of their neighbours."""
    gap = np.abs(np.diff(variance)) / variance[:-1]
    return (np.append(gap, np.inf) > 1e-3) & (np.insert(gap, 0, np.inf) > 1e-3)


if __name__ == "__main__":
    main()
