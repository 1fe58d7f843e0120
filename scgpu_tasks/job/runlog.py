"""What a run did, as it goes: the content of run.json."""

from __future__ import annotations

import os
import platform
import re
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from scgpu_tasks.errors import ScgpuError
from scgpu_tasks.io.memory import memory_limit

_PACKAGES = (
    "scgpu-tasks",
    "anndata",
    "dask",
    "distributed",
    "numba",
    "numpy",
    "pandas",
    "prefect",
    "prefect-dask",
    "scipy",
    "zarr",
    "zarrs",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "kvikio-cu12",
    "kvikio-cu13",
    "nvidia-nvcomp-cu12",
    "nvidia-nvcomp-cu13",
    "dask-cuda",
    "rmm-cu12",
    "rmm-cu13",
)


_UNSAFE = re.compile(r"[^\w.+-]+")
_announced: Path | None = None


def announce(folder: Path) -> None:
    """Note where the record of this process's last run is, for the command line to tell."""
    global _announced
    _announced = folder


def announced() -> Path | None:
    """Return what `announce` noted."""
    return _announced


def file_name(text: str) -> str:
    """Text without what a file name cannot hold; may be empty."""
    return _UNSAFE.sub("-", text).strip(".-")


def store_stem(store: str) -> str:
    """Name of a store, for the names of its runs."""
    return file_name(Path(store.rstrip("/")).stem) or "store"


class RunLog:
    """Collects the content of a run record.

    Parameters
    ----------
    flow
        Name of the flow.
    run_id, name
        Identity of the flow run.
    parameters
        All parameters of the run.
    stages
        Names of the stages, in the order in which they run.
    """

    def __init__(
        self,
        *,
        flow: str,
        run_id: str,
        name: str,
        parameters: Mapping[str, Any],
        stages: tuple[str, ...],
    ) -> None:
        self._begun = time.perf_counter()
        self.content: dict[str, Any] = {
            "flow": flow,
            "run_id": run_id,
            "name": name,
            "state": "running",
            "start": _now(),
            "end": None,
            "seconds": 0.0,
            "parameters": dict(parameters),
            "store": {},
            "stages": {stage: {"state": "pending", "seconds": 0.0} for stage in stages},
            "summary": {},
            "versions": versions(),
            "hardware": hardware(),
        }
        self.running: str | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, Any]]:
        """Time a stage and note how it ended.

        Yields
        ------
        The stage's entry; the caller sets ``state`` where it is not ``"computed"``.
        """
        entry: dict[str, Any] = self.content["stages"][name]
        entry["state"] = "running"
        self.running, start = name, time.perf_counter()
        try:
            yield entry
        except BaseException:
            entry["state"] = "failed"
            raise
        else:
            self.running = None
            if entry["state"] == "running":
                entry["state"] = "computed"
        finally:
            entry["seconds"] = round(time.perf_counter() - start, 3)

    def skip(self, name: str) -> None:
        """Note that a stage had nothing to do."""
        self.content["stages"][name]["state"] = "skipped"

    def count_read(self, name: str, bytes_read: int) -> None:
        """Note the bytes of X that a stage read, and as a multiple of X's stored size."""
        stored = self.content["store"].get("stored_bytes") or 0
        self.content["stages"][name]["bytes_read"] = int(bytes_read)
        self.content["stages"][name]["times_stored"] = (
            round(bytes_read / stored, 3) if stored else 0.0
        )

    def fail(self, error: BaseException, after: str = "") -> None:
        """Note why the run ended early, and how far its stage was, in words."""
        cancelled = not isinstance(error, Exception)
        self.content["error"] = {
            "stage": self.running or "start",
            "type": type(error).__name__,
            "message": describe_error(error),
            "traceback": "".join(traceback.format_exception(error)),
        }
        if after:
            self.content["error"]["after"] = after
        self.end("cancelled" if cancelled else "failed")

    def end(self, state: str) -> None:
        """Note when and how the run ended."""
        self.content["state"] = state
        self.content["end"] = _now()
        self.content["seconds"] = round(time.perf_counter() - self._begun, 3)


def describe_error(error: BaseException) -> str:
    """One paragraph on an error: its message, and its kind where that is not one of ours."""
    if not isinstance(error, Exception):
        return "the run was interrupted; the next one goes on after the last finished stage"
    text = str(error).strip()
    notes = [note for note in getattr(error, "__notes__", []) if note not in text]
    if notes:
        text = f"{text} ({'; '.join(notes)})"
    return text if isinstance(error, ScgpuError) else f"{type(error).__name__}: {text}"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that shape the numbers; installed ones only."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """Processor, cores, memory and system of this machine."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_limit(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:  # noqa: PTH123
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _now() -> str:
    return datetime.now(UTC).astimezone().isoformat(timespec="seconds")
