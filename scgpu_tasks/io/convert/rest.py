"""What the journal says is in an unfinished store beside the files of its arrays."""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Any

from scgpu_tasks.io.convert.audit import file_sums, list_files
from scgpu_tasks.io.convert.plan import Plan
from scgpu_tasks.io.convert.work import WorkFolder

_ROOT = "zarr.json"


class Rest:
    """Notes of ``"small"``, metadata and small elements, and ``"strings"``, which come later.

    Parameters
    ----------
    work
        The work folder.
    plan
        What is written; the files of its arrays are noted one by one, elsewhere.
    begun
        Whether there may be notes of an earlier run.

    Attributes
    ----------
    there
        What was written, and is as it was left.
    """

    def __init__(self, work: WorkFolder, plan: Plan, *, begun: bool) -> None:
        self._work = work
        self._folders = tuple(f"{item.path}/c/" for item in plan.arrays)
        self.there: set[str] = set()
        for line in work.journal() if begun else ():
            if "small" in line:
                # All else is written again where this was.
                self.there = {"small"} if self._holds(line) else set()
            elif "strings" in line and "small" in self.there and self._holds(line):
                self.there.add("strings")

    def note(self, what: str, before: Container[str] = ()) -> None:
        """Note that something was written: all files but these, which were there before."""
        store = self._work.store
        names = [
            name
            for name in sorted(list_files(store))
            if name not in before and name != _ROOT and not name.startswith(self._folders)
        ]
        line = {what: True, "files": file_sums(store, names), "attributes": self._attributes()}
        self._work.note(line)
        self.there.add(what)

    def _holds(self, line: dict[str, Any]) -> bool:
        files = line.get("files", {"": {}})
        try:
            same = file_sums(self._work.store, list(files)) == files
            return same and self._attributes() == line["attributes"]
        except (OSError, ValueError):
            return False

    def _attributes(self) -> Any:
        """Return those of the root, whose document is written once more at the end."""
        return json.loads((self._work.store / _ROOT).read_bytes()).get("attributes")
