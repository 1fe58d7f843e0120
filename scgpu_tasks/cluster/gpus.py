"""The GPUs of this machine: which ones a process may use, what holds them, what may not fit.

Everything here asks the driver through NVML, which makes no CUDA context: the process that
starts a cluster takes no memory of a GPU.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from scgpu_tasks.errors import ClusterError, MissingPackageError

logger = logging.getLogger(__name__)

MASK = "CUDA_VISIBLE_DEVICES"
BUSY_BYTES = 2**30
"""A GPU that nobody uses has less than this taken, by the driver."""
MIN_FREE_BYTES = 2 * 2**30
"""CUDA's context, compiled kernels and the smallest blocks."""
_CUPY = {12: "cupy-cuda12x", 13: "cupy-cuda13x"}


def gpu_names() -> list[str]:
    """UUIDs of the GPUs that the driver shows, in its order; none without a driver.

    Raises
    ------
    MissingPackageError
        dask-cuda or pynvml is not installed; the message has the pip line.
    ClusterError
        There is a driver, and it does not work.
    """
    nvml = _packages()
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        names = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
    except nvml.NVMLError as error:
        absent = (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
        if error.value in absent:
            return []
        msg = (
            f"the NVIDIA driver does not answer: {error}. If nvidia-smi says the same, the "
            "driver must be mended (after an update most often by a restart of the machine); "
            "--device cpu does without"
        )
        raise ClusterError(msg) from error
    return [name.decode() if isinstance(name, bytes) else name for name in names]


def _packages() -> Any:
    try:
        import dask_cuda  # noqa: F401
        import pynvml
    except ImportError as error:
        msg = (
            f"GPU workers need {error.name}: pip install 'scgpu-tasks[cu13]' "
            "(or [cu12] for a CUDA 12 driver)"
        )
        raise MissingPackageError(msg) from error
    return pynvml


def hidden() -> bool:
    """Tell whether the environment hides every GPU, as CUDA reads it."""
    mask = os.environ.get(MASK)
    return mask is not None and mask.strip() in ("", "-1", "NoDevFiles", "none", "void")


def choose_devices(
    devices: str | Sequence[int | str] | None, found: Sequence[str]
) -> tuple[str, ...]:
    """UUIDs of the GPUs that are asked for, or that the environment shows.

    Parameters
    ----------
    devices
        Indices or UUIDs, or their beginnings; None: CUDA_VISIBLE_DEVICES, or all.
    found
        As from `gpu_names`.

    Raises
    ------
    ClusterError
        One of them is not there, or is named twice.
    """
    source = "devices"
    if devices is None:
        devices = os.environ.get(MASK)
        source = MASK
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
    if not chosen:
        msg = f"{source}={devices!r} names no GPU; there are {len(found)} on this machine"
        raise ClusterError(msg)
    if len(set(chosen)) < len(chosen):
        msg = f"{source}={devices!r} names a GPU twice; each worker needs its own"
        raise ClusterError(msg)
    return tuple(chosen)


def require_driver() -> None:
    """Compare the CUDA version of the driver with that of the installed packages.

    Raises
    ------
    ClusterError
        The packages are made for a later CUDA than the driver knows.
    """
    nvml = _packages()
    made_for = [major for major, name in _CUPY.items() if _installed(name)]
    if not made_for:
        return
    number = nvml.nvmlSystemGetCudaDriverVersion_v2()
    driver, least = number // 1000, min(made_for)
    if driver < least:
        known = f"{driver}.{number % 1000 // 10}"
        msg = (
            f"the installed GPU packages are made for CUDA {least}, and the driver of this "
            f"machine knows CUDA {known}: update the driver, or install the packages for it "
            f"(pip uninstall {_CUPY[least]}; pip install 'scgpu-tasks[cu{driver}]')"
        )
        raise ClusterError(msg)


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def require_memory(devices: Sequence[str]) -> None:
    """Warn of GPUs that others use, and refuse those that have no room left.

    Parameters
    ----------
    devices
        UUIDs.

    Raises
    ------
    ClusterError
        Less than `MIN_FREE_BYTES` of one are free.
    """
    nvml = _packages()
    for name in devices:
        handle = nvml.nvmlDeviceGetHandleByUUID(name)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        taken = (
            f"{memory.used / 2**30:.1f} of {memory.total / 2**30:.1f} GiB are taken"
            f"{_holders(nvml, handle)}"
        )
        if memory.free < MIN_FREE_BYTES:
            msg = (
                f"GPU {name} has too little memory left: {taken}. End what runs there, or "
                "choose another GPU with devices= or CUDA_VISIBLE_DEVICES"
            )
            raise ClusterError(msg)
        if memory.used > BUSY_BYTES:
            logger.warning("GPU %s is in use already: %s", name, taken)


def _holders(nvml: Any, handle: Any) -> str:
    try:
        pids = [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    except nvml.NVMLError:
        return ""
    return f" (by process {', '.join(map(str, pids))})" if pids else ""


def total_bytes(device: str) -> int:
    """Memory of a GPU that programs may have, by its UUID: all but what the driver reserves."""
    nvml = _packages()
    handle = nvml.nvmlDeviceGetHandleByUUID(device)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    return int(memory.total - memory.reserved)
