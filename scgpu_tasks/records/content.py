"""See that a run.json which somebody else may have written is what it must be."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from scgpu_tasks.errors import FormatError
from scgpu_tasks.records.run import jsonable

_DEEPEST = 50
_LARGEST = 2**64
_REQUIRED = ("start", "state", "parameters", "stages", "summary")
_TEXTS = ("flow", "run_id", "name", "end")
_GROUPS = ("parameters", "stages", "summary", "store", "versions", "hardware", "cluster")
_COUNTS = {
    "qc": ("n_cells", "n_cells_kept", "n_genes", "n_genes_kept", "n_hvg"),
    "pca": ("n_comps", "variance_explained"),
}


def load_run(folder: Path) -> dict[str, Any]:
    """Read a record's run.json, every part of it of the kind that `Run` says.

    NaN and infinities come back as None, as `write_run` writes them, and optional parts that
    are None are left out.

    Raises
    ------
    FormatError
        It is not JSON, or a part of it is missing or of another kind.
    OSError
        It cannot be read.
    """
    path = folder / "run.json"
    try:
        content = json.loads(path.read_text("utf-8"))
        _require_plain(content, "its content", 0)
        run: dict[str, Any] = jsonable(content)
        _require(run, "its content", dict)
        run = {k: v for k, v in run.items() if v is not None or k in (*_REQUIRED, *_TEXTS)}
        _require_parts(run)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        msg = f"{path} is no record of a run ({why}); remove it, or restore it from a copy"
        raise FormatError(msg) from error
    return run


def _require_plain(value: Any, where: str, depth: int) -> None:
    """See that it can be printed, and taken for a number where it is one."""
    if depth > _DEEPEST:
        msg = f"{where} is nested more than {_DEEPEST} deep"
        raise ValueError(msg)
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, int) and abs(value) > _LARGEST:
        msg = f"{where} is an integer of more than 64 bits"
        raise ValueError(msg)
    elif isinstance(value, dict):
        for name, item in value.items():
            name.encode()
            _require_plain(item, name, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _require_plain(item, where, depth + 1)


def _require_parts(run: Mapping[str, Any]) -> None:
    for name in _REQUIRED:
        if name not in run:
            msg = f"it has no {name}"
            raise ValueError(msg)
    for name in ("start", "state"):
        _require(run[name], name, str)
    if datetime.fromisoformat(run["start"]).tzinfo is None:
        msg = f"start is {run['start']!r}, without an offset from UTC"
        raise ValueError(msg)
    _each(run, _TEXTS, "", _text)
    _number(run.get("seconds"), "seconds")
    for name in _GROUPS:
        _require(run.get(name, {}), name, dict)
    _each(run.get("store", {}), ("path", "fingerprint"), "store.", _text)
    for name, entry in run["stages"].items():
        _require_stage(entry, f"stages.{name}")
    for stage, counts in _COUNTS.items():
        _require_summary(run["summary"].get(stage, {}), f"summary.{stage}", counts)
    error = run.get("error", {})
    _require(error, "error", dict)
    _each(error, ("stage", "after", "type", "message", "traceback"), "error.", _text)


def _require_stage(entry: Any, where: str) -> None:
    _require(entry, where, dict)
    _require(entry.get("state"), f"{where}.state", str)
    if "seconds" not in entry:
        msg = f"{where} has no seconds"
        raise ValueError(msg)
    _each(entry, ("seconds", "bytes_read", "times_stored"), f"{where}.", _number)


def _require_summary(summary: Any, where: str, counts: tuple[str, ...]) -> None:
    _require(summary, where, dict)
    _each(summary, counts, f"{where}.", _number)
    _require(summary.get("lost", {}), f"{where}.lost", dict)
    for what, filters in summary.get("lost", {}).items():
        _require(filters, f"{where}.lost.{what}", dict)
        _each(filters, tuple(filters), f"{where}.lost.{what}.", _number)


def _each(
    group: Mapping[str, Any],
    names: tuple[str, ...],
    where: str,
    kind: Callable[[Any, str], None],
) -> None:
    for name in names:
        kind(group.get(name), f"{where}{name}")


def _text(value: Any, where: str) -> None:
    if value is not None:
        _require(value, where, str)


def _number(value: Any, where: str) -> None:
    if value is not None:
        _require(value, where, int, float)


def _require(value: Any, where: str, *kinds: type) -> None:
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        msg = f"{where} is {type(value).__name__}, not {wanted}"
        raise ValueError(msg)
