"""The flow run that is running, as Prefect's server has it: name, tags, page, state.

What is shown on the run's page are artifacts: progress bars, tables, and Markdown with figures.
"""

from __future__ import annotations

import _thread
import contextvars
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import httpx
from prefect import runtime
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_run_logger
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    temporary_settings,
)
from prefect.states import Cancelled, Crashed, Failed, State

from scgpu_tasks.job.runlog import file_name, store_stem

SECONDS_BETWEEN_LOOKS = 2.0
_FINAL_WITHIN_S = 60.0
_REQUEST_S = 10.0
# Set by Prefect where a worker or `serve` started this process; it then ends it, too.
_STARTED_BY_PREFECT = "PREFECT__FLOW_RUN_ID"

logger = logging.getLogger(__name__)
_alone = False
_cancelled = False


@dataclass(frozen=True)
class CurrentRun:
    """Identity of the flow run that is running.

    Parameters
    ----------
    flow, id, name
        As Prefect has them.
    """

    flow: str
    id: str
    name: str

    @property
    def folder_name(self) -> str:
        """The name, without what a file name cannot hold."""
        return file_name(self.name) or self.id


def current_run() -> CurrentRun:
    """Return the flow run that is running here."""
    run = runtime.flow_run
    return CurrentRun(str(run.flow_name), str(run.id), str(run.name))


def run_name() -> str:
    """Name of the flow run: the store's, and the words that Prefect gave the run."""
    stem = store_stem(str(runtime.flow_run.parameters.get("store", "")))
    words = str(runtime.flow_run.name or "run")
    return words if words.startswith(f"{stem}-") else f"{stem}-{words}"


def stage_run_name() -> str:
    """Name of a stage's task run: the stage and the store."""
    given = runtime.task_run.parameters
    store = (given.get("plan") or given.get("job") or {}).get("store", "")
    return f"{runtime.task_run.task_name} {store_stem(store)}"


@contextmanager
def unattended() -> Iterator[None]:
    """Show nothing of the runs in the block: their server ends with them."""
    global _alone
    with without_heartbeat():
        _alone = True
        try:
            yield
        finally:
            _alone = False


@contextmanager
def without_heartbeat() -> Iterator[None]:
    """Send no heartbeats, unless the user set how often: ending their thread takes a second.

    A run that was killed is marked by the next one, see `scgpu_tasks.job.living`.
    """
    if "PREFECT_FLOWS_HEARTBEAT_FREQUENCY" in os.environ:
        yield
        return
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield


def attended() -> bool:
    """Whether the run reports to a server that stays, where somebody may look."""
    return not _alone and bool(PREFECT_API_URL.value())


class RunPage:
    """Page of the running flow run; make it in the flow, use it in any thread.

    Parameters
    ----------
    store
        Path of the store; its name begins the artifacts' keys, under which the server keeps
        what earlier runs showed of it.
    """

    def __init__(self, store: str) -> None:
        self._prefix = file_name(store_stem(store).lower().replace("_", "-").replace(".", "-"))
        self._context = contextvars.copy_context()
        self._log = get_run_logger()
        self._progress: dict[str, UUID] = {}

    def progress(self, name: str, percent: float, text: str) -> None:
        """Show how far a stage is."""
        if name in self._progress:
            self._call(update_progress_artifact, self._progress[name], percent, text)
        else:
            found = self._call(create_progress_artifact, percent, description=text)
            self._progress[name] = found

    def markdown(self, name: str, text: str, title: str) -> None:
        """Show a text."""
        self._call(create_markdown_artifact, text, key=self._key(name), description=title)

    def table(self, name: str, rows: list[dict[str, Any]], title: str) -> None:
        """Show a table."""
        self._call(create_table_artifact, rows, key=self._key(name), description=title)

    def log(self, text: str) -> None:
        """Add a line to the run's log."""
        self._log.info(text)

    def tag(self, *tags: str) -> None:
        """Add tags to the run."""
        run = runtime.flow_run
        all_tags = sorted({*run.tags, *tags})
        with _own_client() as client:
            client.update_flow_run(UUID(str(run.id)), tags=all_tags)

    def _key(self, name: str) -> str:
        text = "".join(c if c.isascii() and c.isalnum() else "-" for c in self._prefix)
        return f"{text.strip('-') or 'store'}-{name}"

    def _call(self, function: Any, *arguments: Any, **named: Any) -> Any:
        return self._context.copy().run(function, *arguments, **named)


def failed(message: str, error: Exception) -> State[Any]:
    """State with which a flow ends that raises an error; the message goes to the server."""
    return Failed(message=message, data=error)


@contextmanager
def cancelled_by_server() -> Iterator[None]:
    """Stop the block soon after somebody cancelled the run on the server's pages.

    Where a worker of Prefect's runs the flow, that worker sees to it; elsewhere nobody would.
    """
    run = runtime.flow_run
    if not attended() or _STARTED_BY_PREFECT in os.environ:
        yield
        return
    ended = threading.Event()
    # No daemon: where the run was cancelled, it has the last word on its state.
    watcher = threading.Thread(
        target=contextvars.copy_context().run,
        args=(_watch, UUID(str(run.id)), ended),
        name="scgpu-cancel",
        daemon=False,
    )
    watcher.start()
    try:
        yield
    finally:
        ended.set()


def was_cancelled() -> bool:
    """Whether a run of this process was stopped by `cancelled_by_server`."""
    return _cancelled


def _watch(run_id: UUID, ended: threading.Event) -> None:
    global _cancelled
    with _own_client() as client:
        while not ended.wait(SECONDS_BETWEEN_LOOKS):
            state = _state(client, run_id)
            if state is not None and (state.is_cancelling() or state.is_cancelled()):
                _cancelled = True
                _interrupt()
                _settle(client, run_id)
                return


def _interrupt() -> None:
    """Raise an exception in the main thread, where a flow of a script runs."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _thread.interrupt_main()
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def _settle(client: SyncPrefectClient, run_id: UUID) -> None:
    """Once the flow has reported its end, name it what it is."""
    deadline = time.monotonic() + _FINAL_WITHIN_S
    state = _state(client, run_id)
    while time.monotonic() < deadline and (state is None or not state.is_final()):
        time.sleep(0.1)
        state = _state(client, run_id)
    if state is None or not state.is_cancelled():
        message = "Cancelled; the next run goes on after the last finished stage."
        _set(client, run_id, Cancelled(message=message))


def crashed(run_id: str, message: str) -> None:
    """Mark a run as crashed whose process ended without a word; harmless if it is not known."""
    with _own_client() as client:
        found = _state(client, UUID(run_id))
        if found is not None and not found.is_final():
            _set(client, UUID(run_id), Crashed(message=message))


def _state(client: SyncPrefectClient, run_id: UUID) -> State[Any] | None:
    try:
        return client.read_flow_run(run_id).state
    except (httpx.HTTPError, ObjectNotFound) as error:
        logger.debug("state of run %s: %r", run_id, error)
        return None


def _set(client: SyncPrefectClient, run_id: UUID, state: State[Any]) -> None:
    try:
        client.set_flow_run_state(run_id, state, force=True)
    except (httpx.HTTPError, ObjectNotFound) as error:
        logger.warning("the state of run %s could not be set: %r", run_id, error)


def _own_client() -> SyncPrefectClient:
    """Client that outlives the flow; use it in ``with``."""
    return get_client(httpx_settings={"timeout": _REQUEST_S}, sync_client=True)
