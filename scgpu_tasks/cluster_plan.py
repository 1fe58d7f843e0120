"""What a Dask cluster on this machine should be made of: processes, threads, memory, GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from scgpu_tasks.errors import ClusterError, MissingPackageError, ParameterError
from scgpu_tasks.io.memory import memory_limit

DeviceKind = Literal["cpu", "gpu"]

THREADS_PER_PROCESS = 4
"""Kernels and decoding release the GIL; beyond about four threads the rest does not scale."""
THREADS_PER_GPU = 4
MIN_WORKER_BYTES = 512 * 2**20
"""A worker with NumPy, Numba and zarr loaded takes about half of this."""
MEMORY_SHARE = 0.9


@dataclass(frozen=True)
class ClusterPlan:
    """What a cluster will be made of; small and JSON-able, for logs and the run record.

    Parameters
    ----------
    device
        ``"cpu"`` or ``"gpu"``.
    workers
        Worker processes.
    threads
        Threads in each.
    memory_limit
        Bytes of host memory for each.
    devices
        GPUs, one for each worker, as indices or UUIDs; empty on a CPU.
    protocol
        ``"tcp"``, ``"ucx"`` or ``"tls"``.
    """

    device: DeviceKind
    workers: int
    threads: int
    memory_limit: int
    devices: tuple[str, ...] = ()
    protocol: str = "tcp"

    def to_json(self) -> dict[str, Any]:
        """Field names and values."""
        return {**asdict(self), "devices": list(self.devices)}


def resolve_device(device: str = "auto") -> DeviceKind:
    """Which kind of device to run on.

    Parameters
    ----------
    device
        ``"auto"`` takes the GPUs when a driver shows one and dask-cuda is installed.

    Returns
    -------
    ``"cpu"`` or ``"gpu"``.

    Raises
    ------
    ParameterError
        Any other word than auto, cpu, gpu.
    MissingPackageError
        ``"gpu"`` without a GPU or without dask-cuda.
    """
    if device not in ("auto", "cpu", "gpu"):
        msg = f"device must be auto, cpu or gpu, not {device!r}"
        raise ParameterError(msg)
    if device == "cpu":
        return "cpu"
    try:
        found = gpu_names()
    except MissingPackageError:
        if device == "gpu":
            raise
        return "cpu"
    if not found and device == "gpu":
        msg = (
            "device is gpu, but the NVIDIA driver shows no GPU here "
            "(nvidia-smi lists what it sees); use --device cpu"
        )
        raise MissingPackageError(msg)
    return "gpu" if found else "cpu"


def gpu_names() -> list[str]:
    """UUIDs of the GPUs that the driver shows, in its order.

    Raises
    ------
    MissingPackageError
        dask-cuda or pynvml is not installed; the message has the pip line.
    """
    try:
        import dask_cuda  # noqa: F401
        import pynvml
    except ImportError as error:
        msg = (
            f"GPU workers need {error.name}: pip install 'scgpu-tasks[cu13]' "
            "(or [cu12] for a CUDA 12 driver)"
        )
        raise MissingPackageError(msg) from error
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        names = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    except pynvml.NVMLError:
        return []
    return [name.decode() if isinstance(name, bytes) else name for name in names]


def plan_cluster(
    device: str = "auto",
    *,
    workers: int | None = None,
    threads: int | None = None,
    memory_limit: int | str | None = None,
    devices: str | Sequence[int | str] | None = None,
    protocol: str | None = None,
) -> ClusterPlan:
    """Choose processes, threads and memory for this machine.

    Parameters
    ----------
    device
        ``"auto"``, ``"cpu"`` or ``"gpu"``.
    workers
        Worker processes; by default one for every four cores, or one for every GPU.
    threads
        Threads in each; by default the cores shared out, or 4 for each GPU.
    memory_limit
        Host memory of each worker, bytes or a text such as ``"4GB"``; by default 90 % of what
        this process may use, shared out.
    devices
        GPUs to use, as indices or UUIDs (``"0,1"``); by default CUDA_VISIBLE_DEVICES or all.
    protocol
        ``"tcp"`` or ``"ucx"``; by default UCX on GPUs when distributed-ucxx is installed.

    Returns
    -------
    What the cluster should be made of; nothing is started.

    Raises
    ------
    ParameterError
        A number below 1, or an unknown word.
    ClusterError
        Not enough memory for that many workers, or a device that is not there.
    MissingPackageError
        GPUs are asked for and a package is missing.
    """
    for name, value in (("workers", workers), ("threads", threads)):
        if value is not None and value < 1:
            msg = f"{name} must be at least 1, not {value}"
            raise ParameterError(msg)
    kind = resolve_device(device)
    if kind == "cpu" and devices is not None:
        msg = f"devices={devices!r} names GPUs, but this cluster runs on the CPU"
        raise ClusterError(msg)
    cores, memory = _machine()
    chosen: tuple[str, ...] = ()
    if kind == "gpu":
        chosen = _choose_devices(devices, gpu_names())[:workers]
        if workers is not None and workers > len(chosen):
            msg = f"{workers} GPU workers asked for, but there are {len(chosen)} GPUs to use"
            raise ClusterError(msg)
        workers, threads = len(chosen), threads or THREADS_PER_GPU
        protocol = protocol or ("ucx" if _has_ucx() else "tcp")
    else:
        workers = workers or max(1, -(-cores // THREADS_PER_PROCESS))
        threads = threads or max(1, cores // workers)
    limit = _memory_limit(memory_limit, workers, memory)
    return ClusterPlan(kind, workers, threads, limit, chosen, protocol or "tcp")


def _choose_devices(
    devices: str | Sequence[int | str] | None, found: Sequence[str]
) -> tuple[str, ...]:
    source = "devices"
    if devices is None:
        devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        source = "CUDA_VISIBLE_DEVICES"
        if devices is None:
            return tuple(found)
    items = devices.split(",") if isinstance(devices, str) else [str(d) for d in devices]
    chosen = []
    for item in (text.strip() for text in items):
        if item.isdigit() and int(item) < len(found):
            chosen.append(found[int(item)])
            continue
        matches = [name for name in found if item and name.startswith(item)]
        if len(matches) != 1:
            msg = (
                f"{source}={devices!r} names no GPU of this machine: {item!r} is neither an "
                f"index below {len(found)} nor one of {', '.join(found) or 'no GPUs'}"
            )
            raise ClusterError(msg)
        chosen.append(matches[0])
    if len(set(chosen)) < len(chosen):
        msg = f"{source}={devices!r} names a GPU twice; each worker needs its own"
        raise ClusterError(msg)
    return tuple(chosen)


def _has_ucx() -> bool:
    from importlib.util import find_spec

    return find_spec("distributed_ucxx") is not None


def _machine() -> tuple[int, int]:
    """Cores and bytes of memory that this process may use, cgroup limits included."""
    from dask.system import CPU_COUNT

    return CPU_COUNT, memory_limit()


def _memory_limit(asked: int | str | None, workers: int, total: int) -> int:
    if asked is None:
        limit = int(total * MEMORY_SHARE / workers)
    else:
        from dask.utils import parse_bytes

        try:
            limit = parse_bytes(asked)
        except ValueError as error:
            msg = f"memory_limit={asked!r} is no amount of memory; write it as 4GB or 4GiB"
            raise ParameterError(msg) from error
    if limit < MIN_WORKER_BYTES:
        msg = (
            f"{workers} workers would have {limit / 2**20:.0f} MiB of memory each, and need "
            f"{MIN_WORKER_BYTES / 2**20:.0f} MiB at least; ask for fewer workers"
            if asked is None
            else f"memory_limit={asked} is {limit / 2**20:.0f} MiB; a worker needs "
            f"{MIN_WORKER_BYTES / 2**20:.0f} MiB at least"
        )
        raise ClusterError(msg)
    if asked is not None and limit * workers > total:
        msg = (
            f"{workers} workers with memory_limit={asked} need {limit * workers / 2**30:.1f} "
            f"GiB, and this process may use {total / 2**30:.1f} GiB"
        )
        raise ClusterError(msg)
    return limit
