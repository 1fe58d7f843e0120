"""Between stores and blocks. Public names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scgpu_tasks.io.checks import check
    from scgpu_tasks.io.convert import convert_zarr
    from scgpu_tasks.io.fingerprint import store_fingerprint
    from scgpu_tasks.io.lazy import read_lazy
    from scgpu_tasks.io.pipeline import KvikioCodecPipeline
    from scgpu_tasks.io.rows import open_rows
    from scgpu_tasks.io.switch import enable, release_memory

__all__ = [
    "KvikioCodecPipeline",
    "check",
    "convert_zarr",
    "enable",
    "open_rows",
    "read_lazy",
    "release_memory",
    "store_fingerprint",
]

_HOMES = {
    "KvikioCodecPipeline": "pipeline",
    "check": "checks",
    "enable": "switch",
    "release_memory": "switch",
    "convert_zarr": "convert",
    "open_rows": "rows",
    "read_lazy": "lazy",
    "store_fingerprint": "fingerprint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
