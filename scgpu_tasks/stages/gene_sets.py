"""Which genes belong to which set: mitochondrial, ribosomal, haemoglobin, or the user's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from scgpu_tasks.errors import ParameterError

# Patterns of gene symbols, whatever their case: human MT-CO1, mouse mt-Co1.
PATTERNS: dict[str, str] = {
    "mt": r"^MT-",
    "ribo": r"^RP[SL]",
    "hb": r"^HB[^(P)]",
}
# Columns of var that hold symbols where the index holds Ensembl ids.
_SYMBOLS = ("gene_symbols", "gene_symbol", "gene_name", "gene_names", "feature_name", "symbol")
_MAX_SETS = 64


@dataclass(frozen=True)
class GeneSets:
    """Named sets of genes.

    Attributes
    ----------
    names
        Names of the sets.
    masks
        bool, shape (sets, genes).
    notes
        What a user should know, such as sets without a gene.
    """

    names: tuple[str, ...]
    masks: np.ndarray
    notes: tuple[str, ...]

    def bits(self) -> np.ndarray:
        """Membership of each gene as bits, uint64: bit s for set s."""
        bits = np.zeros(self.masks.shape[1], np.uint64)
        for number, mask in enumerate(self.masks):
            bits[mask] |= np.uint64(1) << np.uint64(number)
        return bits


def find_gene_sets(
    var: pd.DataFrame,
    names: Iterable[str],
    lists: Mapping[str, Iterable[str]] | None = None,
) -> GeneSets:
    """Find the genes of each named set.

    Parameters
    ----------
    var
        Genes; the index holds their names.
    names
        Names of sets: a boolean column of `var`, else one of `PATTERNS`.
    lists
        Gene names of further sets, which come first.

    Raises
    ------
    ParameterError
        A name is neither, a column is not boolean, or there are more than 64 sets.
    """
    found: dict[str, np.ndarray] = {}
    notes: list[str] = []
    for name, genes in (lists or {}).items():
        wanted = pd.Index(list(genes))
        found[name] = np.asarray(var.index.isin(wanted))
        missing = wanted[~wanted.isin(var.index)]
        if len(missing):
            some = ", ".join(map(str, missing[:5]))
            notes.append(f"{len(missing)} genes of set {name!r} are not in var: {some}")
    for name in names:
        if name not in found:
            found[name] = _named_set(var, name, notes)
    if len(found) > _MAX_SETS:
        msg = f"{len(found)} gene sets; at most {_MAX_SETS} can be counted at once"
        raise ParameterError(msg)
    masks = np.array(list(found.values()), bool).reshape(len(found), len(var))
    return GeneSets(tuple(found), masks, tuple(notes))


def _named_set(var: pd.DataFrame, name: str, notes: list[str]) -> np.ndarray:
    if name in var.columns:
        column = var[name]
        if not pd.api.types.is_bool_dtype(column.dtype):
            msg = f"var[{name!r}] holds {column.dtype}, not booleans: it is no gene set"
            raise ParameterError(msg)
        return np.asarray(column.to_numpy(dtype=bool, na_value=False))
    if name not in PATTERNS:
        msg = (
            f"gene set {name!r} is neither a boolean column of var nor one of "
            f"{', '.join(PATTERNS)}"
        )
        raise ParameterError(msg)
    mask = _matching(var.index, name)
    if mask.any():
        return mask
    for column_name in _SYMBOLS:
        if column_name in var.columns:
            mask = _matching(var[column_name], name)
            if mask.any():
                notes.append(f"gene set {name!r} was found by var[{column_name!r}]")
                return mask
    note = f"no gene matched {name!r} ({PATTERNS[name]})"
    if var.index.astype(str).str.match("ENS[A-Z]*G[0-9]").any():
        note += (
            ": var_names are Ensembl ids; add a column of symbols (such as gene_symbols) or "
            f"a boolean column {name!r} to var"
        )
    notes.append(note)
    return mask


def _matching(names: pd.Index | pd.Series, set_name: str) -> np.ndarray:
    text = pd.Series(np.asarray(names, dtype=object)).astype(str)
    return text.str.contains(PATTERNS[set_name], case=False, regex=True).to_numpy(dtype=bool)
