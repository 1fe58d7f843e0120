"""What a run of conversions did, as the Markdown of a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from scgpu_tasks.records import words
from scgpu_tasks.records.pages import escape

STATES = ("converted", "current", "failed")


def counts(results: Sequence[dict[str, Any]]) -> str:
    """Return how many sources came to which end: ``2 converted, 5 current, 0 failed``."""
    states = [found["state"] for found in results]
    return ", ".join(f"{states.count(state)} {state}" for state in STATES)


def conversions_page(results: Sequence[dict[str, Any]]) -> str:
    """Return a table of the sources, and below it what went wrong or is to be known.

    Parameters
    ----------
    results
        Of each source ``state``, ``source``, ``store``; ``stored_bytes``, ``seconds``,
        ``verified`` and ``notes`` of a conversion, ``error`` of a failure.
    """
    lines = [f"**{counts(results)}**", "", "| source | state | store | size | time |"]
    lines.append("|---|---|---|---:|---:|")
    remarks = []
    for found in results:
        size = time = "–"
        state = found["state"]
        if state == "converted":
            size, time = words.size(found["stored_bytes"]), words.duration(found["seconds"])
            state += ", verified" if found["verified"] else ", not verified"
        cells = (_name(found["source"]), state, _name(found["store"]), size, time)
        lines.append("| " + " | ".join(_plain(cell) for cell in cells) + " |")
        said = [*found.get("notes", ()), *([found["error"]] if "error" in found else ())]
        remarks += [f"- {_plain(_name(found['source']))}: {_plain(text)}" for text in said]
    return "\n".join([*lines, "", *remarks])


def _name(path: str) -> str:
    return PurePosixPath(path).name


def _plain(text: str) -> str:
    return escape(" ".join(text.split()))
