"""Estimate, before anything is written, whether a conversion fits on the disk."""

from __future__ import annotations

import shutil

import numpy as np

from scgpu_tasks.errors import OutputError
from scgpu_tasks.io.convert.compress import compress
from scgpu_tasks.io.convert.options import ConvertSpec
from scgpu_tasks.io.convert.progress import Job
from scgpu_tasks.io.convert.values import Values
from scgpu_tasks.io.convert.work import WorkFolder

_SAMPLES = 3
_SAMPLE_BYTES = 256 * 1024
# Arrays smaller than this are not worth a sample: count them as incompressible.
_SMALL = 16 * 1024 * 1024


def estimate_bytes(values: Values, jobs: list[Job], spec: ConvertSpec) -> int:
    """Bytes on disk that these files will take, from a few compressed samples of each array."""
    decoded: dict[str, int] = {}
    for job in jobs:
        decoded[job.path] = decoded.get(job.path, 0) + job.nbytes
    return sum(
        round(nbytes * (_ratio(values, path, spec) if nbytes > _SMALL else 1))
        for path, nbytes in decoded.items()
    )


def _ratio(values: Values, path: str, spec: ConvertSpec) -> float:
    item = values.plan.array(path)
    if item.kind != "copy" or values.reader(item.source).spills:
        return 1.0
    layout = item.layout
    row = max(1, layout.nbytes // layout.shape[0])
    n = min(layout.shape[0], max(1, _SAMPLE_BYTES // row))
    rows = values.rows(path)
    before = after = 0
    for at in np.linspace(0, layout.shape[0] - n, _SAMPLES, dtype=np.int64):
        part = np.ascontiguousarray(rows(int(at), int(at) + n))
        before += part.nbytes
        after += len(compress(part.reshape(-1).view(np.uint8), spec.level))
    return min(1.0, 1.1 * after / max(before, 1))


def scratch_bytes(values: Values) -> int:
    """Bytes of scratch files that a conversion needs at most."""
    total = 0
    for item in values.plan.arrays:
        reader = values.reader(item.source)
        if reader.spills:
            total += values.source.node(item.source).nbytes
    for matrix in values.plan.sparse:
        if matrix.transpose:
            # A run holds row, column and value of an entry, a band column and value.
            value = values.reader(f"{matrix.source}/data").dtype.itemsize
            total += matrix.nnz * (12 + 2 * value)
    return max(0, total - values.prepared.bytes_kept())


def scratch_notes(values: Values) -> list[str]:
    """Say which arrays are decoded to scratch files, and what that costs."""
    notes = []
    for item in values.plan.arrays:
        reader = values.reader(item.source)
        if not reader.spills:
            continue
        nbytes = values.source.node(item.source).nbytes
        memory = reader.whole_bytes
        notes.append(
            f"{item.source} is stored in chunks that make bands of {_size(reader.band_bytes)}: "
            f"each is decoded once to disk, {_size(nbytes)} in all"
            + (f", with {_size(memory)} of memory a thread" if memory else "")
        )
    return notes


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def check_space(values: Values, jobs: list[Job], work: WorkFolder, spec: ConvertSpec) -> None:
    """Refuse to start what will not fit.

    Raises
    ------
    OutputError
        Names the space needed, the space there is, and where.
    """
    stored, scratch = estimate_bytes(values, jobs, spec), scratch_bytes(values)
    free = shutil.disk_usage(work.root).free
    if stored + scratch > free:
        extra = f", {_size(scratch)} of it for scratch files" if scratch else ""
        msg = (
            f"{work.dst} needs about {_size(stored + scratch)}{extra}, and {_size(free)} are "
            "free on its disk; free some, or choose another disk"
        )
        raise OutputError(msg)
