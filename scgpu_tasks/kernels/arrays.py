"""Arrays of either library: where they are, and how they reach the host."""

from __future__ import annotations

from typing import Any

import numpy as np


def to_host(array: Any) -> np.ndarray:
    """Copy an array to the host, on the current stream; NumPy arrays are there already."""
    return array.get() if is_on_gpu(array) else np.asarray(array)


def is_on_gpu(array: Any) -> bool:
    """Tell whether an array is in a GPU's memory."""
    return type(array).__module__.partition(".")[0] == "cupy"
