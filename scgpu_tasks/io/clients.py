"""The Dask client that work is given to where the caller names none."""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Callable
from typing import Any


def current_client(stack: contextlib.ExitStack) -> Any:
    """Find the Dask client to use; inside a worker's task, one that gives its thread free.

    A client within whose ``with`` block we are comes first, then the latest one made; one that
    is closed, or not connected, never.
    """
    if "distributed" not in sys.modules:
        # Nobody can have made a client.
        return None
    from distributed import Client, get_worker, worker_client

    try:
        get_worker()
    except ValueError:
        return _running(Client.current) or contextvars.Context().run(_running, Client.current)
    return stack.enter_context(worker_client())


def _running(find: Callable[[], Any]) -> Any:
    """Find a client, if there is one that can run tasks: one that was closed may be current."""
    try:
        client = find()
    except ValueError:
        return None
    return client if client.status == "running" else None
