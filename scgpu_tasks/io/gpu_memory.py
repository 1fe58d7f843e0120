"""How much memory of a GPU there is to take."""

from __future__ import annotations

import sys
from typing import Any


def memory_available() -> int:
    """Return the bytes of the current device's memory that this process may still take.

    Where RMM has a pool or a limit, what is left in it counts. Where it has none here, at
    least half of the device: what is not free may be held by the workers that will read.
    """
    import cupy

    free, total = (int(n) for n in cupy.cuda.runtime.memGetInfo())
    rmm = sys.modules.get("rmm")
    if rmm is None:
        return max(free, total // 2)
    resource = rmm.mr.get_current_device_resource()
    while resource is not None:
        if isinstance(resource, rmm.mr.LimitingResourceAdaptor):
            left = resource.get_allocation_limit() - resource.get_allocated_bytes()
            return max(0, int(left))
        if isinstance(resource, rmm.mr.PoolMemoryResource):
            # The pool hands out what it took from the device already.
            return max(free, int(resource.pool_size()))
        resource = _upstream(resource)
    return max(free, total // 2)


def _upstream(resource: Any) -> Any:
    upstream = getattr(resource, "get_upstream", None)
    return None if upstream is None else upstream()
