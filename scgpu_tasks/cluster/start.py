"""One factory for the Dask clusters that notebooks, the library and the flows run on.

`make_cluster` returns a Dask ``Cluster`` (which is what a Prefect ``DaskTaskRunner`` takes as
``cluster_class``), `start_cluster` a ``distributed.Client``. On a machine with GPUs that is a
``LocalCUDACluster`` with one worker per GPU, elsewhere a ``LocalCluster`` cut to the cores and
the memory that this process may use.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from scgpu_tasks.cluster import gpus
from scgpu_tasks.cluster.adopt import connect
from scgpu_tasks.cluster.checks import (
    LOOPBACK,
    refuse_child,
    refuse_unguarded_main,
    require_free_port,
    require_local_directory,
    resolve_security,
    split_address,
)
from scgpu_tasks.cluster.launch import block_interrupts, launch
from scgpu_tasks.cluster.plan import MAX_GPU_SHARE, ClusterPlan, plan_cluster, resolve_device
from scgpu_tasks.errors import ParameterError, ScgpuError

if TYPE_CHECKING:
    import distributed
    from distributed.deploy import Cluster

logger = logging.getLogger(__name__)

WORKER_PRELOAD = "scgpu_tasks.cluster.workers"
# Options and cluster of the last `prestart`, until somebody takes it.
_prestarted: tuple[dict[str, Any], Future[Cluster]] | None = None


def make_cluster(
    device: str = "auto",
    *,
    workers: int | None = None,
    threads: int | None = None,
    memory_limit: int | str | None = None,
    devices: str | Sequence[int | str] | None = None,
    protocol: str | None = None,
    gpu_share: float | None = None,
    managed_memory: bool = False,
    host: str = LOOPBACK,
    scheduler_port: int = 0,
    dashboard_address: str = f"{LOOPBACK}:0",
    local_directory: str | None = None,
    security: distributed.Security | bool | None = None,
    timeout: float = 120.0,
    **options: Any,
) -> Cluster:
    """Start a Dask cluster that suits this machine; close it, or use it in ``with``.

    Parameters
    ----------
    device, workers, threads, memory_limit, devices, protocol, gpu_share, managed_memory
        As for `plan_cluster`.
    host
        Address to listen on; loopback unless asked otherwise.
    scheduler_port, dashboard_address
        Ports; 0 takes a free one.
    local_directory
        Where workers spill; by default the system's temporary folder.
    security
        ``distributed.Security`` for TLS; True makes certificates that live as long as the
        cluster. By default what Dask's configuration says.
    timeout
        Seconds that workers may take to start.
    **options
        Passed on to ``LocalCluster`` or ``LocalCUDACluster``.

    Returns
    -------
    The running cluster.

    Raises
    ------
    ClusterError
        The cluster cannot start; no process of it is left.

    Examples
    --------
    >>> from scgpu_tasks.cluster import make_cluster
    >>> if __name__ == "__main__":
    ...     with make_cluster("cpu", workers=1) as cluster:
    ...         print(len(cluster.scheduler_info["workers"]))
    1
    """
    refuse_unguarded_main()
    if options.get("processes", True):
        refuse_child()
    security, tls = resolve_security(security)
    plan = plan_cluster(
        device,
        workers=workers,
        threads=threads,
        memory_limit=memory_limit,
        devices=devices,
        protocol="tls" if tls else protocol,
        gpu_share=gpu_share,
        managed_memory=managed_memory,
    )
    require_free_port(host, scheduler_port, "scheduler_port")
    require_free_port(*split_address(dashboard_address), "dashboard_address")
    require_local_directory(local_directory)
    settings: dict[str, Any] = {
        "n_workers": plan.workers,
        "threads_per_worker": plan.threads,
        "memory_limit": plan.memory_limit,
        "host": host,
        "scheduler_port": scheduler_port,
        "dashboard_address": dashboard_address,
        "local_directory": local_directory,
        "security": security,
        "protocol": plan.protocol,
        "silence_logs": logging.ERROR,
        **options,
        "preload": [WORKER_PRELOAD, *options.get("preload", ())],
    }
    if plan.device == "gpu":
        settings |= _gpu_settings(plan, managed_memory=managed_memory)
    cluster = launch(plan, settings, timeout)
    logger.info("Dask cluster at %s: %s", cluster.scheduler_address, plan)
    return cluster


def flow_cluster(device: str, workers: int | None) -> dict[str, Any]:
    """Options of the cluster that a flow starts; workers import a flow's modules at once.

    Parameters
    ----------
    device, workers
        As the flow's parameters.
    """
    return {
        "device": resolve_device(device),
        "workers": workers,
        "preload": ["scgpu_tasks.job.warm"],
    }


def prestart(**options: Any) -> Callable[[], None]:
    """Begin to start a cluster while the caller does something else.

    The next `ready_cluster` with the same options hands that cluster out, or raises what kept
    it from starting.

    Parameters
    ----------
    **options
        As for `make_cluster`.

    Returns
    -------
    A function that closes the cluster if nobody has asked for it.
    """
    global _prestarted
    pool = ThreadPoolExecutor(
        1, thread_name_prefix="scgpu-cluster", initializer=block_interrupts
    )
    mine = _prestarted = (options, pool.submit(make_cluster, **options))
    pool.shutdown(wait=False)

    def discard() -> None:
        if _take_prestarted(options) is mine[1]:
            with contextlib.suppress(ScgpuError):
                mine[1].result().close()

    return discard


def ready_cluster(**options: Any) -> Cluster:
    """Hand out the cluster that `prestart` began with these options, or start one.

    Parameters
    ----------
    **options
        As for `make_cluster`.
    """
    begun = _take_prestarted(options)
    return make_cluster(**options) if begun is None else begun.result()


def _take_prestarted(options: dict[str, Any]) -> Future[Cluster] | None:
    global _prestarted
    if _prestarted is None or _prestarted[0] != options:
        return None
    future, _prestarted = _prestarted[1], None
    return future


def start_cluster(scheduler: str | None = None, **options: Any) -> distributed.Client:
    """Client of a new cluster for this machine, or of one that already runs.

    Parameters
    ----------
    scheduler
        Address of a running scheduler, such as ``"tcp://10.0.0.1:8786"``; it is left running.
        None starts a cluster with `make_cluster`; closing the client then closes it.
    **options
        As for `make_cluster`; with ``scheduler`` only ``security`` and ``timeout``.

    Returns
    -------
    The current client, as Dask has it.

    Raises
    ------
    ClusterError
        Nothing can be started, or nobody answers at that address.
    """
    import distributed

    if scheduler is not None:
        extra = set(options) - {"security", "timeout"}
        if extra:
            msg = f"{', '.join(sorted(extra))} cannot be set for a cluster that already runs"
            raise ParameterError(msg)
        return connect(scheduler, **options)

    cluster = make_cluster(**options)

    class OwningClient(distributed.Client):
        """Client that takes its cluster down with it."""

        _ended = False

        async def _close(self, fast: bool = False) -> None:
            await super()._close(fast=fast)
            await cluster.close()

        def close(self, *arguments: Any, **options: Any) -> Any:
            closing = super().close(*arguments, **options)  # type: ignore[no-untyped-call]
            # Once only: Python's collector closes clients again, in whatever thread it runs.
            if closing is None and not self._ended:
                self._ended = True
                # It is closed; this ends the thread of its event loop.
                cluster.close()
            return closing

    client: distributed.Client = OwningClient(cluster)  # type: ignore[no-untyped-call]
    return client


def _gpu_settings(plan: ClusterPlan, *, managed_memory: bool) -> dict[str, Any]:
    gpus.require_driver()
    gpus.require_memory(plan.devices)
    limit = plan.gpu_memory_limit
    settings: dict[str, Any] = {
        "CUDA_VISIBLE_DEVICES": list(plan.devices),
        "rmm_allocator_external_lib_list": ["cupy"],
        "rmm_maximum_pool_size": limit,
        "device_memory_limit": None,
    }
    if not managed_memory:
        # It grows as needed; the limit is where it stops.
        return settings | {"rmm_async": True}
    total = min(gpus.total_bytes(name) for name in plan.devices)
    first = int(MAX_GPU_SHARE * total)
    first = first if limit is None else min(first, limit)
    return settings | {"rmm_managed_memory": True, "rmm_pool_size": first}
