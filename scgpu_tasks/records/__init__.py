"""What a run leaves behind: run.json, tables, results.zarr, report.html."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scgpu_tasks.errors import OutputError, ScgpuError
from scgpu_tasks.records.made import CELLS, GENES, RESULTS, Computed, Made
from scgpu_tasks.records.report import render
from scgpu_tasks.records.run import Run, make_folder, read_run, write_run, write_text_atomic

if TYPE_CHECKING:
    import pandas as pd

    from scgpu_tasks.stages.pca import PCAResult
    from scgpu_tasks.stages.qc import QCResult

__all__ = ["Run", "read_run", "write_record", "write_run"]


def write_record(
    folder: str | Path,
    run: Run | Mapping[str, Any],
    *,
    obs: pd.DataFrame | None = None,
    var: pd.DataFrame | None = None,
    qc: QCResult | None = None,
    pca: PCAResult | None = None,
    tables: Path | None = None,
) -> Path:
    """Write a run's record, or bring the one that is there up to date.

    Each file appears in one step, and run.json last: where it says ``completed``, the rest is
    complete. Where one cannot be written, none of the results is left.

    Parameters
    ----------
    folder
        The record's folder; made if missing.
    run
        Content of run.json, see `Run`. A run that has only begun, or failed, leaves run.json
        and report.html alone.
    obs, var
        The store's tables, all cells and all genes; needed with ``qc``.
    qc, pca
        What the stages returned. With ``qc`` the record holds cells.parquet, genes.parquet and
        results.zarr.
    tables
        Folder in which cells.parquet and genes.parquet of ``qc`` are written already.

    Returns
    -------
    Path of report.html.

    Raises
    ------
    OutputError
        The folder cannot be written, or the disk is full.
    """
    made: Made | None = None
    if qc is not None:
        if obs is None or var is None:
            msg = "a record of QC needs the store's obs and var"
            raise TypeError(msg)
        made = Computed(obs, var, qc, pca, tables)
    return write_made(folder, run, made)


def write_made(
    folder: str | Path, run: Run | Mapping[str, Any], made: Made | None = None
) -> Path:
    """Write a record as `write_record` does, of results that may be kept ones.

    Parameters
    ----------
    folder, run
        As for `write_record`.
    made
        What tables, results.zarr and report are written from.

    Returns
    -------
    Path of report.html.

    Raises
    ------
    OutputError
        The folder cannot be written, or the disk is full.
    """
    folder = make_folder(Path(folder))
    report = folder / "report.html"
    try:
        if made is None:
            page = render(run)
        else:
            with ThreadPoolExecutor(1, thread_name_prefix="scgpu-results") as pool:
                # One compresses and writes, the other draws.
                written = pool.submit(made.write, folder, run)
                page = render(run, made.view(run))
                written.result()
        write_text_atomic(report, page)
        write_run(folder, run)
    except BaseException as error:
        if made is not None:
            # Some of the results would pass for all of them, and take the room of run.json.
            _remove_results(folder)
        if isinstance(error, ScgpuError) or not isinstance(error, OSError):
            raise
        msg = (
            f"the run record cannot be written to {folder}: {error.strerror or error}. "
            "Make room on the disk, or choose another folder with --out."
        )
        raise OutputError(msg) from error
    return report


def _remove_results(folder: Path) -> None:
    for name in (CELLS, GENES):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / RESULTS, ignore_errors=True)
