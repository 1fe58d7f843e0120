"""Draw one block on its way from the file to the Gram matrix.

``python docs/figures/one_block.py`` writes ``one_block.png`` beside it. Every number and every
dot is real: an atlas is simulated and taken through QC, and one block of it is read and worked
on with the package's own kernels.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

import scgpu_tasks
from scgpu_tasks.datasets import write_synthetic
from scgpu_tasks.io.rows import RowBlocks, open_rows
from scgpu_tasks.kernels.gram import dense_columns, finish, gram_add
from scgpu_tasks.kernels.rows import Rows
from scgpu_tasks.kernels.select import select
from scgpu_tasks.kernels.transform import Transform
from scgpu_tasks.specs import HVGSpec

HERE = Path(__file__).parent
N_OBS, N_VARS, N_TOP = 20_000, 6_000, 300
BLOCK = 1
INK, MUTED, BLUE, GREY, ORANGE = "#1f2933", "#5f6b76", "#2a6fb0", "#d5dbe1", "#d9822b"


def main() -> None:
    """Write ``one_block.png`` beside this file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "atlas.zarr"
        write_synthetic(path, N_OBS, N_VARS, nnz_per_cell=600, seed=1, shard_bytes=8 * 1024**2)
        adata = scgpu_tasks.read_lazy(path, chunks=4_000)
        scgpu_tasks.qc.quality_control(adata, hvg=HVGSpec(n_top_genes=N_TOP))
        draw(open_rows(path, chunks=4_000), adata)


def draw(blocks: RowBlocks, adata: Any) -> None:
    """Draw the four stations."""
    start, stop = int(blocks.bounds[BLOCK]), int(blocks.bounds[BLOCK + 1])
    block = blocks.read_block(BLOCK)
    keep = adata.obs["passed_qc"].to_numpy()[start:stop]
    chosen = np.flatnonzero(adata.var["highly_variable"].to_numpy())
    density = adata.var["n_cells_kept"].to_numpy()[chosen] / adata.obs["passed_qc"].sum()
    order = np.argsort(-density, kind="stable")
    position = np.full(N_VARS, -1, np.int32)
    position[chosen[order]] = np.arange(len(chosen))
    rows = Rows(block.indptr, block.indices, block.data, N_VARS)
    compact = select(rows, keep, position, len(chosen))
    totals = adata.obs["total_counts"].to_numpy()[start:stop][keep]
    gram, sums = np.zeros((len(chosen),) * 2), np.zeros(len(chosen))
    n_dense = dense_columns(density[order])
    gram_add(compact, 1e4 / totals, Transform.LOG1P, n_dense, gram, sums)

    figure = Figure(figsize=(8.2, 7.4), facecolor="white", layout="constrained")
    axes = figure.subplots(2, 2)
    figure.get_layout_engine().set(wspace=0.08, hspace=0.08)  # type: ignore[union-attr]
    draw_chunks(axes[0, 0], blocks)
    title(
        axes[0, 0],
        "1  The store: chunks in shards",
        f"{block.stored_bytes / 1e6:.1f} MB are read of {blocks.stored_bytes / 1e6:.1f} MB:\n"
        f"the chunks that hold rows {start:,} to {stop:,}",
    )
    decoded = block.data.nbytes + block.indices.nbytes
    spy(axes[0, 1], rows, keep)
    title(
        axes[0, 1],
        "2  Decoded: a block of whole rows",
        f"{stop - start:,} cells x {N_VARS:,} genes, {len(block.data):,} counts,\n"
        f"{decoded / 1e6:.0f} MB; metrics, filters and gene moments",
    )
    spy(axes[1, 0], compact)
    title(
        axes[1, 0],
        "3  Highly variable genes of the kept cells",
        f"{keep.sum():,} of {len(keep):,} cells, {len(chosen):,} genes, {len(compact.data):,} "
        "counts,\ndensest genes first; log1p(x · s) on the way",
    )
    draw_gram(axes[1, 1], finish(gram, n_dense))
    title(
        axes[1, 1],
        "4  Its share of the Gram matrix",
        f"{len(chosen):,} x {len(chosen):,} float64, {gram.nbytes / 1e6:.1f} MB;\n"
        "darker for larger sums; blocks add up",
    )
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])
        for spine in ax.spines.values():
            spine.set_color(GREY)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=130)
    path = HERE / "one_block.png"
    Image.open(drawn).convert("RGB").quantize(128).save(path, optimize=True)
    print(path)


def title(ax: Axes, what: str, numbers: str) -> None:
    """Name a station, with its numbers below."""
    ax.set_title(what, loc="left", fontsize=11.5, color=INK, fontweight="bold", pad=8)
    ax.set_xlabel(numbers, fontsize=10.5, color=INK, loc="left", labelpad=6)


def draw_chunks(ax: Axes, blocks: RowBlocks) -> None:
    """Draw the files of data and indices as rows of chunks; those of the block in colour."""
    import zarr

    first, last = int(blocks.offsets[BLOCK]), int(blocks.offsets[BLOCK + 1])
    y = 0.0
    root = zarr.open_group(blocks.store, mode="r")
    for name in ("data", "indices"):
        array = root[f"{blocks.element}/{name}"]
        chunk, shard = array.chunks[0], array.shards[0]
        n_chunks, per_shard = -(-array.shape[0] // chunk), shard // chunk
        ax.text(0, y - 0.25, f"X/{name}  {array.dtype}", fontsize=10, color=INK, va="bottom")
        for i in range(n_chunks):
            row, column = divmod(i, per_shard)
            hit = i * chunk < last and (i + 1) * chunk > first
            colour = BLUE if hit else GREY
            place = (column, y + row)
            ax.add_patch(Rectangle(place, 0.86, 0.8, facecolor=colour, linewidth=0))
        n_shards = -(-n_chunks // per_shard)
        for row in range(n_shards):
            ax.text(
                per_shard + 0.4,
                y + row + 0.42,
                f"c/{row}",
                fontsize=9,
                color=MUTED,
                va="center",
            )
        y += n_shards + 2.2
    ax.set_xlim(-0.8, 37)
    ax.set_ylim(y - 1.2, -1.8)


def spy(ax: Axes, rows: Rows, keep: np.ndarray | None = None) -> None:
    """Draw a sample of the stored counts; rows that are left out in another colour."""
    rng = np.random.default_rng(0)
    which = np.sort(rng.choice(len(rows.data), min(30_000, len(rows.data)), replace=False))
    row = np.searchsorted(rows.indptr, which, side="right") - 1
    passed = np.ones(len(which), bool) if keep is None else keep[row]
    for some, size, colour in ((passed, 0.35, BLUE), (~passed, 2.5, ORANGE)):
        ax.scatter(rows.indices[which[some]], row[some], s=size, c=colour, linewidths=0)
    ax.set_xlim(0, rows.n_cols)
    ax.set_ylim(rows.n_rows, 0)
    if keep is not None:
        ax.text(
            0.98, 0.97, "orange: cells that\nQC leaves out", transform=ax.transAxes, ha="right",
            va="top", fontsize=9, color=INK,
            bbox={"facecolor": "white", "edgecolor": GREY, "boxstyle": "round,pad=0.3"},
        )  # fmt: skip


def draw_gram(ax: Axes, gram: np.ndarray) -> None:
    """Draw the Gram matrix, darker for larger sums, in the order of its columns."""
    ax.imshow(np.log10(gram + 1), cmap="Blues", aspect="auto", interpolation="nearest")


if __name__ == "__main__":
    main()
