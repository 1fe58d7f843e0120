"""Out-of-core single-cell steps on CPUs and GPUs: convert, check, load, QC, PCA.

Public names load on first use: importing this package is quick and needs no GPU library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scgpu_tasks import datasets, errors, hvg, pca, qc, specs
    from scgpu_tasks.cluster import start_cluster
    from scgpu_tasks.io.checks import check
    from scgpu_tasks.io.convert import convert_zarr
    from scgpu_tasks.io.lazy import read_lazy
    from scgpu_tasks.io.switch import enable, release_memory

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "check",
    "convert_zarr",
    "datasets",
    "enable",
    "errors",
    "hvg",
    "pca",
    "qc",
    "read_lazy",
    "release_memory",
    "specs",
    "start_cluster",
]

_HOMES = {
    "check": "io.checks",
    "convert_zarr": "io.convert",
    "enable": "io.switch",
    "read_lazy": "io.lazy",
    "release_memory": "io.switch",
    "start_cluster": "cluster",
}
_MODULES = frozenset({"datasets", "errors", "hvg", "pca", "qc", "specs"})


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
