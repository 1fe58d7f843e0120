"""How much of the host's memory a process may still take."""

from __future__ import annotations

import sys
from typing import Any

import psutil

from scgpu_tasks.io.memory import memory_limit

_SHARE = 0.9
"""Of a worker's limit: Dask ends one that takes 95 %."""


def free_memory() -> int:
    """Bytes of memory that this process may still use: of its worker's limit, if it has one."""
    own = psutil.Process().memory_info().rss
    limit = int(_SHARE * (worker_limit() or memory_limit()))
    return int(min(psutil.virtual_memory().available, limit - own))


def worker_limit() -> int | None:
    """Memory limit of the Dask worker whose task this thread runs; None elsewhere."""
    worker = current_worker()
    limit = None if worker is None else worker.memory_manager.memory_limit
    return int(limit) if limit else None


def current_worker() -> Any:
    """Give the Dask worker whose task this thread runs, or None."""
    if "distributed" not in sys.modules:
        return None
    from distributed import get_worker

    try:
        return get_worker()
    except ValueError:
        return None
