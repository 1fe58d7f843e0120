"""CuPy and KvikIO in this process: found or named as missing, and set up for the machine."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from scgpu_tasks.errors import MissingPackageError
from scgpu_tasks.io import nvcomp
from scgpu_tasks.io.settings import ReadSettings

_ENVIRONMENT = {
    "num_threads": ("KVIKIO_NTHREADS", "KVIKIO_NUM_THREADS"),
    "task_size": ("KVIKIO_TASK_SIZE",),
    "bounce_buffer_size": ("KVIKIO_BOUNCE_BUFFER_SIZE",),
}

_PIP = "pip install 'scgpu-tasks[cu13]' (or [cu12] for CUDA 12)"

_PAGE = 4096


def require_gpu() -> None:
    """Check that this process can read by GPU, and set KvikIO up for this machine.

    Raises
    ------
    MissingPackageError
        Names what is missing, and the pip line.
    """
    load_cupy()
    load_kvikio()
    nvcomp.load()


@cache
def load_cupy() -> Any:
    """Import CuPy where there is a GPU for it."""
    try:
        import cupy
    except ImportError as error:
        msg = f"reading by GPU needs CuPy: {_PIP}"
        raise MissingPackageError(msg) from error
    try:
        n = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        msg = f"reading by GPU needs an NVIDIA GPU and its driver: {error}"
        raise MissingPackageError(msg) from error
    if n == 0:
        msg = "reading by GPU needs an NVIDIA GPU: CUDA sees none"
        raise MissingPackageError(msg)
    return cupy


@cache
def load_kvikio() -> Any:
    """Import KvikIO and set it up."""
    try:
        import kvikio
        import kvikio.defaults
    except ImportError as error:
        msg = f"reading by GPU needs KvikIO: {_PIP}"
        raise MissingPackageError(msg) from error
    _set_up(kvikio, _settings)
    return kvikio


def _set_up(kvikio: Any, settings: ReadSettings) -> None:
    wanted = {
        "num_threads": settings.io_threads or io_threads(),
        "task_size": settings.io_task_bytes,
        "bounce_buffer_size": settings.io_task_bytes,
    }
    for name, value in wanted.items():
        # Whoever set KvikIO up by its environment keeps that. Setting what is set already
        # would start all its threads anew.
        fixed = any(key in os.environ for key in _ENVIRONMENT[name])
        if not fixed and kvikio.defaults.get(name) != value:
            kvikio.defaults.set(name, value)


def io_threads() -> int:
    """Return KvikIO's number of threads: half of the cores for each GPU, from 4 to 16."""
    cores = len(os.sched_getaffinity(0))
    return max(4, min(16, cores // (2 * _machine_gpus())))


def _machine_gpus() -> int:
    """Count the GPUs of the machine, also where this process may see one of them only."""
    nodes = Path("/dev").glob("nvidia[0-9]*")
    return max(1, sum(1 for _ in nodes), int(load_cupy().cuda.runtime.getDeviceCount()))


_settings = ReadSettings()


def settings() -> ReadSettings:
    """Return the settings of this process."""
    return _settings


def configure(changed: ReadSettings) -> ReadSettings:
    """Read with other settings from here on, in this process; no read may be running.

    Returns
    -------
    The settings before.
    """
    global _settings
    before, _settings = _settings, changed
    if load_kvikio.cache_info().currsize:
        _set_up(load_kvikio(), changed)
    return before


def open_file(path: str) -> Any:
    """Open a file for KvikIO."""
    return load_kvikio().CuFile(path, "r")


def io_task(nbytes: int) -> int:
    """Return how much of ``nbytes`` one thread of KvikIO reads in one go."""
    wanted = settings()
    threads = int(load_kvikio().defaults.get("num_threads"))
    share = -(-nbytes // (threads * _PAGE)) * _PAGE
    return min(max(share, wanted.io_least_bytes), wanted.io_task_bytes)
