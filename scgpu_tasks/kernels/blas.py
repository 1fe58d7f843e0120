"""BLAS on one thread: a product's bytes depend on how many threads it is cut for.

Threads of a process share the setting of most builds of OpenBLAS, and threadpoolctl lets only
the first thread that touched it change it. So all that are in `one_thread` share one limit,
which the first sets and the last takes back, whichever thread that is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import threadpoolctl

_lock = threading.Lock()
_users = 0
_limits: Any = None


@contextmanager
def one_thread() -> Iterator[None]:
    """Let BLAS use one thread in the block; in any thread, and in many at once."""
    _enter()
    try:
        # Of BLAS on OpenMP, each thread has a setting of its own.
        with threadpoolctl.threadpool_limits(1):
            yield
    finally:
        _leave()


def _enter() -> None:
    global _users, _limits
    with _lock:
        if not _users:
            # Numba's products go to SciPy's BLAS, which is another one than NumPy's; a library
            # that is loaded later has no limit.
            import scipy.linalg  # noqa: F401

            _take_control()
            _limits = threadpoolctl.threadpool_limits(1)
        _users += 1


def _leave() -> None:
    global _users, _limits
    with _lock:
        _users -= 1
        if not _users:
            _take_control()
            _limits.restore_original_limits()
            _limits = None
            _take_control()


def _take_control() -> None:
    """Let this thread, and then any other, change the setting."""
    openblas: Any = threadpoolctl.OpenBLASController
    # Older releases let every thread change it.
    if hasattr(openblas, "clear_controlling_thread"):
        openblas.clear_controlling_thread(force=True)
