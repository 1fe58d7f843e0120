"""The steps of the main job as Prefect tasks.

Thin: each names a function of `scgpu_tasks.job.steps`, takes and returns plain JSON, and is
cached under the key of the stage folder that holds its output. A folder is the truth; Prefect's
cache entry only saves running the task to find out that the folder is there.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import runtime, task
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import CachePolicy
from prefect.context import FlowRunContext, TaskRunContext
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_API_URL
from prefect.states import State
from prefect.task_runners import TaskRunner

from scgpu_tasks.cluster import cluster_facts, connect, lost_workers, require_reach
from scgpu_tasks.errors import ClusterError
from scgpu_tasks.flowrun import stage_run_name
from scgpu_tasks.job import steps
from scgpu_tasks.job.conversion import Conversion, convert_step
from scgpu_tasks.job.progress import worker_progress
from scgpu_tasks.job.steps import Plan
from scgpu_tasks.job.workdir import WorkDir

if TYPE_CHECKING:
    from prefect_dask import DaskTaskRunner

RESULT_LAYOUT = 1
"""Version of what tasks return; part of every cache key."""


@dataclass
class StageFolderKey(CachePolicy):
    """Cache key of a task: its stage folder's key and where that folder is.

    Parameters
    ----------
    stage
        Name of the stage.
    """

    stage: str = ""

    def compute_key(
        self,
        task_ctx: TaskRunContext,  # noqa: ARG002
        inputs: dict[str, Any],
        flow_parameters: dict[str, Any],  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> str | None:
        """Return the key; equal in every process and on every machine."""
        plan: Plan | Conversion
        if self.stage == "convert":
            plan = Conversion.from_json(inputs["job"])
            key = plan.key()
        else:
            plan = Plan.from_json(inputs["plan"])
            key = plan.key(self.stage)
        place = hashlib.sha256(plan.work.encode()).hexdigest()[:12]
        return f"scgpu-{RESULT_LAYOUT}-{self.stage}-{key}-{place}"


def _stage_task(stage: str) -> Callable[[Callable[..., Any]], Any]:
    return task(
        name=stage,
        task_run_name=stage_run_name,
        cache_policy=StageFolderKey(stage=stage),
        persist_result=True,
        result_serializer="json",
    )


@_stage_task("convert")
def convert(job: dict[str, Any], refresh: bool = False) -> dict[str, Any]:
    """Convert a source into the store."""
    return convert_step(
        Conversion.from_json(job),
        refresh=refresh,
        progress=worker_progress(_topic(), "convert"),
    )


@_stage_task("check")
def check(plan: dict[str, Any], refresh: bool = False) -> dict[str, Any]:
    """Report on how fast the store can be read."""
    return steps.check_step(Plan.from_json(plan), refresh=refresh)


@_stage_task("load")
def load(plan: dict[str, Any], refresh: bool = False) -> dict[str, Any]:
    """Open the store and refuse what the later stages could not do with it."""
    return steps.load_step(Plan.from_json(plan), refresh=refresh)


@_stage_task("qc")
def qc(plan: dict[str, Any], refresh: bool = False) -> dict[str, Any]:
    """QC metrics, filters and highly variable genes."""
    return steps.qc_step(
        Plan.from_json(plan), refresh=refresh, progress=worker_progress(_topic(), "qc")
    )


@_stage_task("pca")
def pca(plan: dict[str, Any], refresh: bool = False) -> dict[str, Any]:
    """Principal components of the highly variable genes."""
    return steps.pca_step(
        Plan.from_json(plan), refresh=refresh, progress=worker_progress(_topic(), "pca")
    )


TASKS = {"check": check, "load": load, "qc": qc, "pca": pca}


def run_stage(plan: Plan, stage: str, *, refresh: bool = False) -> dict[str, Any]:
    """Run a stage's task and wait for it.

    Stages that read X, or look at GPUs that this process lacks, run on the flow's cluster,
    unless their output is there already.

    Parameters
    ----------
    plan
        What to run.
    stage
        One of check, load, qc, pca.
    refresh
        Compute it even where a finished output is there.

    Returns
    -------
    The step's description, with ``cached`` as it was in this run.
    """
    intact = not refresh and WorkDir(plan.work).find(stage, plan.key(stage)) is not None
    here = intact or stage == "check" or (stage == "load" and _reaches(plan.device))
    return _run(TASKS[stage], here=here, intact=intact, plan=plan.to_json(), refresh=refresh)


def _reaches(device: str) -> bool:
    if device != "gpu":
        return True
    from scgpu_tasks.io.lazy import can_use_gpu

    return can_use_gpu()


def run_convert(job: Conversion, *, refresh: bool = False) -> dict[str, Any]:
    """Run the convert task and wait for it; as `run_stage`."""
    intact = not refresh and job.made() is not None
    return _run(convert, here=intact, intact=intact, job=job.to_json(), refresh=refresh)


def _run(stage_task: Any, *, here: bool, intact: bool, **arguments: Any) -> dict[str, Any]:
    # Prefect's cache knows a path, and nothing of the files behind it.
    chosen = stage_task.with_options(refresh_cache=not intact)
    if here:
        state = chosen(**arguments, return_state=True)
        result: dict[str, Any] = state.result()
    else:
        listener = _listener.get()
        if listener is not None:
            listener.begin()
        begun = time.time()
        result, state = _wait(chosen.submit(**arguments), stage_task.name)
        runner = _stage_runner()
        lost = [] if runner is None else lost_workers(runner.dask.client, begun)
        if lost:
            result = {**result, "workers_lost": lost}
    if state.name == "Cached":
        result = {**result, "cached": True, "seconds": 0.0}
    return result


def _wait(future: PrefectFuture[Any], stage: str) -> tuple[dict[str, Any], State[Any]]:
    from distributed import KilledWorker
    from prefect_dask.task_runners import PrefectDaskFuture

    try:
        return future.result(), future.state
    except KilledWorker as error:
        msg = (
            f"stage {stage} was given up: the Dask worker that ran it died, again and again. "
            "Most often that is the memory: ask for smaller --chunks, or for fewer --workers, "
            f"which then have more each. Dask says: {error}"
        )
        raise ClusterError(msg) from error
    except BaseException:
        # A cluster that was there before, and stays, would go on with it.
        if isinstance(future, PrefectDaskFuture):
            future.wrapped_future.cancel(force=True)
        raise


class StageRunner(TaskRunner[PrefectFuture[Any]]):
    """Prefect's Dask runner, made for the first task that is submitted to it.

    A run whose stages are all finished submits none, and then needs no part of Dask.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stack = ExitStack()
        self._dask: DaskTaskRunner | None = None
        self._choose: Callable[[], dict[str, Any]] = dict

    def duplicate(self) -> StageRunner:
        """Return a runner for one more run of the flow."""
        return StageRunner()

    def use(self, choose: Callable[[], dict[str, Any]]) -> None:
        """Take the arguments of `DaskTaskRunner` from a function once they are needed."""
        self._choose = choose

    @property
    def dask(self) -> DaskTaskRunner:
        """The runner behind this one."""
        if self._dask is None:
            from prefect_dask import DaskTaskRunner

            self._dask = self._stack.enter_context(DaskTaskRunner(**self._choose()))
        return self._dask

    def submit(self, *arguments: Any, **named: Any) -> PrefectFuture[Any]:
        """As `DaskTaskRunner.submit`."""
        return self.dask.submit(*arguments, **named)

    def __exit__(self, *error: Any) -> None:
        """Close the runner behind this one, if it was made."""
        try:
            self._stack.__exit__(*error)
        finally:
            super().__exit__(*error)


