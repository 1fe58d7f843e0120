"""What the caller may choose about a conversion."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scgpu_tasks.errors import ParameterError
from scgpu_tasks.io.convert.layout import CHUNK_BYTES, SHARD_BYTES
from scgpu_tasks.specs import Spec

LEVEL = 3


@dataclass(frozen=True, kw_only=True)
class ConvertSpec(Spec):
    """Everything that decides the bytes of a converted store, but for the source.

    Parameters
    ----------
    csr
        Turn CSC matrices (X, raw/X, layers) into CSR.
    sort_indices
        Sort the indices within each row (column of CSC) of X, raw/X and layers.
    sum_duplicates
        Sum values stored twice for one place of X, raw/X and layers; sorts as well.
    data_dtype
        Type of the values of X, raw/X and layers; None: as in the source.
    chunk_bytes, shard_bytes
        Decoded bytes of a chunk and of a shard.
    level
        zstd level, 1 to 22.
    """

    csr: bool = False
    sort_indices: bool = False
    sum_duplicates: bool = False
    data_dtype: str | None = None
    chunk_bytes: int = CHUNK_BYTES
    shard_bytes: int = SHARD_BYTES
    level: int = LEVEL

    def __post_init__(self) -> None:
        if not 1 <= self.level <= 22:
            msg = f"level is a zstd level, 1 to 22, not {self.level}"
            raise ParameterError(msg)
        if not 1024 <= self.chunk_bytes <= 2**30:
            msg = f"chunk_bytes must be from 1 KiB to 1 GiB, not {self.chunk_bytes}"
            raise ParameterError(msg)
        if self.shard_bytes < self.chunk_bytes:
            msg = (
                f"shard_bytes={self.shard_bytes} is less than chunk_bytes={self.chunk_bytes}: "
                "a shard holds at least one chunk"
            )
            raise ParameterError(msg)
        if self.data_dtype is not None:
            _check_dtype(self.data_dtype)


def _check_dtype(name: str) -> None:
    try:
        dtype = np.dtype(name)
    except TypeError as error:
        msg = f"data_dtype={name!r} is no NumPy data type"
        raise ParameterError(msg) from error
    if dtype.kind not in "biuf":
        msg = f"data_dtype must be a boolean, integer or float type, not {name}"
        raise ParameterError(msg)
