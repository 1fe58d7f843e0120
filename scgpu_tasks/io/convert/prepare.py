"""Work out what must be known of rearranged matrices: row borders, transposed bands."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from scgpu_tasks.errors import FormatError
from scgpu_tasks.io.convert import sorting
from scgpu_tasks.io.convert.plan import SparseItem
from scgpu_tasks.io.convert.rearrange import row_blocks
from scgpu_tasks.io.convert.runner import Runner, default_threads
from scgpu_tasks.io.convert.values import Values, check_sparse

_STEP = 1 << 20


def check_matrices(values: Values) -> None:
    """Check the row borders of every sparse matrix, before anything is written."""
    for item in values.plan.sparse:
        check_sparse(values, item)


def prepare(runner: Runner) -> None:
    """Transpose matrices that become CSR, count distinct entries; done parts are kept."""
    values = runner.worker.values
    for item in values.plan.sparse:
        if not item.rearranged:
            continue
        prepared = values.prepared
        if prepared.load(item.path, "indptr") is None:
            read = values.reader(f"{item.source}/indptr")
            prepared.save(item.path, "indptr", read(0, item.major + 1).astype(np.int64))
        if item.transpose:
            _transpose(runner, item)
        if item.dedupe and prepared.load(item.path, "distinct") is None:
            _count_distinct(runner, item)
    values.update_plan()


def _transpose(runner: Runner, item: SparseItem) -> None:
    values = runner.worker.values
    if values.prepared.load(item.path, "rows") is None:
        values.prepared.save(item.path, "rows", _count_rows(values, item))
    turned = values.transposition(item.path)
    bands = [n for n in range(len(turned.bands)) if not (turned.folder / f"band.{n}").exists()]
    if not bands:
        return
    stage = f"{item.path} counted"
    runs = [(item.path, number) for number in range(len(turned.runs))]
    for _ in runner.map("make_run", runs, stage):
        pass
    for _ in runner.map("make_band", [(item.path, number) for number in bands], stage):
        pass
    turned.drop_runs()


def _count_rows(values: Values, item: SparseItem) -> np.ndarray:
    """Row borders of a CSC matrix once it is CSR."""
    read = values.reader(f"{item.source}/indices")
    counts = np.zeros(item.shape[0], np.int64)
    lock = threading.Lock()

    def count(start: int) -> None:
        part = read(start, min(start + _STEP, item.nnz))
        with lock:
            bad = sorting.count_indices(part, counts)
        if bad >= 0:
            msg = (
                f"{values.source.path}: {item.source}/indices[{start + bad}] is {part[bad]}, "
                f"and must be from 0 to {len(counts) - 1}; the source is damaged"
            )
            raise FormatError(msg)

    with ThreadPoolExecutor(default_threads()) as pool:
        for _ in pool.map(count, range(0, item.nnz, _STEP)):
            pass
    return np.concatenate(([0], np.cumsum(counts)))


def _count_distinct(runner: Runner, item: SparseItem) -> None:
    values = runner.worker.values
    indptr = values.stored_rows(item.path).indptr
    blocks = list(row_blocks(indptr, 0, len(indptr) - 1))
    counts = np.zeros(len(indptr) - 1, np.int64)
    jobs = [(item.path, number) for number in range(len(blocks))]
    for job, found in runner.map("count_distinct", jobs, f"{item.path} transposed"):
        a, b = blocks[job[1]]
        counts[a:b] = found
    values.prepared.save(item.path, "distinct", np.concatenate(([0], np.cumsum(counts))))
