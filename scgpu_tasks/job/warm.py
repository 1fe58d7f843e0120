"""Begin early and end quietly: what a flow's process and its workers do around the work.

Dask loads this module in the workers of a flow's cluster (``preload``), and the command line
calls `import_modules` while it waits for a server.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import distributed

WORKER_MODULES = (
    "scgpu_tasks.tasks",
    "scgpu_tasks.job.probe",
    "scgpu_tasks.stages.qc",
    "scgpu_tasks.stages.pca",
    "scgpu_tasks.job.saved",
    "scgpu_tasks.io.checks",
)
FLOW_MODULES = ("scgpu_tasks.job.mainjob",)
RECORD_MODULES = (
    "anndata.io",
    "pyarrow.parquet",
    "matplotlib.figure",
    "matplotlib.backends.backend_svg",
    "scgpu_tasks.records.results",
    "scgpu_tasks.records.tables",
)
"""For a record that is not kept from an earlier run."""


def import_modules(names: tuple[str, ...]) -> None:
    """Import modules by name; what is wrong with one is told by whoever needs it."""
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def dask_setup(_worker: distributed.Worker) -> None:
    """Import a flow's modules in a worker, before it can be given a task.

    A task that imports the same modules at the same time, in another thread and another order,
    can be refused by Python as a deadlock.
    """
    import_modules(WORKER_MODULES)


def dask_teardown(_worker: distributed.Worker) -> None:
    """Close a worker's standard error.

    A run that is stopped closes its workers in the middle of a task, whose thread then trips
    over half of the interpreter; what it prints helps nobody.
    """
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), 2)
