"""The files and figures of a record, kept beside the finished stages that they are made of.

Where all stages of a run are finished, its record is copied from here: nothing is read, drawn
or written again, and what that would import stays out. A large record is not kept, as writing
it again takes little longer than copying it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scgpu_tasks.errors import OutputError
from scgpu_tasks.job.steps import Plan
from scgpu_tasks.job.workdir import WorkDir, checksum_of
from scgpu_tasks.records.made import RESULTS, Computed, Kept

STAGE = "record"
MOST_BYTES = 256 * 2**20

logger = logging.getLogger(__name__)


def made_of(plan: Plan) -> dict[str, str | None]:
    """Return the checksums of the stages' outputs from which a record is made now."""
    work = Path(plan.work)
    return {stage: checksum_of(work / stage / plan.key(stage)) for stage in ("qc", "pca")}


def find_kept(plan: Plan) -> Kept | None:
    """Return what was kept of the outputs that are there now, if it is whole."""
    found = WorkDir(plan.work).find(STAGE, plan.key(STAGE))
    if found is None or found.summary.get("made_of") != made_of(plan):
        return None
    return Kept(found.path, Path(plan.work) / "qc" / plan.key("qc"))


def keep(
    plan: Plan,
    source: Mapping[str, str | None],
    made: Computed,
    record: Path,
    run: Mapping[str, Any],
) -> None:
    """Keep what a record was made of, unless it is large; the run does without if it fails.

    Parameters
    ----------
    plan
        What was run.
    source
        `made_of` when the results were read.
    made, record, run
        The results, the record written from them and its content.
    """
    files = [path for path in (record / RESULTS).rglob("*") if path.is_file()]
    if sum(path.stat().st_size for path in files) > MOST_BYTES:
        return
    try:
        with WorkDir(plan.work).draft(STAGE) as draft:
            made.keep(draft.path, record, run)
            summary = {"made_of": dict(source)}
            draft.replace(plan.key(STAGE), inputs=plan.inputs(STAGE), summary=summary)
    except (OSError, OutputError) as error:
        logger.warning("the record is not kept for later runs: %s", error)