def use_cluster(choose: Callable[[], dict[str, Any]]) -> None:
    """Tell the running flow's runner, before its first task, which cluster to use.

    Parameters
    ----------
    choose
        Returns `own_cluster` or `running_cluster`; called when a task is there for it.
    """
    runner = _stage_runner()
    if runner is not None:
        runner.use(choose)


def own_cluster(**options: Any) -> dict[str, Any]:
    """Arguments of the Dask runner for a cluster that it starts with its first task.

    Parameters
    ----------
    **options
        As for `scgpu_tasks.cluster.make_cluster`.
    """
    return {
        "cluster_class": "scgpu_tasks.cluster.start.ready_cluster",
        "cluster_kwargs": options,
    }


def running_cluster(scheduler: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of the Dask runner for a running cluster, and what that cluster is made of.

    Parameters
    ----------
    scheduler
        Address of the scheduler.

    Raises
    ------
    ClusterError
        Nobody answers at that address, or its workers do not reach the Prefect server.
    """
    with connect(scheduler, set_as_default=False) as client:
        found = cluster_facts(client)
        url = PREFECT_API_URL.value()
        if url:
            require_reach(client, f"{url}/health")
    return {"address": scheduler}, found


class _Listener:
    """Takes the progress of the running flow's stages once its cluster runs."""

    def __init__(self, on_event: Callable[[tuple[float, Any]], None]) -> None:
        self._on_event = on_event
        self._client: Any = None

    def begin(self) -> None:
        runner = _stage_runner()
        if runner is not None and self._client is None:
            self._client = runner.dask.client
            self._client.subscribe_topic(_topic(), self._on_event)

    def end(self) -> None:
        if self._client is not None and self._client.status == "running":
            self._client.unsubscribe_topic(_topic())


_listener: ContextVar[_Listener | None] = ContextVar("scgpu_listener", default=None)


@contextmanager
def watch_progress(on_event: Callable[[tuple[float, Any]], None]) -> Iterator[None]:
    """Hand the progress of stages that run on the flow's cluster to a function."""
    listener = _Listener(on_event)
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
        listener.end()


def _stage_runner() -> StageRunner | None:
    context = FlowRunContext.get()
    runner = context.task_runner if context is not None else None
    return runner if isinstance(runner, StageRunner) else None


def _topic() -> str:
    return f"scgpu-progress-{runtime.flow_run.id}"


def _source_name() -> str:
    return Path(runtime.task_run.parameters["source"]).name


@task(name="convert-source", task_run_name=_source_name)
def convert_source(source: str, store: str, options: dict[str, Any]) -> dict[str, Any]:
    """Convert one source if it is new or changed; shows a progress artifact.

    Parameters
    ----------
    source, store
        From where to where.
    options
        Other arguments of `scgpu_tasks.io.convert.many.convert_if_changed`; ``spec`` as a
        dictionary.

    Returns
    -------
    The conversion's result with its ``state``: converted or current.
    """
    from scgpu_tasks.io.convert import ConvertSpec
    from scgpu_tasks.io.convert.many import convert_if_changed

    arguments = options | {"spec": ConvertSpec(**options.get("spec", {}))}
    shown = _ProgressArtifact(f"converting {source}")
    result = convert_if_changed(source, store, progress=shown.update, **arguments)
    if result is None:
        return {"state": "current", "source": source, "store": store}
    return {"state": "converted", "store": store} | result.to_json()


def report_conversions(results: list[dict[str, Any]]) -> None:
    """Show on the flow run's page, and in its log, what became of each source.

    Parameters
    ----------
    results
        Those of `convert_source`, and of sources that failed: ``state``, ``source``, ``store``,
        ``error``.
    """
    from scgpu_tasks.io.convert.many import summary
    from scgpu_tasks.records.conversions import conversions_page, counts

    title = counts(results)
    create_markdown_artifact(
        conversions_page(results), key="atlas-conversions", description=title
    )
    get_run_logger().info("%s\n%s", title, summary(results))


class _ProgressArtifact:
    """Shows how far a conversion is in Prefect's UI, every two seconds at most."""

    def __init__(self, description: str) -> None:
        self._description = description
        self._id: Any = None
        self._next = 0.0

    def update(self, state: Any) -> None:
        """Show a `scgpu_tasks.io.convert.Progress`."""
        finished = state.done_shards == state.total_shards
        if time.monotonic() < self._next and not finished:
            return
        self._next = time.monotonic() + 2
        percent = 100 * state.done_bytes / max(state.total_bytes, 1)
        left = "" if state.seconds_left is None else f", {state.seconds_left:,.0f} s left"
        text = (
            f"{self._description}: {state.done_shards} of {state.total_shards} shards, "
            f"{state.rate / 1e6:,.0f} MB/s{left}"
        )
        if self._id is None:
            self._id = create_progress_artifact(percent, description=text)
        else:
            update_progress_artifact(self._id, percent, description=text)
