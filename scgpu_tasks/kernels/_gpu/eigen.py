"""Eigenvectors of a symmetric matrix on the GPU."""

from __future__ import annotations

import threading
from functools import cache

import numpy as np

from scgpu_tasks.kernels._gpu.streams import own_stream

_WARM_UP_SIZE = 2048


def largest_eigenpairs(matrix: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the `n` largest eigenvalues of a symmetric matrix, rising, and their vectors."""
    import cupy

    with own_stream():
        values, vectors = cupy.linalg.eigh(cupy.asarray(matrix))
        k = len(matrix)
        return values[k - n :].get(), cupy.ascontiguousarray(vectors[:, k - n :]).get()


@cache
def warm_up(size: int) -> None:
    """Load the GPU's solver in the background: the first call takes half a second or more.

    A process does it once.
    """
    n = min(size, _WARM_UP_SIZE)
    matrix = np.diag(np.arange(1.0, n + 1))
    threading.Thread(target=largest_eigenpairs, args=(matrix, 1), daemon=True).start()
