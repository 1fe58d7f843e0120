"""One stream for each thread, so that the threads of a process overlap on the GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

_mine = threading.local()


@contextlib.contextmanager
def own_stream() -> Iterator[Any]:
    """Make this thread's own stream the current one; waits for it at the end.

    Memory that is allocated within belongs to this stream: what leaves the thread is complete
    when the context ends.
    """
    import cupy

    device = int(cupy.cuda.runtime.getDevice())
    streams = _mine.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = cupy.cuda.Stream(non_blocking=True)
    stream = streams[device]
    with stream:
        yield stream
        stream.synchronize()
