"""CUDA sources, compiled once per process and device, and how they are launched."""

from __future__ import annotations

import sys
import threading
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

C_TYPES: dict[str, str] = {
    "uint8": "unsigned char",
    "uint16": "unsigned short",
    "int32": "int",
    "int64": "long long",
    "float32": "float",
    "float64": "double",
}
# Compiled the same way by CuPy and by the tests.
OPTIONS = ("--std=c++17",)
_THREADS = 256
_WARPS = _THREADS // 32
# Blocks of one launch where each block takes many rows: enough to fill the largest device.
_BLOCKS_PER_PROCESSOR = 8

_lock = threading.Lock()
_kernels: dict[tuple[int, str, str, tuple[tuple[str, str], ...]], Any] = {}
_modules: dict[tuple[int, str, tuple[tuple[str, str], ...]], Any] = {}


@cache
def source(name: str, defines: tuple[tuple[str, str], ...]) -> str:
    """CUDA source of ``<name>.cu`` with its types filled in, for NVRTC."""
    folder = files(__package__)
    head = "".join(f"#define {key} {value}\n" for key, value in defines)
    return (
        head
        + folder.joinpath("common.cuh").read_text()
        + folder.joinpath(f"{name}.cu").read_text()
    )


def define(value: Any, index: Any, **more: Any) -> tuple[tuple[str, str], ...]:
    """Types of a source: of its VALUE and INDEX, and others by name; dtypes or literals."""
    named = {"VALUE": value, "INDEX": index, **more}
    return tuple((key, _literal(item)) for key, item in named.items())


def _literal(item: Any) -> str:
    return str(item) if isinstance(item, int) else C_TYPES[np.dtype(item).name]


def kernel(name: str, function: str, defines: tuple[tuple[str, str], ...]) -> Any:
    """Get a compiled function of ``<name>.cu`` for the current device; made on first use."""
    import cupy

    device = int(cupy.cuda.runtime.getDevice())
    key = (device, name, function, defines)
    found = _kernels.get(key)
    if found is not None:
        return found
    with _lock:
        if key not in _kernels:
            module = _modules.get((device, name, defines))
            if module is None:
                # All functions of a source are compiled together.
                module = _modules[device, name, defines] = cupy.RawModule(
                    code=source(name, defines), options=OPTIONS, backend="nvrtc"
                )
            made = module.get_function(function)
            # Without this, a launch may not have more than 48 KiB of shared memory.
            made.max_dynamic_shared_size_bytes = shared_bytes() - int(made.shared_size_bytes)
            _kernels[key] = made
        return _kernels[key]


@cache
def _attributes(device: int) -> dict[str, int]:
    import cupy

    return dict(cupy.cuda.Device(device).attributes)


def _attribute(name: str) -> int:
    import cupy

    return int(_attributes(int(cupy.cuda.runtime.getDevice()))[name])


def shared_bytes() -> int:
    """Largest shared memory of a block on the current device."""
    return _attribute("MaxSharedMemoryPerBlockOptin")


def memory_limit() -> int:
    """Bytes of the current device that this process may take: all, or RMM's limit."""
    import cupy

    total = int(cupy.cuda.runtime.memGetInfo()[1])
    rmm = sys.modules.get("rmm")
    resource = None if rmm is None else rmm.mr.get_current_device_resource()
    while resource is not None:
        if hasattr(resource, "get_allocation_limit"):
            return min(total, int(resource.get_allocation_limit()))
        upstream = getattr(resource, "get_upstream", None)
        resource = None if upstream is None else upstream()
    return total


def processors() -> int:
    """Multiprocessors of the current device."""
    return _attribute("MultiProcessorCount")


def launch(
    function: Any,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: tuple[Any, ...],
    shared: int = 0,
) -> None:
    """Start a kernel on the current stream; an empty grid starts nothing.

    Python integers become 64-bit, NumPy scalars keep their type.
    """
    if all(grid):
        typed = tuple(np.int64(arg) if isinstance(arg, int) else arg for arg in args)
        function(grid, block, typed, shared_mem=shared)


def launch_rows(function: Any, n_rows: int, args: tuple[Any, ...], shared: int = 0) -> None:
    """Start a kernel in which each warp takes one row after another."""
    grid = min(-(-n_rows // _WARPS), _BLOCKS_PER_PROCESSOR * processors())
    launch(function, (grid,), (_THREADS,), args, shared)


def launch_items(function: Any, n_items: int, args: tuple[Any, ...]) -> None:
    """Start a kernel in which each thread takes one item after another."""
    grid = min(-(-n_items // _THREADS), 4 * _BLOCKS_PER_PROCESSOR * processors())
    launch(function, (grid,), (_THREADS,), args)


def on_device(array: Any, dtype: Any) -> Any:
    """Make a C-contiguous CuPy array of this type; no copy where it is one already."""
    import cupy

    return cupy.ascontiguousarray(cupy.asarray(array, dtype=dtype))
