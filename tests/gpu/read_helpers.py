"""What the tests of GPU reads share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.core.buffer import gpu

from scgpu_tasks.io.pipeline import KvikioCodecPipeline
from tests.io.read_cases import open_with, read, same_bytes

PROTOTYPE = gpu.buffer_prototype


def open_gpu(path: Path, order: str = "C", *, strict: bool = False) -> zarr.Array[Any]:
    array = open_with(path, order, KvikioCodecPipeline)
    array.async_array.codec_pipeline.strict = strict
    return array


def to_host(found: Any) -> np.ndarray:
    import cupy

    return cupy.asnumpy(found)


def reads_as(array: zarr.Array[Any], kind: str, selection: Any, want: np.ndarray) -> bool:
    return same_bytes(to_host(read(array, kind, selection, PROTOTYPE)), want)


def gpu_missing() -> str:
    """Why there is nothing to test with here; empty where there is."""
    from scgpu_tasks.errors import MissingPackageError
    from scgpu_tasks.io.gpu_packages import require_gpu

    try:
        require_gpu()
    except MissingPackageError as error:
        return str(error)
    return ""
