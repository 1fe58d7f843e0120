import shutil

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from scgpu_tasks.errors import CorruptChunkError, DataError, FormatError, ParameterError
from scgpu_tasks.job.probe import probe, probe_source
from scgpu_tasks.specs import HVGSpec, PCASpec, QCSpec

SPECS = (QCSpec(), HVGSpec(n_top_genes=30), PCASpec(n_comps=5))
FORMS = {"csr": sp.csr_matrix, "dense": np.asarray}


@pytest.fixture(params=["store", "h5ad", "zarr"])
def look(request, tmp_path):
    """Write cells by genes as float64 and probe them: as a store, or as a source."""

    def look(x, specs=SPECS, form="csr", **parts):
        adata = ad.AnnData(
            FORMS[form](x),
            obs=pd.DataFrame({"batch": "a"}, index=[f"cell{i}" for i in range(len(x))]),
            var=pd.DataFrame(index=[f"gene{i}" for i in range(x.shape[1])]),
            **parts,
        )
        if request.param == "h5ad":
            adata.write_h5ad(tmp_path / "a.h5ad")
            return probe_source(str(tmp_path / "a.h5ad"), *specs)
        adata.write_zarr(tmp_path / "a.zarr")
        how = probe if request.param == "store" else probe_source
        return how(str(tmp_path / "a.zarr"), *specs)

    return look


def counts():
    return np.random.default_rng(0).poisson(1.0, (50, 40)).astype(np.float64)


def counts_with(value):
    x = counts()
    x[7, 5] = value
    return x


@pytest.mark.parametrize("form", FORMS)
def test_counts_with_the_noise_of_rounding_pass(look, form):
    look(counts() * 0.999999999999999, form=form)
    look(counts_with(3 + 9e-7), form=form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3 + 2e-6, "nearly whole"),
        (0.7, "normalised or log-transformed"),
        (-1, "a negative or missing value"),
        (np.nan, "a negative or missing value"),
    ],
)
def test_other_values_are_named_with_cell_and_gene(look, form, value, words):
    with pytest.raises(DataError, match=f"cell7.*gene5.*{words}|{words}.*cell7.*gene5") as e:
        look(counts_with(value), form=form)
    assert "--not-counts" in str(e.value)
    assert ("log" in str(e.value)) == (value == 0.7)


def test_other_values_pass_where_counts_are_not_expected(look):
    look(counts_with(0.7), specs=(QCSpec(expect_counts=False), *SPECS[1:]))


def test_what_later_stages_could_not_do_is_refused(look):
    too_many = (QCSpec(), HVGSpec(n_top_genes=2000), PCASpec(n_comps=5000))
    words = "n_comps=5000 must be below the smaller of 50 cells and 40 highly variable genes"
    with pytest.raises(ParameterError, match=words):
        look(counts(), specs=too_many)
    with pytest.raises(ParameterError, match=r"'donor'.*batch"):
        look(counts(), specs=(QCSpec(), HVGSpec(n_top_genes=30, batch_key="donor"), SPECS[2]))
    with pytest.raises(FormatError, match="raw"):
        look(counts(), specs=(QCSpec(layer="raw"), *SPECS[1:]))


def flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0xFF
    path.write_bytes(raw)


def test_an_unknown_gene_set_is_refused(small_store):
    with pytest.raises(ParameterError, match="no_such_set"):
        probe(str(small_store), QCSpec(qc_vars=("mt", "no_such_set")), *SPECS[1:])


def test_damage_of_a_zarr_source_is_told_with_array_shard_and_chunk(small_store, tmp_path):
    source = shutil.copytree(small_store, tmp_path / "a.zarr")
    flip(source / "X" / "data" / "c" / "0", 40)
    with pytest.raises(CorruptChunkError, match="X/data") as e:
        probe_source(str(source), *SPECS)
    assert (e.value.array, e.value.shard, e.value.chunk) == ("X/data", "c/0", (0,))


def test_damage_of_an_h5ad_source_is_told_with_array_and_chunk(tmp_path):
    source = tmp_path / "a.h5ad"
    ad.AnnData(sp.csr_matrix(counts())).write_h5ad(source, compression="gzip")
    with h5py.File(source) as file:
        at = file["X/data"].id.get_chunk_info(0).byte_offset
    flip(source, at + 30)
    with pytest.raises(CorruptChunkError, match="X/data") as e:
        probe_source(str(source), *SPECS)
    assert (e.value.array, e.value.shard) == ("X/data", "0")
    assert "copy it again" in str(e.value)
