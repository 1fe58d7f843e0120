"""The body of the main job's flow: its stages in order, and the record of what they did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scgpu_tasks import tasks
from scgpu_tasks.cluster import flow_cluster, resolve_device
from scgpu_tasks.cluster_plan import plan_cluster
from scgpu_tasks.errors import StoreError
from scgpu_tasks.io.lazy import read_tables
from scgpu_tasks.job import steps
from scgpu_tasks.job.conversion import Conversion
from scgpu_tasks.job.early import absolute, refreshed, specs_of, work_folder
from scgpu_tasks.job.probe import probe_source
from scgpu_tasks.job.progress import ProgressBars
from scgpu_tasks.job.runlog import RunLog, announce
from scgpu_tasks.job.saved import read_pca, read_qc
from scgpu_tasks.job.steps import STAGES, Plan
from scgpu_tasks.job.workdir import WorkDir, require_writable
from scgpu_tasks.records import write_record, write_run
from scgpu_tasks.records.run import fresh_folder, release_room, reserve_room

_OF_A_CONVERSION = (
    "source",
    "source_form",
    "verified",
    "decoded_bytes",
    "stored_bytes",
    "seconds",
    "notes",
)


def main_job(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Run the stages inside a flow run and leave a record, also of a run that fails.

    Parameters
    ----------
    parameters
        Those of the flow.

    Returns
    -------
    The record's content, with its folder under ``record``.

    Raises
    ------
    ScgpuError
        Whatever stopped it; the record says the same.
    """
    run = tasks.current_run()
    out = require_writable(parameters["out"], option="out")
    # A run may be given the name of an earlier one, whose record stays.
    folder = fresh_folder(out, run.folder_name)
    log = RunLog(
        flow=run.flow, run_id=run.id, name=run.name, parameters=parameters, stages=STAGES
    )
    job = _Job(parameters, out, log)
    write_record(folder, log.content)
    announce(folder)
    try:
        reserve_room(folder)
        job.run()
        log.running = "record"
        results = job.results()
        log.end("completed")
        release_room(folder)
        write_record(folder, log.content, **results)
    except BaseException as error:
        log.fail(error)
        _leave_failure(folder, log, error)
        raise
    return {**log.content, "record": str(folder)}


def _leave_failure(folder: Path, log: RunLog, error: BaseException) -> None:
    """Bring the record of a failed run up to date, on a full disk as far as it goes."""
    release_room(folder)
    try:
        write_run(folder, log.content)
        write_record(folder, log.content)
    except OSError as failure:
        error.add_note(f"the record in {folder} may not say so: {failure}")


class _Job:
    def __init__(self, parameters: Mapping[str, Any], out: Path, log: RunLog) -> None:
        self.parameters = parameters
        self.log = log
        self.work = work_folder(parameters, out)
        self.store = absolute(parameters["store"])
        self.bars = ProgressBars()
        self.done: dict[str, dict[str, Any]] = {}

    def run(self) -> None:
        p = self.parameters
        refresh = refreshed(p["refresh"])
        qc, hvg, pca = specs_of(p)
        device = resolve_device(p["device"])
        WorkDir(self.work).clean()
        if p["source"] is None:
            self.log.skip("convert")
            steps.require_store(self.store)
        self._choose_cluster(device)
        with tasks.watch_progress(self.bars.on_event), self.bars:
            if p["source"] is not None:
                with self._stage("convert") as entry:
                    job = Conversion(
                        source=absolute(p["source"]), store=self.store, work=self.work
                    )
                    probe_source(p["source"], qc, hvg, pca)
                    self._note(entry, tasks.run_convert(job, refresh="convert" in refresh))
            with self._stage("check") as entry:
                self.plan = plan = Plan(
                    store=self.store,
                    fingerprint=steps.fingerprint(self.store, qc),
                    work=self.work,
                    qc=qc,
                    hvg=hvg,
                    pca=pca,
                    device=device,
                    chunks=p["chunks"],
                )
                self.log.content["store"] = {
                    "path": self.store,
                    "fingerprint": plan.fingerprint,
                }
                self._note(entry, tasks.run_stage(plan, "check", refresh="check" in refresh))
            for stage in ("load", "qc", "pca"):
                with self._stage(stage) as entry:
                    self._note(entry, tasks.run_stage(plan, stage, refresh=stage in refresh))

    def results(self) -> dict[str, Any]:
        """Tables and results that the record is made of."""
        work, plan = WorkDir(self.work), self.plan
        qc = work.read("qc", plan.key("qc"), read_qc)
        pca = work.read("pca", plan.key("pca"), read_pca)
        if qc is None or pca is None:
            msg = f"finished stages vanished from {self.work} before the record was written"
            raise StoreError(msg)
        obs, var = read_tables(plan.store)
        return {"obs": obs, "var": var, "qc": qc, "pca": pca}

    def _choose_cluster(self, device: str) -> None:
        p = self.parameters
        if p["scheduler"] is None:
            plan = plan_cluster(device, workers=p["workers"])
            self.log.content["cluster"] = plan.to_json()
        else:
            self.log.content["cluster"] = {"scheduler": p["scheduler"]}
        tasks.use_cluster(p["scheduler"], **flow_cluster(device, p["workers"]))

    @contextmanager
    def _stage(self, name: str) -> Iterator[dict[str, Any]]:
        self.bars.begin(name)
        with self.log.stage(name) as entry:
            yield entry
        self.bars.end(name, entry["state"])

    def _note(self, entry: dict[str, Any], result: dict[str, Any]) -> None:
        stage = result["stage"]
        self.done[stage] = result
        if result["cached"]:
            entry["state"] = "cached"
        summary = result["summary"]
        if stage == "convert":
            made = {name: summary[name] for name in _OF_A_CONVERSION if name in summary}
            self.log.content["summary"]["convert"] = made
        if stage == "load":
            for name in ("element", "encoding", "shape", "nnz", "stored_bytes"):
                self.log.content["store"][name] = summary[name]
        if stage in ("qc", "pca"):
            read = 0 if result["cached"] else summary["stored_bytes_read"]
            self.log.count_read(stage, read)
            self.log.content["summary"][stage] = summary
