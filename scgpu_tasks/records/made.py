"""What a record is made of: results just computed, or kept from an earlier run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from scgpu_tasks.errors import StoreError
from scgpu_tasks.records import files, pages

if TYPE_CHECKING:
    import pandas as pd

    from scgpu_tasks.stages.pca import PCAResult
    from scgpu_tasks.stages.qc import QCResult

CELLS, GENES, RESULTS = "cells.parquet", "genes.parquet", "results.zarr"
_SHOWN = "shown.json"


class GoneError(StoreError):
    """Kept results were removed while they were being copied."""


class Made(Protocol):
    """Results that a record can be written from."""

    def write(self, folder: Path, run: Mapping[str, Any]) -> None:
        """Write tables and results into a record's folder."""

    def view(self, run: Mapping[str, Any]) -> dict[str, Any]:
        """Return the figures and tables of the report."""


@dataclass
class Computed:
    """Results in memory.

    Parameters
    ----------
    obs, var
        The store's tables, all cells and all genes.
    qc, pca
        What the stages returned.
    tables
        Folder in which cells.parquet and genes.parquet of ``qc`` are written already.
    """

    obs: pd.DataFrame
    var: pd.DataFrame
    qc: QCResult
    pca: PCAResult | None = None
    tables: Path | None = None
    _view: dict[str, Any] | None = field(default=None, init=False, repr=False)

    def write(self, folder: Path, run: Mapping[str, Any]) -> None:
        """Write tables and results into a record's folder."""
        from scgpu_tasks.records.results import write_results
        from scgpu_tasks.records.tables import write_table

        for name, table in ((CELLS, self.qc.cells), (GENES, self.qc.genes)):
            if self.tables is None or not files.copy(self.tables / name, folder / name):
                write_table(folder / name, table)
        flavor = run.get("parameters", {}).get("hvg_flavor", "seurat")
        write_results(
            folder / RESULTS, self.obs, self.var, self.qc, self.pca, hvg_flavor=flavor
        )

    def view(self, run: Mapping[str, Any]) -> dict[str, Any]:
        """Return the figures and tables of the report, drawn once."""
        if self._view is None:
            from scgpu_tasks.records.views import report_view

            batch_key = run["parameters"].get("batch_key")
            self._view = report_view(self.obs, self.qc, self.pca, batch_key=batch_key)
        return self._view

    def keep(self, folder: Path, record: Path, run: Mapping[str, Any]) -> None:
        """Leave for a `Kept` what a record holds and shows.

        Parameters
        ----------
        folder
            Where to.
        record, run
            The record that was written from these results, and its content.
        """
        view = self.view(run)
        shown = {"report": view, "qc": pages.qc_parts(self.qc, view["qc"])}
        if self.pca is not None:
            shown["pca"] = pages.pca_parts(self.pca, view["pca"])
        files.copy(record / RESULTS, folder / RESULTS)
        (folder / _SHOWN).write_text(json.dumps(shown), encoding="utf-8")


@dataclass(frozen=True)
class Kept:
    """What `Computed.keep` left for records of the same content.

    Parameters
    ----------
    folder
        Where it is.
    tables
        Folder that holds cells.parquet and genes.parquet.
    """

    folder: Path
    tables: Path

    def write(self, folder: Path, run: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Copy tables and results into a record's folder.

        Raises
        ------
        GoneError
            Somebody replaced or removed them meanwhile.
        """
        for source, name in (
            (self.tables, CELLS),
            (self.tables, GENES),
            (self.folder, RESULTS),
        ):
            if not files.copy(source / name, folder / name):
                msg = f"{source / name} was removed while it was being copied; run again"
                raise GoneError(msg)

    def view(self, run: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Return the figures and tables of the report."""
        view: dict[str, Any] = self._shown()["report"]
        return view

    def parts(self, stage: str) -> list[pages.Part]:
        """Return what a finished stage puts on the page of its run."""
        parts: list[pages.Part] = self._shown().get(stage, [])
        return parts

    def _shown(self) -> dict[str, Any]:
        try:
            shown: dict[str, Any] = json.loads((self.folder / _SHOWN).read_bytes())
        except FileNotFoundError as error:
            msg = f"{self.folder} was removed while it was being read; run again"
            raise GoneError(msg) from error
        return shown
