"""The folder of finished stages as somebody keeps house in it: what is there, what may go."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scgpu_tasks.errors import OutputError, ParameterError
from scgpu_tasks.job.workdir import MANIFEST, held_keys, remove_unheld
from scgpu_tasks.records import words

_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SIZES = {"": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


@dataclass(frozen=True)
class Entry:
    """The output of one finished stage.

    Attributes
    ----------
    path
        Its folder.
    stage, key, store
        What it is of.
    bytes
        Size of all its files.
    created, used
        When it was written and when a run last used it, seconds since 1970.
    in_use
        Whether a run that goes on needs it.
    """

    path: Path
    stage: str
    key: str
    store: str
    bytes: int
    created: float
    used: float
    in_use: bool

    def to_json(self) -> dict[str, Any]:
        """Field names and values."""
        return {**asdict(self), "path": str(self.path)}


def entries(work: Path) -> list[Entry]:
    """Return the finished stages in a folder, the one unused for longest first.

    Raises
    ------
    OutputError
        There is no such folder.
    """
    if not work.is_dir():
        msg = (
            f"there is no folder {work} of finished stages; name it, as --work of the runs did"
        )
        raise OutputError(msg)
    held = held_keys(work)
    found = [
        entry
        for path in work.glob(f"*/*/{MANIFEST}")
        if _is_ours(path.parent) and (entry := _entry(path.parent, held))
    ]
    return sorted(found, key=lambda entry: entry.used)


def _is_ours(folder: Path) -> bool:
    """Tell whether a folder is named as stages name theirs: nothing else may be removed."""
    return re.fullmatch("[0-9a-f]{40}", folder.name) is not None


def _entry(folder: Path, held: set[str]) -> Entry | None:
    try:
        manifest = folder / MANIFEST
        body = json.loads(manifest.read_bytes())
        return Entry(
            path=folder,
            stage=folder.parent.name,
            key=folder.name,
            store=str(body["inputs"].get("store", "")),
            bytes=sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()),
            created=float(body["created"]),
            used=manifest.stat().st_mtime,
            in_use=folder.name in held,
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        # Damaged: no run will use it.
        return Entry(folder, folder.parent.name, folder.name, "", 0, 0.0, 0.0, in_use=False)


def choose(
    found: Iterable[Entry],
    *,
    older_than: float | None = None,
    keep_bytes: float | None = None,
) -> list[Entry]:
    """Choose what to remove, never what is in use.

    Parameters
    ----------
    found
        From `entries`.
    older_than
        Seconds since an entry was last used.
    keep_bytes
        Of those that remain, remove the ones unused for longest, until no more than this is
        left.

    Returns
    -------
    Entries to remove.
    """
    known = sorted(found, key=lambda entry: entry.used)
    now = time.time()
    free = [entry for entry in known if not entry.in_use]
    going = [e for e in free if older_than is not None and now - e.used >= older_than]
    left = sum(e.bytes for e in known) - sum(e.bytes for e in going)
    for entry in free:
        if keep_bytes is None or left <= keep_bytes:
            break
        if entry not in going:
            going.append(entry)
            left -= entry.bytes
    return going


def of_store(entry: Entry, store: str) -> bool:
    """Whether an entry is of a store, named by its path or the end of it."""
    return f"/{entry.store.strip('/')}".endswith(f"/{store.strip('./')}")


def remove(chosen: Iterable[Entry]) -> list[Entry]:
    """Remove entries, but for those that a run has begun to use meanwhile.

    Returns
    -------
    What was removed.
    """
    return [entry for entry in chosen if remove_unheld(entry.path)]


def seconds_of(text: str) -> float:
    """Seconds of a time such as ``30d`` or ``12h``.

    Raises
    ------
    ParameterError
        It is none.
    """
    return _measure(text, _UNITS, "a time such as 12h, 30d or 8w")


def bytes_of(text: str) -> float:
    """Bytes of a size such as ``50GB``.

    Raises
    ------
    ParameterError
        It is none.
    """
    return _measure(text, _SIZES, "a size such as 500MB or 50GB")


def _measure(text: str, units: dict[str, Any], what: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    by_name = {name.lower(): factor for name, factor in units.items()}
    if match is None or match[2].lower() not in by_name:
        msg = f"{text!r} is not {what}"
        raise ParameterError(msg)
    return float(match[1]) * by_name[match[2].lower()]


def list_text(
    found: list[Entry], gone: list[Entry] | None = None, *, dry_run: bool = False
) -> str:
    """Return a table of entries; those in ``gone`` are marked as removed, or to be removed."""
    now = time.time()
    rows = [["stage", "store", "size", "used", "key", ""]]
    for entry in found:
        mark = "in use" if entry.in_use else ""
        if gone is not None:
            mark = ("would go" if dry_run else "removed") if entry in gone else mark
        used = _ago(now - entry.used) if entry.used else "damaged"
        rows.append(
            [
                entry.stage,
                Path(entry.store).name,
                words.size(entry.bytes),
                used,
                entry.key[:12],
                mark,
            ]
        )
    lines = [words.columns(rows, right={2})]
    total = words.size(sum(entry.bytes for entry in found))
    lines.append(f"{len(found)} finished stages, {total}")
    if gone is not None:
        freed = words.size(sum(entry.bytes for entry in gone))
        done = ("would be removed", "would be free") if dry_run else ("removed", "freed")
        lines.append(f"{len(gone)} {done[0]}, {freed} {done[1]}")
    return "\n".join(lines)


def _ago(seconds: float) -> str:
    days = int(seconds // _UNITS["d"])
    return f"{days} days ago" if days > 1 else f"{words.duration(max(0.0, seconds))} ago"
