"""What this machine has for reading: package versions, GPUs, the way from disk to GPU."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata, util

_PACKAGES = (
    "scgpu-tasks",
    "anndata",
    "zarr",
    "zarrs",
    "numcodecs",
    "numpy",
    "scipy",
    "dask",
    "distributed",
    "prefect",
)
_GPU_PACKAGES = (
    ("cupy", ("cupy-cuda13x", "cupy-cuda12x", "cupy")),
    ("kvikio", ("kvikio-cu13", "kvikio-cu12", "kvikio")),
    ("nvcomp", ("nvidia-nvcomp-cu13", "nvidia-nvcomp-cu12", "nvidia-libnvcomp-cu13")),
    ("rmm", ("rmm-cu13", "rmm-cu12", "rmm")),
    ("dask-cuda", ("dask-cuda",)),
)
_QUERY = [
    "nvidia-smi",
    "--query-gpu=name,memory.total,memory.free",
    "--format=csv,noheader,nounits",
]


@dataclass(frozen=True)
class Gpu:
    """One GPU; memory in MiB."""

    name: str
    memory_mib: int
    free_mib: int


@dataclass(frozen=True)
class Machine:
    """What was found.

    Attributes
    ----------
    cpus
        Processors that this process may use.
    versions
        Package to version; None where it is not installed.
    gpus
        Empty without a GPU or without its driver.
    kvikio
        In words: how KvikIO reads files, or why it does not.
    """

    cpus: int
    versions: dict[str, str | None] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    kvikio: str = ""

    def lines(self) -> Iterator[str]:
        """Describe it in a few lines of text."""
        installed = [f"{name} {version}" for name, version in self.versions.items() if version]
        absent = [name for name, version in self.versions.items() if not version]
        yield f"this machine: {self.cpus} processors, {', '.join(installed)}"
        if absent:
            yield f"not installed: {', '.join(absent)}"
        for gpu in self.gpus:
            yield f"GPU: {gpu.name}, {gpu.free_mib:,} of {gpu.memory_mib:,} MiB free"
        if not self.gpus:
            yield "GPU: none found; everything is read and decoded by the CPU"
        yield f"KvikIO: {self.kvikio}"


def inspect_machine() -> Machine:
    """Look at packages, GPUs and KvikIO; nothing is started on a GPU."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions |= {name: _version(name) for name in _PACKAGES}
    for name, wheels in _GPU_PACKAGES:
        versions[name] = next(filter(None, map(_version, wheels)), None)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Machine(cpus or 1, versions, tuple(_gpus()), _kvikio())


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> Iterator[Gpu]:
    try:
        answer = subprocess.run(_QUERY, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return
    for line in answer.stdout.splitlines():
        name, total, free = line.rsplit(",", 2)
        yield Gpu(name.strip(), int(total), int(free))


def _kvikio() -> str:
    if util.find_spec("kvikio") is None:
        return "not installed; files are read by the CPU"
    try:
        import kvikio.cufile_driver
        import kvikio.defaults

        direct = bool(kvikio.cufile_driver.get("is_gds_available"))
        mode = str(kvikio.defaults.get("compat_mode"))
        threads = kvikio.defaults.get("num_threads")
    except (ImportError, AttributeError, RuntimeError, OSError, ValueError, KeyError) as error:
        return f"installed, but cannot be asked ({error})"
    way = (
        "GPUDirect Storage (disk to GPU memory)"
        if direct
        else "compatibility mode (through host memory); no GPUDirect Storage here"
    )
    return f"{way}, compat_mode {mode}, {threads} threads"
