"""What every Dask worker should have, ours or somebody else's: set where it can be, else told.

Workers that `scgpu_tasks.cluster` starts load this module as they start, restarted ones too. To
the workers of a scheduler that somebody else runs, `WorkerSettings` goes as a plugin, which
those that join later get as well.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import WorkerPlugin
from threadpoolctl import threadpool_info

from scgpu_tasks import __version__
from scgpu_tasks.cluster.plan import MAX_GPU_SHARE
from scgpu_tasks.errors import MissingPackageError
from scgpu_tasks.kernels.blas import one_thread

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger(__name__)

_START = (
    "start it with `dask-cuda-worker --rmm-async --rmm-maximum-pool-size 0.75 "
    "--rmm-allocator-external-lib-list cupy`"
)
_lock = threading.Lock()
_reads: Any = None
_blas: Any = None
_reads_missing = ""


async def dask_setup(_worker: Worker) -> None:
    """Prepare a worker of ours; Dask calls it in every one, restarted ones included.

    Ctrl-C reaches every process of a terminal's foreground group. The process that owns the
    cluster decides what it means, and ends its workers; they themselves ignore it.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A worker of a CPU cluster stays light.
    if "dask_cuda" in sys.modules:
        await asyncio.to_thread(switch_reads_on)


class WorkerSettings(WorkerPlugin):
    """Sets up a worker that somebody else started; whatever is amiss is left to `facts`."""

    name = f"scgpu-tasks-{__version__}"
    idempotent = True

    async def setup(self, worker: Worker) -> None:  # noqa: ARG002
        """Apply what can be applied to a worker that runs."""
        await asyncio.to_thread(_apply)

    def teardown(self, worker: Worker) -> None:  # noqa: ARG002
        """Give back what was changed in the process."""
        global _blas
        with _lock:
            limits, _blas = _blas, None
        if limits is not None:
            limits.close()


def _apply() -> None:
    global _blas
    with _lock:
        if _blas is None:
            # Tasks bring their own threads; and a product's bytes depend on BLAS's.
            _blas = ExitStack()
            _blas.enter_context(one_thread())
    if has_gpu():
        switch_reads_on()
        _limit_gpu_memory()


def has_gpu() -> bool:
    """Tell whether this process sees a GPU and has CuPy for it."""
    if find_spec("cupy") is None:
        return False
    import cupy

    try:
        return int(cupy.cuda.runtime.getDeviceCount()) > 0
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


def switch_reads_on() -> None:
    """Let zarr read to the GPU in this process, if the packages for it are there."""
    global _reads, _reads_missing
    from scgpu_tasks.io.switch import enable

    with _lock:
        if _reads is not None:
            return
        try:
            _reads = enable()
        except MissingPackageError as error:
            _reads_missing = str(error)
            logger.warning("%s", error)


def _limit_gpu_memory() -> None:
    """Put CuPy on RMM where RMM was set up, else limit CuPy's own pool."""
    import cupy

    if _rmm_chain():
        from rmm.allocators.cupy import rmm_cupy_allocator

        if cupy.cuda.get_allocator() is not rmm_cupy_allocator:
            cupy.cuda.set_allocator(rmm_cupy_allocator)
        return
    pool = cupy.get_default_memory_pool()
    if not pool.get_limit():
        pool.set_limit(fraction=MAX_GPU_SHARE)


def _rmm_chain() -> list[Any]:
    """RMM's resource for this device and those below it; empty where nobody set one up."""
    if find_spec("rmm") is None:
        return []
    import rmm

    chain = []
    resource = rmm.mr.get_current_device_resource()
    while resource is not None:
        chain.append(resource)
        upstream = getattr(resource, "get_upstream", None)
        resource = None if upstream is None else upstream()
    plain = len(chain) == 1 and type(chain[0]).__name__ == "CudaMemoryResource"
    return [] if plain else chain


def facts(dask_worker: Worker) -> dict[str, Any]:
    """Describe a worker as it is; Dask fills in the argument.

    Returns
    -------
    host, pid, threads, memory_limit, blas_threads, of a GPU worker also gpu, gpu_memory,
    gpu_memory_limit, allocator and gpu_reads; and ``amiss``: what could not be set, as a list
    of sentences. JSON-able.
    """
    limit = dask_worker.memory_manager.memory_limit
    blas = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    amiss = []
    if not limit:
        amiss.append("it has no memory limit: start it with --memory-limit")
    if dask_worker.nanny is None:
        amiss.append("no nanny starts it again if it dies: start it without --no-nanny")
    found = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "threads": dask_worker.state.nthreads,
        "memory_limit": limit,
        "blas_threads": max(blas, default=None),
    }
    if has_gpu():
        found |= _gpu_facts(amiss)
    elif Path("/dev/nvidiactl").exists():
        amiss.append("it sees no GPU, though the machine has one: CuPy, or a visible device")
    return {**found, "amiss": amiss}


def _gpu_facts(amiss: list[str]) -> dict[str, Any]:
    import cupy

    from scgpu_tasks.io.switch import is_enabled

    device = cupy.cuda.Device()
    properties = cupy.cuda.runtime.getDeviceProperties(device.id)
    chain = _rmm_chain()
    limits = [r.get_allocation_limit() for r in chain if hasattr(r, "get_allocation_limit")]
    if chain:
        from rmm.allocators.cupy import rmm_cupy_allocator

        allocator = " on ".join(type(resource).__name__ for resource in chain)
        limit = min(limits, default=None)
        if cupy.cuda.get_allocator() is not rmm_cupy_allocator:
            amiss.append(f"CuPy does not take its memory from RMM: {_START}")
    else:
        allocator = "CuPy's own pool"
        limit = cupy.get_default_memory_pool().get_limit() or None
        amiss.append(f"RMM is not set up, CuPy's own pool is slower: {_START}")
    if not is_enabled():
        amiss.append(f"GPU reads are off: {_reads_missing or 'their setup has not run'}")
    return {
        "gpu": properties["name"].decode(),
        "gpu_memory": int(properties["totalGlobalMem"]),
        "gpu_memory_limit": None if limit is None else int(limit),
        "allocator": allocator,
        "gpu_reads": is_enabled(),
    }
