"""What a Dask cluster on this machine should be made of: processes, threads, memory, GPUs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from scgpu_tasks.cluster import gpus
from scgpu_tasks.errors import ClusterError, MissingPackageError, ParameterError
from scgpu_tasks.io.memory import memory_limit

logger = logging.getLogger(__name__)

DeviceKind = Literal["cpu", "gpu"]

THREADS_PER_PROCESS = 4
"""Kernels and decoding release the GIL; beyond about four threads the rest does not scale."""
THREADS_PER_GPU = 4
MIN_WORKER_BYTES = 512 * 2**20
"""A worker with NumPy, Numba and zarr loaded takes about half of this."""
MEMORY_SHARE = 0.9
MAX_GPU_SHARE = 0.75
"""The rest is for the calling process, CUDA contexts and libraries that bring their own."""
_ALIGNED = 1 << 20
_UCX_PIP = "pip install distributed-ucxx-cu13 (or -cu12)"


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
    protocol_note
        Why it is that one, where a faster one is not there.
    gpu_memory_limit
        Bytes of each GPU's memory that its worker may take; 0 on a CPU, None without limit.
    allocator
        What hands out GPU memory; empty on a CPU.
    """

    device: DeviceKind
    workers: int
    threads: int
    memory_limit: int
    devices: tuple[str, ...] = ()
    protocol: str = "tcp"
    protocol_note: str = ""
    gpu_memory_limit: int | None = 0
    allocator: str = ""

    def to_json(self) -> dict[str, Any]:
        """Field names and values."""
        return {**asdict(self), "devices": list(self.devices)}

    def __str__(self) -> str:
        """One line for a log."""
        where = "CPU"
        if self.devices:
            limit = self.gpu_memory_limit
            most = "no limit" if limit is None else f"at most {limit / 2**30:.1f} GiB each"
            where = f"GPUs {', '.join(self.devices)} ({self.allocator}, {most})"
        note = f" ({self.protocol_note})" if self.protocol_note else ""
        return (
            f"{self.workers} worker{'s' * (self.workers > 1)} of {self.threads} "
            f"thread{'s' * (self.threads > 1)}, "
            f"{self.memory_limit / 2**30:.1f} GiB each, {self.protocol}{note}, {where}"
        )


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
    if device == "cpu" or (device == "auto" and gpus.hidden()):
        return "cpu"
    try:
        found = gpus.gpu_names()
    except MissingPackageError:
        if device == "gpu":
            raise
        return "cpu"
    except ClusterError as error:
        if device == "gpu":
            raise
        logger.warning("the CPU is used, because %s", error)
        return "cpu"
    if not found and device == "gpu":
        msg = (
            "device is gpu, but the NVIDIA driver shows no GPU here "
            "(nvidia-smi lists what it sees); use --device cpu"
        )
        raise MissingPackageError(msg)
    return "gpu" if found else "cpu"


def plan_cluster(
    device: str = "auto",
    *,
    workers: int | None = None,
    threads: int | None = None,
    memory_limit: int | str | None = None,
    devices: str | Sequence[int | str] | None = None,
    protocol: str | None = None,
    gpu_share: float | None = None,
    managed_memory: bool = False,
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
    gpu_share
        Share of each GPU's memory for RMM's allocator; by default 0.75, and what RMM chooses
        with `managed_memory`. More than 0.75 needs `managed_memory`.
    managed_memory
        RMM pool over managed memory, which may exceed the GPU's.

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
        chosen = gpus.choose_devices(devices, gpus.gpu_names())[:workers]
        if workers is not None and workers > len(chosen):
            msg = f"{workers} GPU workers asked for, but there are {len(chosen)} GPUs to use"
            raise ClusterError(msg)
        workers, threads = len(chosen), threads or THREADS_PER_GPU
    else:
        workers = workers or max(1, -(-cores // THREADS_PER_PROCESS))
        threads = threads or max(1, cores // workers)
    limit = _memory_limit(memory_limit, workers, memory)
    protocol, note = _choose_protocol(protocol, kind, managed_memory=managed_memory)
    plan = ClusterPlan(kind, workers, threads, limit, chosen, protocol, note)
    share = _checked_share(gpu_share, managed_memory=managed_memory)
    return plan if kind == "cpu" else _with_gpu_memory(plan, share, managed_memory)


def _checked_share(share: float | None, *, managed_memory: bool) -> float | None:
    if share is None:
        return None if managed_memory else MAX_GPU_SHARE
    if share <= 0 or (share > MAX_GPU_SHARE and not managed_memory):
        msg = (
            f"gpu_share must be above 0 and at most {MAX_GPU_SHARE}, not {share}; more needs "
            "managed_memory=True"
        )
        raise ParameterError(msg)
    return share


def _with_gpu_memory(
    plan: ClusterPlan, share: float | None, managed_memory: bool
) -> ClusterPlan:
    # GPUs of one machine are alike, as a rule; the smallest one counts.
    total = min(gpus.total_bytes(name) for name in plan.devices)
    limit = None if share is None else int(share * total) // _ALIGNED * _ALIGNED
    allocator = "RMM pool of managed memory" if managed_memory else "RMM asynchronous"
    return replace(plan, gpu_memory_limit=limit, allocator=allocator)


def _choose_protocol(
    asked: str | None, kind: DeviceKind, *, managed_memory: bool
) -> tuple[str, str]:
    """Protocol, and why it is that one where somebody may wonder."""
    if asked not in (None, "tcp", "ucx", "ucxx", "tls"):
        msg = f"protocol must be tcp, ucx or tls, not {asked!r}"
        raise ParameterError(msg)
    if asked in ("ucx", "ucxx"):
        if managed_memory:
            msg = "UCX cannot send managed memory: leave protocol= out, or managed_memory="
            raise ParameterError(msg)
        if not _has_ucx():
            msg = f"protocol={asked!r} needs distributed-ucxx: {_UCX_PIP}"
            raise MissingPackageError(msg)
        return asked, ""
    if asked is not None or kind == "cpu":
        return asked or "tcp", ""
    if managed_memory:
        return "tcp", "UCX cannot send managed memory"
    return ("ucx", "") if _has_ucx() else ("tcp", f"no UCX here: {_UCX_PIP}")


def _has_ucx() -> bool:
    from importlib.util import find_spec

    return all(find_spec(name) is not None for name in ("distributed_ucxx", "ucxx"))


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
