"""Gene sets by symbol, column and list."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from scgpu_tasks.errors import ParameterError
from scgpu_tasks.stages.gene_sets import find_gene_sets

GENES = ["MT-CO1", "mt-Nd1", "MTOR", "RPS6", "Rpl13", "RPSA", "HBA1", "HBP1", "Hbb-bs", "ACTB"]


def found(var, *sets, **lists):
    sets = find_gene_sets(var, sets, lists)
    return {
        n: list(var.index[m]) for n, m in zip(sets.names, sets.masks, strict=True)
    }, sets.notes


def table(index=GENES, **columns):
    return pd.DataFrame(columns, index=pd.Index(index, dtype=str))


def test_human_and_mouse_symbols_are_found():
    sets, notes = found(table(), "mt", "ribo", "hb")
    assert sets == {
        "mt": ["MT-CO1", "mt-Nd1"],
        "ribo": ["RPS6", "Rpl13", "RPSA"],
        "hb": ["HBA1", "Hbb-bs"],
    }
    assert notes == ()


def test_a_boolean_column_comes_before_the_pattern():
    sets, _ = found(table(mt=[False] * 9 + [True]), "mt")
    assert sets == {"mt": ["ACTB"]}


def test_a_nullable_column_counts_unknown_as_not_in_the_set():
    sets, _ = found(table(own=pd.array([True, None] + [False] * 8, dtype="boolean")), "own")
    assert sets == {"own": ["MT-CO1"]}


def test_a_column_that_is_not_boolean_is_refused():
    with pytest.raises(ParameterError, match="holds int64, not booleans"):
        found(table(own=range(10)), "own")


def test_lists_are_sets_and_missing_names_are_noted():
    sets, notes = found(table(), mine=["ACTB", "XIST"])
    assert sets == {"mine": ["ACTB"]}
    assert "1 genes of set 'mine' are not in var: XIST" in notes


def test_an_unknown_set_is_refused():
    with pytest.raises(ParameterError, match="'spike' is neither"):
        found(table(), "spike")


def test_ensembl_ids_without_symbols_are_noted():
    var = table([f"ENSG{i:011d}" for i in range(5)])
    sets, notes = found(var, "mt")
    assert sets == {"mt": []}
    assert "no gene matched 'mt'" in notes[0]
    assert "Ensembl" in notes[0]


def test_symbols_in_a_column_beside_ensembl_ids_are_used():
    var = table(
        [f"ENSMUSG{i:011d}" for i in range(3)],
        feature_name=pd.Categorical(["mt-Co1", "Actb", "Rps6"]),
    )
    sets, notes = found(var, "mt")
    assert sets == {"mt": ["ENSMUSG00000000000"]}
    assert "var['feature_name']" in notes[0]


def test_bits_tell_the_sets_of_each_gene():
    sets = find_gene_sets(table(), ["mt", "ribo"], {"both": ["MT-CO1", "RPS6"]})
    assert sets.names == ("both", "mt", "ribo")
    bits = sets.bits()
    assert (bits[0], bits[1], bits[3], bits[9]) == (0b011, 0b010, 0b101, 0)
    assert bits.dtype == np.uint64


def test_more_sets_than_bits_are_refused():
    with pytest.raises(ParameterError, match="at most 64"):
        found(table(), **{f"s{i}": [] for i in range(65)})
