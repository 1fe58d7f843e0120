"""Matrices and annotations of an AnnData, for the public functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd

from scgpu_tasks.errors import FormatError, ParameterError
from scgpu_tasks.stages.sources import BlockSource, as_source

if TYPE_CHECKING:
    from anndata import AnnData


def source_of(adata: AnnData, layer: str | None) -> BlockSource:
    """Row blocks of X, or of a layer.

    Raises
    ------
    ParameterError
        There is no such layer.
    FormatError
        The matrix has a form that cannot be read in blocks of rows.
    """
    if layer is None:
        return as_source(adata.X)
    if layer not in adata.layers:
        some = ", ".join(map(str, adata.layers.keys())) or "none"
        msg = f"layer {layer!r} is not in the AnnData; its layers are: {some}"
        raise ParameterError(msg)
    return as_source(adata.layers[layer])


def obs_and_var(adata: AnnData) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tables obs and var.

    Raises
    ------
    FormatError
        They are not in memory.
    """
    obs, var = adata.obs, adata.var
    for name, table in (("obs", obs), ("var", var)):
        if not isinstance(table, pd.DataFrame):
            msg = f"{name} is a {type(table).__name__}: load it with adata.{name}.to_memory()"
            raise FormatError(msg)
    return cast("pd.DataFrame", obs), cast("pd.DataFrame", var)


def mask_of(table: pd.DataFrame, name: str) -> np.ndarray | None:
    """Boolean column of obs or var; None where there is none of that name."""
    if name not in table.columns:
        return None
    return np.asarray(table[name].to_numpy(dtype=bool, na_value=False))


def write_columns(table: pd.DataFrame, columns: Any) -> None:
    """Add columns to obs or var, replacing those of the same name."""
    for name in columns.columns:
        table[name] = columns[name].to_numpy()
