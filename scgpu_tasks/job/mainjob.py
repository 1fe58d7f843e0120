"""The body of the main job's flow: its stages in order, and the record of what they did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scgpu_tasks import flowrun, tasks
from scgpu_tasks.cluster.plan import plan_cluster
from scgpu_tasks.cluster.start import flow_cluster
from scgpu_tasks.errors import ClusterError, StoreError
from scgpu_tasks.job import steps
from scgpu_tasks.job.conversion import Conversion
from scgpu_tasks.job.early import (
    absolute,
    device_of,
    needs_cluster,
    refreshed,
    specs_of,
    work_folder,
)
from scgpu_tasks.job.kept import find_kept, keep, made_of
from scgpu_tasks.job.living import marked, sweep
from scgpu_tasks.job.monitor import Monitor, shows, stage_words
from scgpu_tasks.job.progress import ProgressBars
from scgpu_tasks.job.runlog import RunLog, announce, store_stem
from scgpu_tasks.job.steps import STAGES, Plan
from scgpu_tasks.job.workdir import WorkDir, require_writable
from scgpu_tasks.records import words, write_made, write_record, write_run
from scgpu_tasks.records.made import GoneError
from scgpu_tasks.records.pages import run_page
from scgpu_tasks.records.report import state_message
from scgpu_tasks.records.run import fresh_folder, release_room, reserve_room

if TYPE_CHECKING:
    from scgpu_tasks.records.made import Computed, Kept

_OF_A_CONVERSION = (
    "source",
    "source_form",
    "verified",
    "decoded_bytes",
    "stored_bytes",
    "seconds",
    "notes",
)


def main_job(parameters: Mapping[str, Any]) -> Any:
    """Run the stages inside a flow run and leave a record, also of a run that fails.

    Parameters
    ----------
    parameters
        Those of the flow.

    Returns
    -------
    The record's content, with its folder under ``record``. After an error of the run, which
    its record tells, a failed state of Prefect's that names stage, place and remedy; the flow
    raises the error.

    Raises
    ------
    OutputError
        The folder for records cannot be written.
    """
    run = flowrun.current_run()
    out = require_writable(parameters["out"], option="out")
    # A run may be given the name of an earlier one, whose record stays.
    folder = fresh_folder(out, run.folder_name)
    log = RunLog(
        flow=run.flow, run_id=run.id, name=run.name, parameters=parameters, stages=STAGES
    )
    write_record(folder, log.content)
    announce(folder)
    page = flowrun.RunPage(parameters["store"]) if flowrun.attended() else None
    with marked(folder):
        _mark_killed(out)
        monitor = Monitor(page, ProgressBars())
        try:
            with ExitStack() as held, flowrun.cancelled_by_server(), monitor:
                _complete(_Job(parameters, out, folder, log, monitor, held), page)
        except BaseException as error:
            log.fail(error, after=monitor.where())
            _leave_failure(folder, log, error)
            if page is not None:
                page.log(f"record: {folder}/report.html")
            if not isinstance(error, Exception):
                raise
            return flowrun.failed(state_message(log.content), error)
    return {**log.content, "record": str(folder)}


def _complete(job: _Job, page: flowrun.RunPage | None) -> None:
    """Run the stages and write the record of what they found."""
    reserve_room(job.folder)
    job.begin()
    if page is not None:
        page.tag(f"store:{store_stem(job.store)}", f"device:{job.device}")
    job.run()
    job.log.running = "record"
    if not job.copy_record():
        results = job.results()
        if results is None:
            # Somebody removed finished stages meanwhile; those that are there are taken over.
            job.run()
            job.log.running = "record"
            results = job.results()
        if results is None:
            msg = f"finished stages vanish from {job.work} before the record is written"
            raise StoreError(msg)
        job.write_record(results)
    if page is not None:
        page.log(f"record: {job.folder}/report.html")
        text = run_page(job.log.content, str(job.folder))
        job.monitor.show("summary", lambda page: page.markdown("summary", text, "Summary"))


def _mark_killed(out: Path) -> None:
    """Bring records of killed runs up to date, and their runs on the server."""
    for run in sweep(out):
        if run.get("run_id"):
            flowrun.crashed(run["run_id"], run["error"]["message"])


def _leave_failure(folder: Path, log: RunLog, error: BaseException) -> None:
    """Bring the record of a failed run up to date, on a full disk as far as it goes."""
    release_room(folder)
    try:
        write_run(folder, log.content)
        write_record(folder, log.content)
    except OSError as failure:
        error.add_note(f"the record in {folder} may not say so: {failure}")


class _Job:
    def __init__(
        self,
        parameters: Mapping[str, Any],
        out: Path,
        folder: Path,
        log: RunLog,
        monitor: Monitor,
        held: ExitStack,
    ) -> None:
        self.parameters = parameters
        self.folder = folder
        self.log = log
        self.monitor = monitor
        self.held = held
        self.work = work_folder(parameters, out)
        self.device = ""
        self.store = absolute(parameters["store"])
        self.kept: Kept | None = None

    def begin(self) -> None:
        """Find out on what the run goes, before any stage: what is wrong is said at once."""
        p = self.parameters
        WorkDir(self.work).clean()
        if p["source"] is None:
            self.log.skip("convert")
            steps.require_store(self.store)
        self.device = device_of(p)
        if needs_cluster(p):
            chosen = self._choose_cluster()
            tasks.use_cluster(lambda: chosen)
        else:
            tasks.use_cluster(self._choose_cluster)

    def run(self) -> None:
        """Run the stages."""
        p = self.parameters
        refresh = refreshed(p["refresh"])
        qc, hvg, pca = specs_of(p)
        with tasks.watch_progress(self.monitor.on_event):
            if p["source"] is not None:
                with self._stage("convert") as entry:
                    job = Conversion(
                        source=absolute(p["source"]),
                        store=self.store,
                        work=self.work,
                        device="cpu" if self.device == "cpu" else "auto",
                    )
                    if job.made() is None:
                        from scgpu_tasks.job.probe import probe_source

                        probe_source(p["source"], qc, hvg, pca)
                    self.held.enter_context(WorkDir(self.work).hold([job.key()]))
                    self._note(entry, tasks.run_convert(job, refresh="convert" in refresh))
            with self._stage("check") as entry:
                self.plan = plan = Plan(
                    store=self.store,
                    fingerprint=steps.fingerprint(self.store, qc),
                    work=self.work,
                    qc=qc,
                    hvg=hvg,
                    pca=pca,
                    device=self.device,
                    chunks=p["chunks"],
                )
                keys = [plan.key(s) for s in ("check", "load", "qc", "pca", "record")]
                self.held.enter_context(WorkDir(self.work).hold(keys))
                self.kept = None if refresh else find_kept(plan)
                self.log.content["store"] = {
                    "path": self.store,
                    "fingerprint": plan.fingerprint,
                }
                self._note(entry, tasks.run_stage(plan, "check", refresh="check" in refresh))
            for stage in ("load", "qc", "pca"):
                with self._stage(stage) as entry:
                    self._note(entry, tasks.run_stage(plan, stage, refresh=stage in refresh))

    def copy_record(self) -> bool:
        """Write the record from what an earlier run kept; tells whether that was there."""
        stages = self.log.content["stages"]
        if self.kept is None or any(stages[s]["state"] != "cached" for s in ("qc", "pca")):
            return False
        steps.require_unchanged(self.plan)
        try:
            self._write(self.kept)
        except GoneError:
            self.kept = None
            return False
        return True

    def results(self) -> Computed | None:
        """Tables and results that the record is made of; None where they are gone."""
        from scgpu_tasks.io.lazy import read_tables
        from scgpu_tasks.job.saved import read_pca, read_qc
        from scgpu_tasks.records.made import Computed

        work, plan = WorkDir(self.work), self.plan
        self.made_of = made_of(plan)
        qc = work.read("qc", plan.key("qc"), read_qc)
        pca = work.read("pca", plan.key("pca"), read_pca)
        if qc is None or pca is None:
            return None
        obs, var = read_tables(plan.store)
        # Metrics and scores are of the cells that the stages read.
        steps.require_unchanged(plan)
        return Computed(obs, var, qc, pca, Path(self.work) / "qc" / plan.key("qc"))

    def write_record(self, results: Computed) -> None:
        """Write the record, and keep what it is made of."""
        self._write(results)
        keep(self.plan, self.made_of, results, self.folder, self.log.content)

    def _write(self, made: Computed | Kept) -> None:
        self.log.end("completed")
        release_room(self.folder)
        write_made(self.folder, self.log.content, made)

    def _choose_cluster(self) -> dict[str, Any]:
        """Plan or find the cluster, note it, and return the runner's arguments."""
        p = self.parameters
        if p["scheduler"] is None:
            plan = plan_cluster(self.device, workers=p["workers"])
            self.log.content["cluster"] = plan.to_json()
            return tasks.own_cluster(**flow_cluster(self.device, p["workers"]))
        self.log.content["cluster"] = {"scheduler": p["scheduler"]}
        arguments, found = tasks.running_cluster(p["scheduler"])
        self.log.content["cluster"] |= found
        if self.device == "auto":
            self.device = found["device"]
        elif self.device == "gpu" and found["device"] != "gpu":
            msg = (
                f"device is gpu, but the workers at {p['scheduler']} see no GPU; start them on "
                "GPUs, or use --device cpu"
            )
            raise ClusterError(msg)
        return arguments

    @contextmanager
    def _stage(self, name: str) -> Iterator[dict[str, Any]]:
        self.monitor.begin(name)
        with self.log.stage(name) as entry:
            # Should the process be killed, the record says in which stage.
            write_run(self.folder, self.log.content)
            yield entry
        text = stage_words(name, self._summary)
        how = "" if entry["state"] == "cached" else f" in {words.duration(entry['seconds'])}"
        self.monitor.end(name, entry["state"], f"{entry['state']}{how}: {text}")

    def _note(self, entry: dict[str, Any], result: dict[str, Any]) -> None:
        stage, summary = result["stage"], result["summary"]
        self._summary = summary
        if result["cached"]:
            entry["state"] = "cached"
        if result.get("workers_lost"):
            entry["workers_lost"] = result["workers_lost"]
        parts = self.kept.parts if self.kept is not None and result["cached"] else None
        for name, draw in shows(stage, Path(result["path"]), summary, parts):
            self.monitor.show(name, draw)
        if stage == "convert":
            made = {name: summary[name] for name in _OF_A_CONVERSION if name in summary}
            self.log.content["summary"]["convert"] = made
        if stage == "load":
            for name in ("element", "encoding", "shape", "nnz", "stored_bytes"):
                self.log.content["store"][name] = summary[name]
            self.monitor.cells_per_block = summary["shape"][0] / max(summary["n_blocks"], 1)
        if stage in ("qc", "pca"):
            read = 0 if result["cached"] else summary["stored_bytes_read"]
            self.log.count_read(stage, read)
            self.log.content["summary"][stage] = summary
