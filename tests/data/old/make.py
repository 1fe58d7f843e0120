"""Write small AnnData files with whatever anndata is installed.

    python make.py FOLDER

Run once with each old release, in an environment of its own:

    anndata 0.5.10      Python 3.6, pandas < 0.25, h5py < 2.10
    anndata 0.6.22      Python 3.7, pandas < 1, h5py < 2.11
    anndata 0.7.8       Python 3.8, pandas < 1.4, h5py < 3.7
    anndata 0.8.0       Python 3.9, pandas < 1.6

and zarr 2 beside it for the zarr archives.
"""

import shutil
import sys

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp


def example(sparse):
    """Eleven cells, seven genes, everything that releases since 0.5 can hold."""
    rng = np.random.RandomState(0)
    dense = rng.poisson(0.6, (11, 7)).astype("float32")
    obs = pd.DataFrame(
        {
            "group": pd.Categorical(list("abcabcabcab")),
            "depth": dense.sum(1),
            "count": np.arange(11),
        },
        index=[f"cell{i}" for i in range(11)],
    )
    var = pd.DataFrame(
        {"kind": pd.Categorical(["x"] * 7)}, index=[f"gene{i}" for i in range(7)]
    )
    adata = ad.AnnData(sp.csr_matrix(dense) if sparse else dense, obs=obs, var=var)
    adata.obsm["X_pca"] = rng.normal(size=(11, 3))
    adata.varm["PCs"] = rng.normal(size=(7, 3))
    adata.uns["numbers"] = np.arange(5)
    adata.uns["nested"] = {"text": "word", "value": 2.5, "list": np.array([1.5, 2.5])}
    adata.uns["group_colors"] = np.array(["#ff0000", "#00ff00", "#0000ff"])
    adata.raw = adata
    adata = adata[:, :5].copy()
    if hasattr(adata, "layers"):
        adata.layers["counts"] = adata.X.copy()
    return adata


def main(folder):
    """Write what this release can."""
    name = "anndata-" + ad.__version__.split("+")[0]
    for kind in ("sparse", "dense"):
        adata = example(kind == "sparse")
        path = f"{folder}/{name}-{kind}"
        if hasattr(adata, "write_h5ad"):
            adata.write_h5ad(path + ".h5ad", compression="gzip")
        else:
            adata.write(path + ".h5ad", compression="gzip")
        if hasattr(adata, "write_zarr"):
            # Releases before 0.7 cannot do without chunks of X.
            old = ad.__version__.startswith("0.6")
            adata.write_zarr(path + ".zarr", (5, 5) if old else None)
            shutil.make_archive(path + ".zarr", "zip", path + ".zarr")


if __name__ == "__main__":
    main(sys.argv[1])
