"""Small matrices that the tests of the stages share."""

from __future__ import annotations

import numpy as np
import pandas as pd
import scipy.sparse as sp

from scgpu_tasks.datasets import SyntheticAtlas, synthetic_counts


def atlas(n_obs=600, n_vars=400, dtype="float32", n_batches=2, seed=3):
    """Counts in CSR, obs and var."""
    law = SyntheticAtlas(n_vars, nnz_per_cell=80, n_types=3, n_batches=n_batches, seed=seed)
    blocks = synthetic_counts(
        n_obs, n_vars, nnz_per_cell=80, n_types=3, n_batches=n_batches, seed=seed
    )
    return sp.vstack(list(blocks)).tocsr().astype(dtype), law.obs(n_obs), law.var()


def names(n, prefix):
    return pd.DataFrame(index=pd.Index([f"{prefix}{i}" for i in range(n)], dtype=str))


class Cut:
    """A matrix as a block source with bounds of the test's choice; blocks are read anew."""

    def __init__(self, matrix, bounds, device="cpu"):
        self.matrix, self.bounds, self.shape = matrix, np.asarray(bounds), matrix.shape
        self.reads = []

    def read(self, start, stop):
        self.reads.append((start, stop))
        return self.matrix[start:stop]


def scrambled(matrix, rng):
    """Same matrix with unsorted, repeated indices and explicit zeros, as bare CSR parts."""
    matrix = matrix.tocsr()
    indptr, indices, data = [0], [], []
    for row in range(matrix.shape[0]):
        part = slice(matrix.indptr[row], matrix.indptr[row + 1])
        columns, values = matrix.indices[part].tolist(), matrix.data[part].tolist()
        for k in range(len(values)):
            if values[k] > 1 and rng.random() < 0.3:
                columns.append(columns[k])
                values.append(1)
                values[k] -= 1
        columns += rng.integers(0, matrix.shape[1], 2).tolist()
        values += [0, 0]
        order = rng.permutation(len(values))
        indices += [columns[k] for k in order]
        data += [values[k] for k in order]
        indptr.append(len(data))
    out = sp.csr_matrix(matrix.shape, dtype=matrix.dtype)
    out.data = np.array(data, matrix.dtype)
    out.indices, out.indptr = np.array(indices, np.int32), np.array(indptr, np.int32)
    return out
