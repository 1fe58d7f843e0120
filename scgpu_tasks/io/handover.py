"""How an output buffer on a GPU passes from its owner's stream to a read."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from scgpu_tasks.io.gpu_packages import load_cupy


def mark(target: Any) -> Any:
    """Record on the current stream that ``target`` may be written from here on.

    Whoever allocated it did so on a stream; work that still runs there may use the same
    memory until this event.
    """
    cp = load_cupy()
    with cp.cuda.Device(target.device.id):
        event = cp.cuda.Event(disable_timing=True)
        cp.cuda.get_current_stream().record(event)
    return event


def may_be_written(target: Any) -> bool:
    """Whether nothing runs on the current stream that might use the memory of ``target``."""
    cp = load_cupy()
    with cp.cuda.Device(target.device.id):
        return bool(cp.cuda.get_current_stream().done)


def upload(host: NDArray[Any], target: Any, ready: Any) -> None:
    """Copy a host array into ``target``, and return when it is there."""
    cp = load_cupy()
    with cp.cuda.Device(target.device.id):
        stream = cp.cuda.Stream(non_blocking=True)
        stream.wait_event(ready)
        with stream:
            if target.flags.c_contiguous or target.flags.f_contiguous:
                target.set(host)
            else:
                target[...] = cp.asarray(host)
        stream.synchronize()
