"""The steps of the main job as plain functions: convert, check, load, QC, PCA.

Each takes a store and specs, leaves its output in a `WorkDir` folder named by what determines
it, and returns a small JSON-able description. Called again for the same content it hands the
finished folder on; called inside a Dask worker it spreads its blocks over the cluster. The
Prefect tasks in `scgpu_tasks.tasks` add nothing but their names and cache keys.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from scgpu_tasks.errors import FormatError, StoreError
from scgpu_tasks.job.codeversion import code_version
from scgpu_tasks.job.workdir import StageFolder, WorkDir, stage_key
from scgpu_tasks.specs import HVGSpec, PCASpec, QCSpec, Spec

STAGES: tuple[str, ...] = ("convert", "check", "load", "qc", "pca")
"""In the order in which they run."""

_CODE: dict[str, tuple[str, ...]] = {
    "check": ("scgpu_tasks.io.checks",),
    "load": ("scgpu_tasks.io.rows", "scgpu_tasks.job.probe"),
    "qc": (
        "scgpu_tasks.io.rows",
        "scgpu_tasks.io.lazy",
        "scgpu_tasks.stages.qc",
        "scgpu_tasks.job.saved",
    ),
    "pca": ("scgpu_tasks.io.rows", "scgpu_tasks.stages.pca", "scgpu_tasks.job.saved"),
    "record": ("scgpu_tasks.io.lazy", "scgpu_tasks.records.made", "scgpu_tasks.job.saved"),
}

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run on which store; plain values, so that it travels as JSON.

    Parameters
    ----------
    store
        Path of the store.
    fingerprint
        `store_fingerprint` of it when the run began.
    work
        Folder of stage outputs.
    qc, hvg, pca
        Parameters of the stages.
    device
        ``"cpu"`` or ``"gpu"``.
    chunks
        Cells per block, or ``"auto"``.
    """

    store: str
    fingerprint: str
    work: str
    qc: QCSpec
    hvg: HVGSpec
    pca: PCASpec
    device: str = "cpu"
    chunks: int | str = "auto"

    def to_json(self) -> dict[str, Any]:
        """Nested plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Plan:
        """Rebuild a plan from `to_json`, lists where it had tuples included."""
        specs = {"qc": QCSpec, "hvg": HVGSpec, "pca": PCASpec}
        return cls(
            **{n: specs[n](**_tuples(v)) if n in specs else v for n, v in values.items()}
        )

    def specs(self, stage: str) -> tuple[Spec, ...]:
        """Specs that shape a stage's output."""
        return {
            "check": (),
            "load": (self.qc, self.hvg, self.pca),
            "qc": (self.qc, self.hvg),
            "pca": (self.qc, self.hvg, self.pca),
            "record": (self.qc, self.hvg, self.pca),
        }[stage]

    def key(self, stage: str) -> str:
        """Name of a stage's output folder."""
        digests = [spec.digest() for spec in self.specs(stage)]
        device = self.device if stage in ("qc", "pca", "record") else "cpu"
        code = code_version(*_CODE[stage])
        return stage_key(stage, self.fingerprint, digests, code=code, device=device)

    def inputs(self, stage: str) -> dict[str, Any]:
        """Describe what the key was made of."""
        return {
            "store": self.store,
            "fingerprint": self.fingerprint,
            "device": self.device,
            **{type(spec).__name__: spec.to_json() for spec in self.specs(stage)},
        }


def check_step(plan: Plan, *, refresh: bool = False) -> dict[str, Any]:
    """Say what in the store reads fast and what does not; the report is the summary."""

    def compute(_: Path) -> dict[str, Any]:
        from scgpu_tasks.io.checks import check

        return check(plan.store).to_json()

    return _run(plan, "check", compute, refresh=refresh)


def load_step(plan: Plan, *, refresh: bool = False) -> dict[str, Any]:
    """Open the store and refuse, within moments, what the later stages could not do."""

    def compute(_: Path) -> dict[str, Any]:
        from scgpu_tasks.job.probe import probe

        return probe(
            plan.store, plan.qc, plan.hvg, plan.pca, chunks=plan.chunks, device=plan.device
        )

    return _run(plan, "load", compute, refresh=refresh)


