"""report.html: one file that shows a biologist what a run did and found."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from scgpu_tasks.records import words

_ADVICE = {
    "StoreError": "Check that --store and --source name an existing store that you may read.",
    "FormatError": "scgpu-tasks check STORE says what in the store is in the way, and the "
    "command that converts it.",
    "DataError": "QC needs raw counts. If the store keeps them in a layer, name it: --layer. "
    "Values that are meant to have fractions, such as corrected counts, pass with "
    "--not-counts.",
    "ParameterError": "Change the option that the message names and run the command again.",
    "OutputError": "Choose another folder with --out, or make room on the disk.",
    "CorruptChunkError": "The file on disk is damaged. Copy the store again, or convert it "
    "again from its source.",
    "ClusterError": "Start with fewer --workers, or check the address given with --scheduler.",
    "MissingPackageError": "Install what the message names, or run with --device cpu.",
    "MemoryError": "Use smaller blocks (--chunks 5000) or fewer --workers.",
    "Killed": "If it was for lack of memory: use smaller blocks (--chunks 5000) or fewer "
    "--workers.",
    "KilledWorker": "A worker was killed, most often for lack of memory: use smaller blocks "
    "(--chunks 5000) or fewer --workers.",
}
_TITLES = {
    "completed": "Quality control and PCA",
    "failed": "This run failed",
    "cancelled": "This run was stopped",
    "killed": "This run was killed",
    "running": "This run has not ended",
}


def render(run: Mapping[str, Any], view: Mapping[str, Any] | None = None) -> str:
    """Return the report of a run as one HTML page that needs nothing else.

    Parameters
    ----------
    run
        Content of run.json.
    view
        What `scgpu_tasks.records.views.report_view` made of what the stages found; without it
        the report says how far the run came.
    """
    found = view or {"tiles": [], "notes": [], "qc": None, "pca": None, "snippet": ""}
    content = {
        **found,
        "run": _header(run),
        "title": _TITLES.get(run["state"], run["state"]),
        "error": _error(run),
        "tiles": found["tiles"] + (_store_tiles(run) if view else []),
        "stages": _stages(run),
        "conversion": _conversion(run),
        "details": _details(run),
    }
    return _environment().get_template("report.html.j2").render(_mark_svg(content))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("scgpu_tasks.records", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "count": words.count,
        "duration": words.duration,
        "moment": words.moment,
        "percent": words.percent,
        "size": words.size,
    }
    return environment


def _mark_svg(value: Any) -> Any:
    """Mark figures as HTML; every other string is escaped by the template."""
    if isinstance(value, dict):
        return {k: Markup(v) if k == "svg" else _mark_svg(v) for k, v in value.items()}  # noqa: S704
    return [_mark_svg(item) for item in value] if isinstance(value, list) else value


def _header(run: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": run["name"],
        "flow": run["flow"],
        "state": run["state"],
        "start": run.get("start"),
        "seconds": run.get("seconds"),
        "store": {"path": run.get("store", {}).get("path") or run["parameters"].get("store")},
    }


def _error(run: Mapping[str, Any]) -> dict[str, Any] | None:
    error = run.get("error")
    if not error:
        return None
    stage, kind = error.get("stage", "start"), error.get("type", "")
    places = {"start": "before the first stage", "record": "as its record was written"}
    where = places.get(stage, f"in the stage “{stage}”")
    if error.get("after"):
        where += f", {error['after']}"
    stopped = run["state"] == "cancelled"
    advice = [] if stopped or kind not in _ADVICE else [_ADVICE[kind]]
    finished = [n for n, s in run["stages"].items() if s["state"] in ("computed", "cached")]
    if finished:
        advice.append(f"Done already, and not run again next time: {', '.join(finished)}.")
    elif not advice:
        advice.append("Run the same command again.")
    return {
        "heading": f"Stopped {where}" if stopped else f"It failed {where}",
        "message": error.get("message") or kind,
        "type": kind,
        "traceback": error.get("traceback"),
        "advice": advice,
    }


def state_message(run: Mapping[str, Any]) -> str:
    """Why a run failed in one paragraph: stage, how far it was, what happened, the remedy."""
    error = run["error"]
    stage, kind = error["stage"], error["type"]
    where = {"start": "The run failed before its first stage"}.get(
        stage, "Writing the record failed" if stage == "record" else f"Stage {stage} failed"
    )
    after = f" {error['after']}" if error.get("after") else ""
    advice = f" Remedy: {_ADVICE[kind]}" if kind in _ADVICE else ""
    return f"{where}{after}: {error['message'].rstrip('.')}.{advice}"


def _store_tiles(run: Mapping[str, Any]) -> list[dict[str, str]]:
    store = run.get("store", {})
    if not store.get("stored_bytes"):
        return []
    label = "counts on disk"
    if store.get("nnz"):
        label += f", {words.count(store['nnz'])} non\N{NON-BREAKING HYPHEN}zeros"
    return [{"value": words.size(store["stored_bytes"]), "label": label}]


def _stages(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    longest = max((s.get("seconds") or 0 for s in run["stages"].values()), default=0)
    rows = []
    for name, entry in run["stages"].items():
        seconds = entry.get("seconds") or 0
        ran = entry["state"] not in ("skipped", "pending")
        rows.append(
            {
                "name": name,
                "state": entry["state"],
                "seconds": seconds if ran else None,
                "width": f"{100 * seconds / longest:.1f}" if longest and ran else None,
                "bytes_read": entry.get("bytes_read"),
                "times_stored": entry.get("times_stored"),
            }
        )
    return rows


def _conversion(run: Mapping[str, Any]) -> str | None:
    made = run.get("summary", {}).get("convert")
    if not made:
        return None
    if made.get("verified"):
        return "The converted store was read back and compared with its source: no difference."
    return "The converted store was NOT compared with its source."


def _details(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    store = dict(run.get("store", {}))
    shape = store.pop("shape", None)
    if shape:
        store["cells × genes"] = " × ".join(words.count(n) for n in shape)
    for name, show in (("nnz", words.count), ("stored_bytes", words.size)):
        if store.get(name) is not None:
            store[name] = show(store[name])
    hardware = dict(run.get("hardware", {}))
    for name in [n for n in hardware if n.endswith("_bytes")]:
        hardware[name.removesuffix("_bytes")] = words.size(hardware.pop(name))
    times = {"run": run.get("run_id"), "start": run.get("start"), "end": run.get("end")}
    groups = (
        ("Parameters", run["parameters"], run["state"] != "completed"),
        ("Store", store, False),
        ("Run", times, False),
        ("Versions", run.get("versions", {}), False),
        ("Hardware", hardware, False),
    )
    return [
        {"title": title, "open": open_, "entries": [(k, _plain(v)) for k, v in entries.items()]}
        for title, entries, open_ in groups
        if entries
    ]


def _plain(value: Any) -> str:
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value) or "–"
    if isinstance(value, Mapping):
        return "; ".join(f"{k} {_plain(v)}" for k, v in value.items())
    return str(value)
