"""Records of earlier runs: a list of them, and two side by side."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from scgpu_tasks.errors import FormatError, OutputError, ParameterError
from scgpu_tasks.records import words
from scgpu_tasks.records.content import load_run

logger = logging.getLogger(__name__)

_DASH = "–"


@dataclass(frozen=True)
class Record:
    """A run's record.

    Attributes
    ----------
    folder
        Where it is.
    run
        Content of its run.json.
    """

    folder: Path
    run: dict[str, Any]

    def facts(self) -> dict[str, Any]:
        """Return what a list of runs shows; None where the run did not come so far."""
        run = self.run
        qc, pca = run["summary"].get("qc", {}), run["summary"].get("pca", {})
        return {
            "name": self.folder.name,
            "start": run["start"],
            "state": run["state"],
            "store": _store(run),
            "cells_kept": qc.get("n_cells_kept"),
            "cells": qc.get("n_cells"),
            "genes_kept": qc.get("n_genes_kept"),
            "n_hvg": qc.get("n_hvg"),
            "n_comps": pca.get("n_comps"),
            "variance_explained": pca.get("variance_explained"),
            "seconds": run.get("seconds"),
            "stages": {
                n: {"state": e["state"], "seconds": e["seconds"]}
                for n, e in run["stages"].items()
            },
            "stopped_in": (run.get("error") or {}).get("stage"),
            "folder": str(self.folder),
        }


def find_records(out: Path, store: str | None = None) -> list[Record]:
    """Return the records in a folder, newest first.

    Parameters
    ----------
    out
        Folder for run records.
    store
        Only runs on stores whose path ends so, such as ``atlas.zarr``.

    Raises
    ------
    OutputError
        There is no such folder.
    """
    if not out.is_dir():
        msg = f"there is no folder {out} with run records; name it, as --out of the runs did"
        raise OutputError(msg)
    found = [record for path in out.glob("*/run.json") if (record := _read(path.parent))]
    if store is not None:
        wanted = f"/{store.strip('./')}"
        found = [r for r in found if f"/{r.facts()['store']}".rstrip("/").endswith(wanted)]
    return sorted(found, key=lambda r: (r.run["start"], r.folder.name), reverse=True)


def open_record(out: Path, name: str) -> Record:
    """Return one record, by its name or its folder.

    Raises
    ------
    ParameterError
        There is no such record.
    FormatError
        Its run.json is not that of a run.
    """
    for folder in (out / name, Path(name)):
        with contextlib.suppress(OSError):
            return _load(folder)
    command = f"scgpu-tasks runs --out {quote(str(out))}"
    msg = f"there is no record {name} in {out}; `{command}` lists them"
    raise ParameterError(msg)


def _read(folder: Path) -> Record | None:
    try:
        return _load(folder)
    except FormatError as error:
        logger.warning("left out of the list: %s", error)
    except OSError:
        pass
    return None


def _load(folder: Path) -> Record:
    return Record(folder, load_run(folder))


def list_text(records: Iterable[Record]) -> str:
    """Return the list as a table of text."""
    rows = [
        ["started", "run", "state", "store", "cells kept", "genes", "PCs", "variance", "time"]
    ]
    for record in records:
        f = record.facts()
        stopped = f"{f['state']} in {f['stopped_in']}" if f["stopped_in"] else f["state"]
        kept = _DASH
        if f["cells_kept"] is not None:
            share = words.percent(f["cells_kept"], f["cells"])
            kept = f"{words.count(f['cells_kept'])} of {words.count(f['cells'])} ({share})"
        rows.append(
            [
                f["start"][:16].replace("T", " "),
                f["name"],
                stopped,
                Path(str(f["store"])).name,
                kept,
                words.count(f["genes_kept"]),
                words.count(f["n_comps"]),
                words.percent(f["variance_explained"]),
                words.duration(f["seconds"]),
            ]
        )
    if len(rows) == 1:
        return "no runs"
    return words.columns(rows, right={4, 5, 6, 7, 8})


def differences(first: Record, second: Record) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Return what differs between two runs: parameters, numbers, versions, seconds per stage.

    Returns
    -------
    Under ``parameters``, ``results``, ``versions``, ``hardware`` and ``store`` the names that
    differ and both values; under ``stages`` every stage's state and seconds in both.
    """
    groups = {
        name: _differ(first.run.get(name, {}), second.run.get(name, {}))
        for name in ("parameters", "store", "versions", "hardware", "cluster")
    }
    groups["results"] = _differ(_numbers(first.run), _numbers(second.run))
    mine, theirs = first.run["stages"], second.run["stages"]
    groups["stages"] = {s: (mine.get(s), theirs.get(s)) for s in {**mine, **theirs}}
    return {name: found for name, found in groups.items() if found}


def compare_text(first: Record, second: Record) -> str:
    """Return two runs side by side as text: what differs, and the time of each stage."""
    found = differences(first, second)
    rows = [["", first.folder.name, second.folder.name]]
    for title, value in (
        ("started", lambda r: r["start"][:16].replace("T", " ")),
        ("state", lambda r: r["state"]),
        (
            "store",
            lambda r: str(r.get("store", {}).get("path") or r["parameters"].get("store")),
        ),
        ("time", lambda r: words.duration(r.get("seconds"))),
    ):
        rows.append([title, value(first.run), value(second.run)])
    for stage, pair in found.pop("stages").items():
        rows.append([f"  {stage}", *(_stage_words(entry) for entry in pair)])
    for group in ("parameters", "results", "store", "cluster", "versions", "hardware"):
        if group not in found:
            continue
        rows += [["", "", ""], [f"differences in {group}:", "", ""]]
        rows += [[f"  {n}", _word(n, a), _word(n, b)] for n, (a, b) in found[group].items()]
    same = [g for g in ("parameters", "results", "versions") if g not in found]
    text = words.columns(rows)
    return f"{text}\n\nThe same in both: {', '.join(same)}." if same else text


def _store(run: Mapping[str, Any]) -> str:
    return str(run.get("store", {}).get("path") or run["parameters"].get("store", ""))


def _numbers(run: Mapping[str, Any]) -> dict[str, Any]:
    summary = run["summary"]
    flat: dict[str, Any] = {}
    for stage in ("qc", "pca"):
        for name, value in summary.get(stage, {}).items():
            if name == "lost":
                for what, filters in value.items():
                    flat |= {f"{what} lost to {f}": n for f, n in filters.items()}
            elif name not in ("notes", "stored_bytes_read", "passes", "thresholds"):
                flat[f"{stage} {name}"] = value
    return flat


def _differ(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = [*first, *(name for name in second if name not in first)]
    return {
        name: (first.get(name), second.get(name))
        for name in names
        if first.get(name) != second.get(name)
    }


def _stage_words(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return _DASH
    if entry["state"] in ("computed", "failed"):
        return f"{entry['state']} {words.duration(entry['seconds'])}"
    return str(entry["state"])


def _word(name: str, value: Any) -> str:
    if value is None:
        return _DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or _DASH
    if name.endswith("variance_explained") and isinstance(value, int | float):
        return words.percent(value)
    if name == "fingerprint":
        return str(value)[:12]
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
