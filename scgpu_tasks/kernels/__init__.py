"""One block in, partial sums out: no zarr, no Dask, no Prefect."""
