"""run.json: what a run was asked to do, what it did, and how it ended."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from scgpu_tasks.errors import OutputError

_RESERVE = ".reserve"
_RESERVE_BYTES = 128 * 1024


class StageEntry(TypedDict):
    """What one stage did."""

    state: str
    """computed, cached, skipped, failed; pending for one that was never reached."""
    seconds: float
    bytes_read: NotRequired[int]
    """Bytes of X read from the store."""
    times_stored: NotRequired[float]
    """``bytes_read`` as a multiple of X's stored size: how often X was read."""


class StoreEntry(TypedDict, total=False):
    """The store that a run worked on."""

    path: str
    fingerprint: str
    shape: list[int]
    nnz: int
    stored_bytes: int
    """Size on disk of X's arrays, bytes."""


class ErrorEntry(TypedDict, total=False):
    """Why a run failed."""

    stage: str
    after: str
    """How far the stage was, such as ``after 3 of 8 blocks``; where it had begun to read."""
    type: str
    message: str
    traceback: str


class Run(TypedDict, total=False):
    """Content of run.json: times in ISO 8601 with an offset, durations in s, sizes in bytes."""

    flow: str
    """Name of the flow, such as ``atlas-qc``."""
    run_id: str
    """That of the run on Prefect's server; empty where it was refused before."""
    name: str
    """Name of the run; that of its folder as a rule."""
    state: str
    """completed, failed, cancelled, killed or running."""
    start: str
    """When it began."""
    end: str
    """When it ended; None while it runs."""
    seconds: float
    """From start to end."""
    parameters: dict[str, Any]
    """All parameters of the flow, with those that were left out at their defaults."""
    store: StoreEntry
    """``path``, ``fingerprint``, ``shape``, ``nnz`` and ``stored_bytes`` of X."""
    stages: dict[str, StageEntry]
    """For each stage ``state``, ``seconds``, and where X was read ``bytes_read`` and
    ``times_stored``, that in stored sizes of X."""
    summary: dict[str, Any]
    """What QC and PCA counted: cells and genes kept and lost, thresholds used; and whether a
    conversion was verified."""
    versions: dict[str, str]
    """Of Python, this package and those that it stands on."""
    hardware: dict[str, Any]
    """System, processor, cores and memory."""
    error: ErrorEntry
    """Of a run that failed: ``stage``, ``after``, ``type``, ``message``, ``traceback``."""


def jsonable(value: Any) -> Any:
    """Return the value as JSON can hold it.

    NumPy scalars and arrays become numbers and lists, paths and dates strings, sets sorted
    lists; NaN and infinities become None, which every JSON reader takes.
    """
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        # NumPy's, which need not be imported to be told.
        return jsonable(value.tolist())
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, set | frozenset):
        return [jsonable(item) for item in sorted(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def write_text_atomic(path: Path, text: str) -> None:
    """Write a file that other processes see either whole or not at all."""
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        Path(partial).chmod(0o666 & ~mask)
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def make_folder(folder: Path) -> Path:
    """Make a record's folder.

    Raises
    ------
    OutputError
        The folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def fresh_folder(out: Path, name: str) -> Path:
    """Make a folder for the record of a new run: `name`, or ``name-2`` and so on if taken.

    Raises
    ------
    OutputError
        The folder cannot be made.
    """
    folder, number = out / name, 1
    while True:
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
            folder = out / f"{name}-{number}"
            continue
        except OSError as error:
            raise _unwritable(folder, error) from error
        return folder


def _unwritable(folder: Path, error: OSError) -> OutputError:
    return OutputError(
        f"the run record cannot be written to {folder}: {error.strerror or error}. "
        "Choose a folder that you may write to with --out."
    )


def reserve_room(folder: Path) -> None:
    """Keep room on the disk for run.json and report.html of a run that fails as it is full."""
    (folder / _RESERVE).write_bytes(os.urandom(_RESERVE_BYTES))


def release_room(folder: Path) -> None:
    """Give back what `reserve_room` took."""
    (folder / _RESERVE).unlink(missing_ok=True)


def write_run(folder: str | Path, run: Run | Mapping[str, Any]) -> Path:
    """Write run.json, replacing the one that is there in one step.

    Parameters
    ----------
    folder
        The record's folder; made if missing.
    run
        What to write, see `Run`.

    Returns
    -------
    Path of run.json.

    Raises
    ------
    OutputError
        The folder cannot be written.
    """
    path = make_folder(Path(folder)) / "run.json"
    text = json.dumps(jsonable(run), indent=2, ensure_ascii=False, allow_nan=False)
    write_text_atomic(path, text + "\n")
    return path


def read_run(folder: str | Path) -> dict[str, Any]:
    """Read a record's run.json.

    Parameters
    ----------
    folder
        The record.

    Returns
    -------
    Its content.
    """
    content: dict[str, Any] = json.loads((Path(folder) / "run.json").read_text("utf-8"))
    return content
