"""What a run can be refused for within moments, before a server and a cluster are started."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from scgpu_tasks.cluster.plan import plan_cluster, resolve_device
from scgpu_tasks.errors import OutputError, ParameterError, ScgpuError
from scgpu_tasks.job import runlog, steps
from scgpu_tasks.job.conversion import Conversion, may_replace
from scgpu_tasks.job.steps import STAGES
from scgpu_tasks.job.workdir import MANIFEST, require_writable
from scgpu_tasks.records import write_record
from scgpu_tasks.specs import HVGSpec, PCASpec, QCSpec


def refuse_early(parameters: Mapping[str, Any]) -> None:
    """Refuse a run that cannot end well.

    Looks at option values, at the metadata of the store or source, and at its first cells.
    What is wrong with store or source, or with a value for it, leaves a record. A value that
    is wrong for every store leaves none, as an option that does not exist leaves none.

    Parameters
    ----------
    parameters
        Those of the flow.

    Raises
    ------
    OutputError
        The folder for records cannot be written; then there is no record.
    ScgpuError
        As the stages of the run would raise.
    """
    require_writable(parameters["out"], option="out")
    _require_values(parameters)
    try:
        _look(parameters)
    except BaseException as error:
        leave_record(parameters, error)
        raise


def needs_cluster(parameters: Mapping[str, Any]) -> bool:
    """Whether some stage that reads X is not done yet, as far as can be told at a glance.

    Parameters
    ----------
    parameters
        Those of the flow; their values are ones that the stages take.
    """
    if set(refreshed(parameters["refresh"])) & {"convert", "qc", "pca"}:
        return True
    # Whether its files are whole the flow finds out, which then starts a cluster itself.
    return not _are_done(parameters, ("qc", "pca"))


def device_of(parameters: Mapping[str, Any]) -> str:
    """Return the kind of device of a run: cpu, gpu, or auto where its scheduler will tell.

    Parameters
    ----------
    parameters
        Those of the flow. Workers that run already may be on other machines than this one.

    Raises
    ------
    MissingPackageError
        The GPU is to be this machine's, which has none.
    """
    given = str(parameters["device"])
    return given if parameters["scheduler"] is not None else resolve_device(given)


def _are_done(p: Mapping[str, Any], stages: tuple[str, ...]) -> bool:
    """Whether there are outputs of these stages for the store, or source, as it is now."""
    device = device_of(p)
    if device == "auto" or (p["source"] is not None and _conversion(p).made() is None):
        return False
    work, store = work_folder(p, Path(p["out"])), absolute(p["store"])
    qc, hvg, pca = specs_of(p)
    try:
        fingerprint = steps.fingerprint(store, qc)
    except ScgpuError:
        # Whoever opens it says better what is wrong with it.
        return False
    plan = steps.Plan(
        store=store, fingerprint=fingerprint, work=work, qc=qc, hvg=hvg, pca=pca, device=device
    )
    return all((Path(work) / s / plan.key(s) / MANIFEST).is_file() for s in stages)


def _conversion(p: Mapping[str, Any]) -> Conversion:
    work = work_folder(p, Path(p["out"]))
    return Conversion(source=absolute(p["source"]), store=absolute(p["store"]), work=work)


def leave_record(parameters: Mapping[str, Any], error: BaseException) -> None:
    """Leave the record of a run that ended before its flow began, and announce it.

    Raises
    ------
    OutputError
        The folder for records cannot be written.
    """
    out = require_writable(parameters["out"], option="out")
    moment = f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    name = f"{runlog.store_stem(parameters['store'])}-refused-{moment}"
    log = runlog.RunLog(
        flow="atlas-qc", run_id="", name=name, parameters=parameters, stages=STAGES
    )
    log.fail(error)
    write_record(out / name, log.content)
    runlog.announce(out / name)


def _require_values(p: Mapping[str, Any]) -> None:
    refreshed(p["refresh"])
    specs_of(p)
    if p["chunks"] != "auto" and int(p["chunks"]) < 1:
        msg = f"chunks must be 1 cell or more, or auto, not {p['chunks']}"
        raise ParameterError(msg)
    if p["workers"] is not None and p["workers"] < 1:
        msg = f"workers must be at least 1, not {p['workers']}"
        raise ParameterError(msg)


def _look(p: Mapping[str, Any]) -> None:
    refresh, specs = refreshed(p["refresh"]), specs_of(p)
    device = device_of(p)
    store, job = absolute(p["store"]), None
    if p["source"] is None:
        steps.require_store(store)
    else:
        job = _conversion(p)
        job.require_source()
        made = job.made() is not None
        if "convert" not in refresh and not made:
            may_replace(job)
        # One that is there already is only read.
        if "://" not in store and ("convert" in refresh or not made):
            require_parent(Path(store))
    if not refresh and _are_done(p, ("load", "qc", "pca")):
        # The load stage has let the same store and values pass, and nothing is computed.
        return
    if specs[1].flavor == "seurat_v3":
        from scgpu_tasks.stages.hvg import require_loess

        require_loess()
    from scgpu_tasks.job.probe import probe, probe_source

    if p["scheduler"] is None:
        plan_cluster(device, workers=p["workers"])
    if job is None:
        probe(store, *specs, chunks=p["chunks"])
    else:
        probe_source(job.source, *specs)


def require_parent(store: Path) -> None:
    """Refuse a new store where nothing can be written.

    Raises
    ------
    OutputError
        With the option to change.
    """
    parent = next(folder for folder in store.parents if folder.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        why = os.strerror(errno.EACCES)
        msg = f"cannot write to {parent} ({why}); name another store with --store"
        raise OutputError(msg)


def work_folder(parameters: Mapping[str, Any], out: Path) -> str:
    """Folder of finished stages."""
    return str(Path(parameters["work"] or out / ".work").absolute())


def specs_of(parameters: Mapping[str, Any]) -> tuple[QCSpec, HVGSpec, PCASpec]:
    """Specs of the stages from the flow's parameters.

    Raises
    ------
    ParameterError
        A value is out of range.
    """
    p = parameters
    names = ("layer", "min_genes", "max_genes", "min_counts", "max_counts", "max_pct_mt")
    qc = QCSpec(
        **{name: p[name] for name in (*names, "min_cells", "mad")},
        qc_vars=tuple(p["qc_vars"]),
        percent_top=tuple(p["percent_top"]),
        expect_counts=p["counts"],
    )
    hvg = HVGSpec(
        target_sum=p["target_sum"],
        flavor=p["hvg_flavor"],
        n_top_genes=p["n_top_genes"],
        batch_key=p["batch_key"],
    )
    return qc, hvg, PCASpec(n_comps=p["n_comps"])


def refreshed(stage: str | None) -> tuple[str, ...]:
    """Stages to compute again, from this one on.

    Raises
    ------
    ParameterError
        There is no such stage.
    """
    if stage is None:
        return ()
    if stage not in STAGES:
        msg = f"refresh names a stage, one of {', '.join(STAGES)}, not {stage!r}"
        raise ParameterError(msg)
    return STAGES[STAGES.index(stage) :]


def absolute(path: str) -> str:
    """Return a URL as it is, and the absolute path of anything else."""
    if "://" in path:
        return path
    full = Path(path).absolute()
    # Behind a link, only the file system knows where ".." leads.
    return str(full.resolve() if ".." in full.parts else full)
