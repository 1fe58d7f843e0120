"""The main job as a Prefect flow: convert, check, load, QC, PCA of one store.

Run it from a shell with ``python flows/qc_pca.py --store atlas.zarr``, or deploy
``flows/qc_pca.py:atlas_qc``. Worker processes of a cluster that a script starts import the
script again, so nothing slow is imported at the top, and the function becomes a flow only where
this file is imported by somebody else. Its docstring has the form that Prefect's forms read.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

from scgpu_tasks.operate.form import AtLeast, OneOf


def atlas_qc(
    store: str,
    source: str | None = None,
    out: str = "runs",
    device: Annotated[str, OneOf("auto", "cpu", "gpu")] = "auto",
    workers: Annotated[int, AtLeast(1)] | None = None,
    scheduler: str | None = None,
    chunks: int | str = "auto",
    layer: str | None = None,
    counts: bool = True,
    min_genes: int | None = 200,
    max_genes: int | None = None,
    min_counts: float | None = None,
    max_counts: float | None = None,
    max_pct_mt: float | None = 20.0,
    min_cells: int | None = 3,
    mad: bool = False,
    qc_vars: tuple[str, ...] = ("mt",),
    percent_top: tuple[int, ...] = (),
    target_sum: float | None = 1e4,
    hvg_flavor: Annotated[str, OneOf("seurat", "cell_ranger", "seurat_v3")] = "seurat",
    n_top_genes: Annotated[int, AtLeast(1)] | None = 2000,
    batch_key: str | None = None,
    n_comps: Annotated[int, AtLeast(1)] = 50,
    refresh: Annotated[str, OneOf("convert", "check", "load", "qc", "pca")] | None = None,
    work: str | None = None,
) -> dict[str, Any]:
    """Quality control, highly variable genes and PCA of a single-cell atlas.

    Returns the content of the run's run.json, with the record's folder under ``record``.

    Args:
        store: AnnData zarr store to work on.
        source: Convert this (h5ad or zarr) into the store first.
        out: Folder for run records; each run makes a folder named after it.
        device: auto, cpu or gpu.
        workers: Worker processes of the cluster; by default what suits the machine.
        scheduler: Address of a Dask scheduler that already runs.
        chunks: Cells per block, or auto.
        layer: Layer that holds the counts; by default X.
        counts: Insist on counts: whole numbers, 0 or more.
        min_genes: Least number of genes with counts in a cell.
        max_genes: Greatest number of genes with counts in a cell.
        min_counts: Least total counts of a cell.
        max_counts: Greatest total counts of a cell.
        max_pct_mt: Greatest percentage of mitochondrial counts of a cell.
        min_cells: Least number of kept cells that have a gene.
        mad: Remove cells by median absolute deviations; the fixed thresholds of cells above are
            then not used.
        qc_vars: Gene sets to report on: mt, ribo, hb, or a boolean column of var.
        percent_top: Report the percentage of counts in this many top genes.
        target_sum: Counts per cell after normalisation; empty for the median.
        hvg_flavor: seurat, cell_ranger or seurat_v3.
        n_top_genes: Number of highly variable genes; empty to choose by cutoffs.
        batch_key: Column of obs; highly variable genes are chosen within each batch.
        n_comps: Number of principal components.
        refresh: Recompute this stage and all after it: convert, check, load, qc or pca.
        work: Folder for finished stages, reused by later runs; by default .work inside out.
    """
    parameters = dict(locals())
    from scgpu_tasks.job.mainjob import main_job

    return main_job(parameters)


def make_flow() -> Any:
    """Prefect flow of `atlas_qc`."""
    from prefect import flow

    from scgpu_tasks.flowrun import run_name
    from scgpu_tasks.tasks import StageRunner

    return flow(
        name="atlas-qc", flow_run_name=run_name, task_runner=StageRunner(), log_prints=False
    )(atlas_qc)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    from scgpu_tasks.cluster.start import flow_cluster
    from scgpu_tasks.job.commandline import parse_qc_pca, run_flow, show_record

    def cluster() -> dict[str, Any] | None:
        from scgpu_tasks.job.early import needs_cluster

        if options["scheduler"] is not None or not needs_cluster(options):
            return None
        return flow_cluster(options["device"], options["workers"])

    def refuse(parameters: Mapping[str, Any]) -> None:
        from scgpu_tasks.job.early import refuse_early

        refuse_early(parameters)

    options = parse_qc_pca(arguments)
    return run_flow(make_flow, options, show_record, cluster, refuse)


if __name__ == "__main__":
    sys.exit(main())
elif __name__ != "__mp_main__":
    atlas_qc = make_flow()
