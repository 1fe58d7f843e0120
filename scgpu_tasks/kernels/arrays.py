"""Arrays of either library: where they are, and how they reach the host."""

from __future__ import annotations

from typing import Any

import numpy as np


def to_host(array: Any) -> np.ndarray:
    """Copy an array to the host, on the current stream; NumPy arrays are there already."""
    return array.get() if is_on_gpu(array) else np.asarray(array)


def to_host_quickly(array: Any) -> np.ndarray:
    """Copy a large array to the host that is needed for a short time only.

    Page-locked memory, which is kept for the next such copy, takes several times as many bytes
    a second.
    """
    if not is_on_gpu(array) or not array.size:
        return to_host(array)
    import cupy
    import cupyx

    out: np.ndarray = cupyx.empty_pinned(array.shape, array.dtype)
    cupy.ascontiguousarray(array).get(out=out)
    return out


def is_on_gpu(array: Any) -> bool:
    """Tell whether an array is in a GPU's memory."""
    return type(array).__module__.partition(".")[0] == "cupy"
