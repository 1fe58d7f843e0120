"""The law that a synthetic atlas follows: genes, cell types, batches, and how cells are drawn.

Gene means follow a power law, cell types have marker genes, cells differ in depth, some cells
are damaged (mostly mitochondrial) or empty droplets, some genes are never seen, batches differ
a little. Each cell has a random stream of its own, so a cell's counts depend on the parameters,
the seed and the cell's number only, never on how the work was cut.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np
import pandas as pd

from scgpu_tasks.errors import ParameterError
from scgpu_tasks.kernels import synthetic as kernels

DTYPES = ("float32", "float64", "int32", "int64", "uint16", "uint32")
QUALITIES = ("good", "damaged", "empty droplet")
MT_GENES = tuple(
    f"MT-{name}"
    for name in "ND1 ND2 CO1 CO2 ATP8 ATP6 CO3 ND3 ND4L ND4 ND5 ND6 CYB".split()  # noqa: SIM905
)
CELL_TYPES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("CD4 T cell", ("IL7R", "CD3D", "LTB", "CCR7", "TCF7")),
    ("CD14 monocyte", ("LYZ", "S100A8", "S100A9", "CD14", "FCN1")),
    ("B cell", ("MS4A1", "CD79A", "CD79B", "CD37", "BANK1")),
    ("CD8 T cell", ("CD8A", "CD8B", "GZMK", "CD3E", "CCL5")),
    ("NK cell", ("GNLY", "NKG7", "KLRD1", "PRF1", "GZMB")),
    ("FCGR3A monocyte", ("FCGR3A", "MS4A7", "CDKN1C", "LST1", "VMO1")),
    ("Dendritic cell", ("FCER1A", "CST3", "CLEC10A", "CD1C", "CPVL")),
    ("Platelet", ("PPBP", "PF4", "GP9", "TUBB1", "CAVIN2")),
)
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]
CELLS_PER_TASK = 1_000


class SyntheticAtlas:
    """The law that a synthetic atlas follows; cells are drawn from it on demand.

    Parameters
    ----------
    n_vars
        Number of genes, 20 or more.
    nnz_per_cell
        Mean number of genes found in a cell; at most half of the genes. Default: 950, or a
        fifth of the genes where that is less.
    n_types
        Number of cell types, each with marker genes of its own.
    n_batches
        Number of batches; each shifts depth and a few genes a little.
    seed
        Same seed and parameters, same counts.
    dtype
        Data type of the (whole-numbered) counts.

    Raises
    ------
    ParameterError
        A parameter is out of range.
    """

    def __init__(
        self,
        n_vars: int,
        *,
        nnz_per_cell: float | None = None,
        n_types: int = 8,
        n_batches: int = 1,
        seed: int = 0,
        dtype: str = "float32",
    ) -> None:
        at_least("n_vars", n_vars, 20)
        at_least("n_types", n_types, 1)
        at_least("n_batches", n_batches, 1)
        at_least("seed", seed, 0)
        if nnz_per_cell is None:
            nnz_per_cell = min(950, n_vars / 5)
        if not 1 <= nnz_per_cell <= n_vars / 2:
            msg = f"nnz_per_cell must be from 1 to half of n_vars={n_vars}, not {nnz_per_cell}"
            raise ParameterError(msg)
        if n_types > n_vars // 2:
            msg = f"n_types={n_types} types need two genes each, but n_vars={n_vars}"
            raise ParameterError(msg)
        if str(dtype) not in DTYPES:
            msg = f"dtype must be one of {', '.join(DTYPES)}, not {dtype}"
            raise ParameterError(msg)
        self.n_vars = int(n_vars)
        self.nnz_per_cell = float(nnz_per_cell)
        self.n_types = int(n_types)
        self.n_batches = int(n_batches)
        self.seed = int(seed)
        self.dtype = np.dtype(dtype)
        self.index_dtype = np.dtype(np.uint16 if n_vars <= 1 << 16 else np.int32)
        self._make_genes()
        self._make_profiles()
        self._calibrate()

    def _make_genes(self) -> None:
        rng = np.random.default_rng([self.seed, 1])
        n = self.n_vars
        order = rng.permutation(n)
        n_mt = min(len(MT_GENES), max(1, n // 20))
        n_rp = min(90, n // 10)
        n_empty = n // 50
        self.mt, self.rp, self.empty, self.other = np.split(
            order, np.cumsum([n_mt, n_rp, n_empty])
        )
        names = np.array([f"GENE{i:05d}" for i in range(n)], dtype=object)
        names[self.mt] = MT_GENES[:n_mt]
        for i, gene in enumerate(self.rp):
            names[gene] = f"RP{'LS'[i % 2]}{3 + i // 2}"
        # Genes of middling rank make markers: seen often enough to find, not in every cell.
        n_markers = max(3, min(len(self.other) // (2 * self.n_types), round(0.012 * n)))
        first = len(self.other) // 40
        pool = np.resize(self.other[first:], n_markers * self.n_types)
        self.markers = pool.reshape(n_markers, self.n_types).T
        for (_, symbols), genes in zip(CELL_TYPES, self.markers, strict=False):
            for symbol, gene in zip(symbols, genes, strict=False):
                names[gene] = symbol
        self.var_names = names

    def _make_profiles(self) -> None:
        """Rows: one table of gene probabilities per type, then mt, ribosomal, and batches."""
        rng = np.random.default_rng([self.seed, 2])
        base = np.zeros(self.n_vars)
        base[self.other] = (np.arange(len(self.other)) + 25.0) ** -1.2
        rows = []
        for genes in self.markers:
            row = base * np.exp(rng.normal(0, 0.1, self.n_vars))
            row[genes] *= np.exp(rng.normal(2.6, 0.5, len(genes)))
            rows.append(row)
        for genes in (self.mt, self.rp):
            row = np.zeros(self.n_vars)
            row[genes] = rng.gamma(2.0, size=len(genes)) if len(genes) else 0
            rows.append(row if len(genes) else base)
        for _ in range(self.n_batches):
            chosen = self.other[rng.random(len(self.other)) < 0.1]
            row = base.copy()
            row[chosen] *= 8.0
            rows.append(row)
        self.profiles = np.stack([row / row.sum() for row in rows])
        weights = 1.0 / (2.0 + np.arange(self.n_types))
        self.type_weights = weights / weights.sum()
        self.type_depth = np.exp(rng.normal(0, 0.2, self.n_types))
        self.batch_depth = np.exp(rng.normal(0, 0.1, self.n_batches))

    def _calibrate(self) -> None:
        """Find the mean depth at which a cell shows ``nnz_per_cell`` genes."""
        # Latents of some cells stand for all of them.
        latents = self._latents(0, 200)
        low, high = 1.0, 1e4 * self.n_vars
        for _ in range(30):
            middle = float(np.sqrt(low * high))
            if self._expected_genes(latents, middle) < self.nnz_per_cell:
                low = middle
            else:
                high = middle
        self.depth = float(np.sqrt(low * high))

    def _expected_genes(self, latents: np.ndarray, depth: float) -> float:
        found = 0.0
        for cell in latents:
            t, b = int(cell["type"]), int(cell["batch"])
            share = self.profiles[t] * cell["f_type"]
            share += self.profiles[self.n_types] * cell["f_mt"]
            share += self.profiles[self.n_types + 1] * cell["f_rp"]
            share += self.profiles[self.n_types + 2 + b] * cell["f_batch"]
            found -= np.expm1(-share * (depth * cell["depth"])).sum()
        return found / len(latents)

    @cached_property
    def _tables(self) -> tuple[np.ndarray, np.ndarray]:
        return kernels.alias_tables(self.profiles)

    def _latents(self, start: int, stop: int) -> np.ndarray:
        cells = np.zeros(stop - start, kernels.LATENT)
        kernels.draw_latents(
            np.uint64(self.seed),
            start,
            np.cumsum(self.type_weights),
            self.type_depth,
            self.batch_depth,
            cells,
        )
        return cells

    def cells(self, start: int, stop: int) -> Rows:
        """Draw cells.

        Parameters
        ----------
        start, stop
            First cell, and the one after the last.

        Returns
        -------
        CSR's data, indices (sorted) and int64 indptr.
        """
        latents = self._latents(start, stop)
        latents["depth"] *= self.depth
        bound = int(np.minimum(latents["depth"] + 8, self.n_vars).sum()) + 1
        data = np.empty(bound, self.dtype)
        indices = np.empty(bound, self.index_dtype)
        indptr = np.zeros(stop - start + 1, np.int64)
        accept, alias = self._tables
        limit = np.iinfo(self.dtype).max if self.dtype.kind in "iu" else 1 << 24
        kernels.draw_counts(
            np.uint64(self.seed),
            start,
            latents,
            self.n_types,
            accept,
            alias,
            limit,
            data,
            indices,
            indptr,
        )
        nnz = int(indptr[-1])
        return data[:nnz], indices[:nnz], indptr

    @property
    def type_names(self) -> list[str]:
        """Names of the cell types."""
        names = [name for name, _ in CELL_TYPES[: self.n_types]]
        return names + [f"Type {i + 1}" for i in range(len(names), self.n_types)]

    def obs(self, n_obs: int) -> pd.DataFrame:
        """Names, cell type, batch and true quality of the first cells.

        Parameters
        ----------
        n_obs
            Number of cells.
        """
        latents = self._latents(0, n_obs)
        width = max(6, len(str(n_obs)))
        columns = {
            "cell_type": _categorical(latents["type"], self.type_names),
            "batch": _categorical(
                latents["batch"], [f"batch_{i + 1}" for i in range(self.n_batches)]
            ),
            "quality": _categorical(latents["quality"], list(QUALITIES)),
        }
        names = [f"cell_{i:0{width}d}" for i in range(n_obs)]
        return pd.DataFrame(columns, index=pd.Index(names, dtype=str))

    def var(self) -> pd.DataFrame:
        """Gene symbols, and which genes mark which type (empty: none)."""
        marks = np.full(self.n_vars, "", dtype=object)
        for name, genes in zip(self.type_names, self.markers, strict=True):
            marks[genes] = name
        return pd.DataFrame(
            {"marker_of": pd.Categorical(marks)}, index=pd.Index(self.var_names, dtype=str)
        )

    def blocks(self, n_obs: int, cells_per_block: int = 20_000) -> Iterator[Rows]:
        """Draw cells in blocks, on all cores.

        Parameters
        ----------
        n_obs
            Number of cells.
        cells_per_block
            Cells of each block but the last.
        """
        at_least("n_obs", n_obs, 0)
        at_least("cells_per_block", cells_per_block, 1)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for start in range(0, n_obs, cells_per_block):
                stop = min(start + cells_per_block, n_obs)
                starts = range(start, stop, CELLS_PER_TASK)
                stops = [min(s + CELLS_PER_TASK, stop) for s in starts]
                yield _stack(list(pool.map(self.cells, starts, stops)))


def at_least(name: str, value: float, low: int) -> None:
    """Refuse a parameter that is below its least value."""
    if not value >= low:
        msg = f"{name} must be at least {low}, not {value}"
        raise ParameterError(msg)


def _categorical(codes: np.ndarray, categories: list[str]) -> pd.Categorical[str]:
    return pd.Categorical.from_codes(codes.astype(np.intp).tolist(), pd.Index(categories))


def _stack(parts: list[Rows]) -> Rows:
    offsets = np.cumsum([0] + [len(data) for data, _, _ in parts])
    indptr = [p[:-1] + o for (_, _, p), o in zip(parts, offsets[:-1], strict=True)]
    return (
        np.concatenate([data for data, _, _ in parts]),
        np.concatenate([indices for _, indices, _ in parts]),
        np.concatenate([*indptr, offsets[-1:]]),
    )
