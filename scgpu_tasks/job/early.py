"""What a run can be refused for within moments, before a server and a cluster are started."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from scgpu_tasks.cluster.plan import plan_cluster, resolve_device
from scgpu_tasks.errors import ParameterError
from scgpu_tasks.job import runlog, steps
from scgpu_tasks.job.conversion import Conversion, may_replace
from scgpu_tasks.job.probe import probe, probe_source
from scgpu_tasks.job.steps import STAGES
from scgpu_tasks.job.workdir import MANIFEST, require_writable
from scgpu_tasks.records import write_record
from scgpu_tasks.specs import HVGSpec, PCASpec, QCSpec


def refuse_early(parameters: Mapping[str, Any]) -> None:
    """Refuse a run that cannot end well, and leave its record.

    Looks at option values, at the metadata of the store or source, and at its first cells.

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
    out = require_writable(parameters["out"], option="out")
    try:
        _look(parameters, work_folder(parameters, out))
    except BaseException as error:
        leave_record(parameters, error)
        raise


def needs_cluster(parameters: Mapping[str, Any]) -> bool:
    """Whether some stage that reads X is not done yet, as far as can be told at a glance.

    Parameters
    ----------
    parameters
        Those of the flow; `refuse_early` has let them pass.
    """
    p = parameters
    if set(refreshed(p["refresh"])) & {"convert", "qc", "pca"}:
        return True
    work, store = work_folder(p, Path(p["out"])), absolute(p["store"])
    if p["source"] is not None:
        job = Conversion(source=absolute(p["source"]), store=store, work=work)
        if job.made() is None:
            return True
    qc, hvg, pca = specs_of(p)
    plan = steps.Plan(
        store=store,
        fingerprint=steps.fingerprint(store, qc),
        work=work,
        qc=qc,
        hvg=hvg,
        pca=pca,
        device=resolve_device(p["device"]),
    )
    # Whether its files are whole the flow finds out, which then starts a cluster itself.
    return not all((Path(work) / s / plan.key(s) / MANIFEST).is_file() for s in ("qc", "pca"))


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


def _look(p: Mapping[str, Any], work: str) -> None:
    refresh = refreshed(p["refresh"])
    specs = specs_of(p)
    device = resolve_device(p["device"])
    if p["chunks"] != "auto" and int(p["chunks"]) < 1:
        msg = f"chunks must be 1 cell or more, or auto, not {p['chunks']}"
        raise ParameterError(msg)
    if p["scheduler"] is None:
        plan_cluster(device, workers=p["workers"])
    store = absolute(p["store"])
    if p["source"] is None:
        steps.require_store(store)
        probe(store, *specs, chunks=p["chunks"])
        return
    job = Conversion(source=absolute(p["source"]), store=store, work=work)
    job.require_source()
    if "convert" not in refresh and job.made() is None:
        may_replace(job)
    probe_source(job.source, *specs)


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
    return path if "://" in path else str(Path(path).absolute())
