"""The atlas of ``make demo``: 20,000 simulated cells in an h5ad file, as atlases often arrive.

``python -m scgpu_tasks.demo PATH`` writes it, unless it is there.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

N_OBS, N_VARS, N_BATCHES = 20_000, 6_000, 3
NNZ_PER_CELL = 600
SEED = 1


def write_demo(path: str | Path) -> Path:
    """Write the demo's atlas: cell types, batches, damaged cells, droplets, unseen genes.

    Parameters
    ----------
    path
        h5ad file to write; appears when complete.

    Returns
    -------
    The path.
    """
    import anndata as ad

    from scgpu_tasks.datasets import write_synthetic

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".demo-") as folder:
        store = write_synthetic(
            Path(folder) / "atlas.zarr",
            N_OBS,
            N_VARS,
            nnz_per_cell=NNZ_PER_CELL,
            n_batches=N_BATCHES,
            seed=SEED,
        )
        partial = Path(folder) / "atlas.h5ad"
        ad.read_zarr(store).write_h5ad(partial, compression="lzf")
        partial.replace(path)
    return path


def main(arguments: list[str]) -> int:
    """Write the atlas to the path given, if it is not there yet."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m scgpu_tasks.demo PATH.h5ad", file=sys.stderr)
        return 2
    path = Path(arguments[0])
    if not path.exists():
        print(f"Simulating {N_OBS:,} cells x {N_VARS:,} genes: {path}", flush=True)
        write_demo(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