def qc_step(
    plan: Plan, *, refresh: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """QC metrics, filters and highly variable genes, in one read of X where possible."""

    def compute(folder: Path) -> dict[str, Any]:
        from scgpu_tasks.io.lazy import read_table
        from scgpu_tasks.job.saved import save_qc
        from scgpu_tasks.stages.qc import run_qc

        # PCA follows on the same workers, and clears away what QC keeps on their GPUs.
        follows = WorkDir(plan.work).find("pca", plan.key("pca")) is None
        result = run_qc(
            _rows(plan),
            lambda: read_table(plan.store, "obs"),
            read_table(plan.store, "var"),
            plan.qc,
            plan.hvg,
            progress=progress,
            keep_blocks=None if follows else False,
        )
        save_qc(result, folder)
        return result.summary

    return _run(plan, "qc", compute, refresh=refresh)


def pca_step(
    plan: Plan, *, refresh: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Principal components of the highly variable genes that `qc_step` chose.

    Raises
    ------
    StoreError
        The QC output is missing; run `qc_step` first.
    """

    def compute(folder: Path) -> dict[str, Any]:
        from scgpu_tasks.job.saved import SCORES, read_qc, save_pca
        from scgpu_tasks.stages.pca import run_pca

        qc = WorkDir(plan.work).read("qc", plan.key("qc"), read_qc)
        if qc is None:
            msg = f"the QC result of {plan.store} is not in {plan.work}; run QC again"
            raise StoreError(msg)
        scratch = folder / "scratch"
        scratch.mkdir()
        result = run_pca(
            _rows(plan),
            qc.cells,
            qc.genes,
            qc.summary["target_sum"],
            plan.pca,
            progress=progress,
            scratch=scratch,
            scores=folder / SCORES,
        )
        shutil.rmtree(scratch)
        save_pca(result, folder)
        return {
            **result.summary,
            "variance_explained": float(result.variance_ratio.sum()),
        }

    return _run(plan, "pca", compute, refresh=refresh)


def require_store(store: str) -> None:
    """Refuse a path at which there is no zarr store, before a cluster is started for it.

    Raises
    ------
    StoreError
        There is nothing.
    FormatError
        It is an h5ad file.
    """
    if "://" not in store and not Path(store).exists():
        msg = f"there is no store at {store}; check the path, or name a --source to convert"
        raise StoreError(msg)
    if store.endswith((".h5ad", ".h5")) and Path(store).is_file():
        msg = (
            f"{store} is an HDF5 file, not a zarr store: run with --source {quote(store)} "
            f"--store {quote(str(Path(store).with_suffix('.zarr')))}, which converts it first"
        )
        raise FormatError(msg)


def require_unchanged(plan: Plan) -> None:
    """Compare the store with the fingerprint that the run began with.

    Raises
    ------
    StoreError
        Somebody wrote to the store meanwhile.
    """
    if fingerprint(plan.store, plan.qc) != plan.fingerprint:
        msg = (
            f"{plan.store} was changed while it was being read, so this stage's numbers may "
            "mix old and new values; they were dropped. Run again when nothing writes to it"
        )
        raise StoreError(msg)


def _run(
    plan: Plan, stage: str, compute: Callable[[Path], dict[str, Any]], *, refresh: bool
) -> dict[str, Any]:
    work, key, start = WorkDir(plan.work), plan.key(stage), time.perf_counter()
    found = None if refresh else work.find(stage, key)
    if found is not None:
        return describe(found, cached=True, seconds=time.perf_counter() - start)
    with work.draft(stage) as draft:
        summary = compute(draft.path)
        require_unchanged(plan)
        publish = draft.replace if refresh else draft.publish
        done = publish(key, inputs=plan.inputs(stage), summary=summary)
    return describe(done, cached=False, seconds=time.perf_counter() - start)


def describe(folder: StageFolder, *, cached: bool, seconds: float) -> dict[str, Any]:
    """Return what a step hands on about its output, JSON-able."""
    return {
        "stage": folder.stage,
        "key": folder.key,
        "path": str(folder.path),
        "cached": cached,
        "seconds": seconds,
        "summary": folder.summary,
    }


def _rows(plan: Plan) -> Any:
    from scgpu_tasks.io.rows import open_rows

    return open_rows(plan.store, layer=plan.qc.layer, chunks=plan.chunks, device=plan.device)


def _elements(qc: QCSpec) -> tuple[str, ...]:
    return (f"layers/{qc.layer}" if qc.layer else "X", "obs", "var")


def fingerprint(store: str, qc: QCSpec) -> str:
    """Fingerprint of what a run with this spec reads of a store."""
    from scgpu_tasks.io.fingerprint import store_fingerprint

    return store_fingerprint(store, _elements(qc))


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
