"""One small atlas taken through QC and PCA, for every test of this room."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anndata as ad
import pandas as pd
import pytest

from scgpu_tasks.specs import HVGSpec, PCASpec, QCSpec
from scgpu_tasks.stages.pca import PCAResult, run_pca
from scgpu_tasks.stages.qc import QCResult, run_qc


@dataclass
class Finished:
    """What a run has in hand when it writes its record."""

    obs: pd.DataFrame
    var: pd.DataFrame
    qc: QCResult
    pca: PCAResult


def finish(
    adata: ad.AnnData, qc: QCSpec, *, n_top_genes: int = 100, n_comps: int = 10
) -> Finished:
    counts = adata.X.tocsr()
    found = run_qc(counts, adata.obs, adata.var, qc, HVGSpec(n_top_genes=n_top_genes))
    target = found.summary["target_sum"]
    pca = run_pca(counts, found.cells, found.genes, target, PCASpec(n_comps=n_comps))
    return Finished(adata.obs, adata.var, found, pca)


@pytest.fixture(scope="session")
def atlas(small_store: Path) -> ad.AnnData:
    return ad.read_zarr(small_store)


@pytest.fixture(scope="session")
def finished(atlas: ad.AnnData) -> Finished:
    return finish(atlas, QCSpec(min_genes=60, max_pct_mt=20, min_cells=3))


@pytest.fixture
def run() -> dict[str, Any]:
    stages = {
        "convert": {"state": "skipped", "seconds": 0.0},
        "check": {"state": "computed", "seconds": 0.2},
        "load": {"state": "cached", "seconds": 0.0},
        "qc": {"state": "computed", "seconds": 75.0, "bytes_read": 4_200, "times_stored": 1.0},
        "pca": {"state": "computed", "seconds": 5.0, "bytes_read": 8_400, "times_stored": 2.0},
    }
    return {
        "flow": "atlas-qc",
        "run_id": "0f5c",
        "name": "brave-otter",
        "state": "completed",
        "start": "2026-03-01T08:30:00+01:00",
        "end": "2026-03-01T08:31:21+01:00",
        "seconds": 81.0,
        "parameters": {"store": "/data/atlas.zarr", "batch_key": None, "hvg_flavor": "seurat"},
        "store": {
            "path": "/data/atlas.zarr",
            "fingerprint": "c0ffee",
            "shape": [1500, 800],
            "nnz": 225_000,
            "stored_bytes": 4_200,
        },
        "stages": stages,
        "summary": {},
        "versions": {"python": "3.12.1"},
        "hardware": {"cores": 2, "memory_bytes": 8_000_000_000},
    }


@pytest.fixture
def failed_run(run: dict[str, Any]) -> dict[str, Any]:
    run["state"] = "failed"
    run["stages"]["qc"] = {"state": "failed", "seconds": 1.0}
    run["stages"]["pca"] = {"state": "pending", "seconds": 0.0}
    run["error"] = {
        "stage": "qc",
        "type": "DataError",
        "message": "X holds -1.0 at cell 'c<1>' (row 3), gene 'G&7'",
        "traceback": "Traceback (most recent call last): …",
    }
    return run
