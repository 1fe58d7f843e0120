"""Find the first place at which two elements, read by anndata, are not the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from scgpu_tasks.io.convert.verify import same_bytes


def difference(want: Any, found: Any, where: str = "") -> str | None:
    """Say where an element differs from its source, and what both hold.

    Parameters
    ----------
    want, found
        Scalars, arrays, data frames, sparse matrices, or mappings of them: of the source, and
        of the store.
    where
        Name of the element; names of members are added to it.

    Returns
    -------
    None where they are the same: numbers to the last bit, NaN and missing values included.
    Strings may be of another type, as anndata reads them differently from HDF5 and zarr.
    """
    if isinstance(want, pd.DataFrame) and isinstance(found, pd.DataFrame):
        return difference(_columns(want), _columns(found), where)
    if isinstance(want, Mapping) and isinstance(found, Mapping):
        return _in_members(want, found, where)
    if sp.issparse(want) and sp.issparse(found):
        return _in_members(_parts(want), _parts(found), where)
    if isinstance(want, pd.Series | pd.Index | pd.api.extensions.ExtensionArray):
        return _in_column(want, found, where)
    return _in_array(np.asarray(want), np.asarray(found), where)


def _columns(frame: pd.DataFrame) -> dict[Any, Any]:
    return {"(index)": frame.index, **{name: frame[name] for name in frame}}


def _parts(matrix: Any) -> dict[str, Any]:
    # The smallest type that fits is right for both.
    indices = {name: getattr(matrix, name).astype(np.int64) for name in ("indices", "indptr")}
    return {"format": matrix.format, "shape": matrix.shape, "data": matrix.data} | indices


def _in_members(want: Mapping[Any, Any], found: Mapping[Any, Any], where: str) -> str | None:
    if set(want) != set(found):
        return f"{where or 'it'} has members {sorted(found)} instead of {sorted(want)}"
    for name in want:
        told = difference(want[name], found[name], f"{where}/{name}" if where else str(name))
        if told is not None:
            return told
    return None


def _in_column(want: Any, found: Any, where: str) -> str | None:
    left, right = pd.Series(want).reset_index(drop=True), pd.Series(found)
    right = right.reset_index(drop=True)
    if left.equals(right) or (left.dtype.kind == right.dtype.kind == "O" and len(left) == 0):
        return None
    if len(left) != len(right) or left.dtype != right.dtype:
        kinds = [f"{len(side)} values of {side.dtype}" for side in (right, left)]
        return f"{where} holds {kinds[0]} instead of {kinds[1]}"
    unlike = ~((left == right).fillna(False) | (left.isna() & right.isna()))
    at = int(np.argmax(unlike.to_numpy(bool)))
    return f"{where}[{at}] is {right[at]!r} instead of the source's {left[at]!r}"


def _in_array(want: np.ndarray, found: np.ndarray, where: str) -> str | None:
    if want.shape != found.shape:
        return f"{where} has the shape {found.shape} instead of {want.shape}"
    if want.dtype.kind in "biufcmM":
        if same_bytes(want, found):
            return None
        if want.dtype.newbyteorder("=") != found.dtype.newbyteorder("="):
            return f"{where} holds {found.dtype} instead of {want.dtype}"
    left, right = want.reshape(-1).tolist(), found.reshape(-1).tolist()
    for n, (a, b) in enumerate(zip(left, right, strict=True)):
        if _text(a) != _text(b):
            at = ", ".join(map(str, np.unravel_index(n, want.shape)))
            return f"{where}[{at}] is {b!r} instead of the source's {a!r}"
    return None


def _text(value: Any) -> str:
    """Written so that NaN equals NaN, and bytes equal the string that they spell."""
    if isinstance(value, tuple):
        return repr([_text(item) for item in value])
    return repr(value.decode("utf-8", "replace") if isinstance(value, bytes) else value)
