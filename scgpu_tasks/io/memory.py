"""How much memory this process may use, without importing Dask's scheduler for it."""

from __future__ import annotations

import resource
from functools import cache
from pathlib import Path

import psutil

_CGROUPS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@cache
def memory_limit() -> int:
    """Bytes of memory of this machine, or what its control group or ulimit leaves of it.

    The same number as ``distributed.system.MEMORY_LIMIT``.
    """
    limit = int(psutil.virtual_memory().total)
    for path in _CGROUPS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        # The word "max" where there is none.
        if text.isdigit() and int(text) > 0:
            limit = min(limit, int(text))
    soft, _ = resource.getrlimit(resource.RLIMIT_RSS)
    return min(limit, soft) if soft > 0 else limit
