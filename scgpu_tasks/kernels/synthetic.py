"""Draw synthetic counts: one random stream per cell, gene by gene from alias tables."""

from __future__ import annotations

import math

import numba
import numpy as np

LATENT = np.dtype(
    [
        ("type", "i4"),
        ("batch", "i4"),
        ("quality", "i1"),
        ("depth", "f8"),  # molecules, relative to the mean; scaled by the caller before drawing
        ("f_type", "f8"),
        ("f_mt", "f8"),
        ("f_rp", "f8"),
        ("f_batch", "f8"),
    ]
)
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S11, _S32 = (np.uint64(n) for n in (27, 30, 31, 11, 32))
_LOW = np.uint64(0xFFFFFFFF)


@numba.njit(cache=True, nogil=True, inline="always")
def _mix(z: np.uint64) -> np.uint64:
    """SplitMix64's output function (Steele, Lea and Flood 2014)."""
    z = (z ^ (z >> _S30)) * _MIX1
    z = (z ^ (z >> _S27)) * _MIX2
    return z ^ (z >> _S31)


@numba.njit(cache=True, nogil=True, inline="always")
def _start(seed: np.uint64, cell: int, purpose: int) -> np.uint64:
    return _mix(_mix(seed * _STEP + np.uint64(purpose)) + np.uint64(cell) * _STEP)


@numba.njit(cache=True, nogil=True, inline="always")
def _uniform(z: np.uint64) -> float:
    """Turn 64 bits into a number between 0 and 1, never 0 and never 1."""
    return (float(_mix(z) >> _S11) + 0.5) * 2.0**-53


@numba.njit(cache=True, nogil=True)
def _normal(z: np.uint64) -> float:
    radius = math.sqrt(-2.0 * math.log(_uniform(z)))
    return radius * math.cos(2.0 * math.pi * _uniform(z ^ _MIX1))


@numba.njit(cache=True, nogil=True)
def draw_latents(
    seed: np.uint64,
    first: int,
    type_cdf: np.ndarray,
    type_depth: np.ndarray,
    batch_depth: np.ndarray,
    out: np.ndarray,
) -> None:
    """Fill `out` (LATENT records) for cells ``first, first + 1, …``."""
    for i in range(len(out)):
        z = _start(seed, first + i, 1)
        draws = np.empty(8)
        for k in range(8):
            z += _STEP
            draws[k] = _uniform(z) if k < 3 else _normal(z)
        kind = min(int(np.searchsorted(type_cdf, draws[0])), len(type_cdf) - 1)
        batch = min(int(draws[1] * len(batch_depth)), len(batch_depth) - 1)
        depth = type_depth[kind] * batch_depth[batch] * math.exp(0.35 * draws[3] - 0.06)
        mt = 0.05 * math.exp(0.35 * draws[4])
        quality = 0
        if draws[2] < 0.03:
            quality = 2
            depth *= 0.04
        elif draws[2] < 0.07:
            quality = 1
            depth *= 0.5
            mt = 0.45 + 0.1 * math.tanh(draws[5])
        mt = min(mt, 0.7)
        rp = min(0.12 * math.exp(0.3 * draws[6]), 0.25)
        shift = 0.06 if len(batch_depth) > 1 else 0.0
        cell = out[i]
        cell.type = kind
        cell.batch = batch
        cell.quality = quality
        cell.depth = depth
        cell.f_mt = mt
        cell.f_rp = rp * (1.0 - mt)
        cell.f_batch = shift * (1.0 - mt)
        cell.f_type = 1.0 - cell.f_mt - cell.f_rp - cell.f_batch


def alias_tables(profiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Walker's alias tables, one row per profile.

    Parameters
    ----------
    profiles
        Probabilities, shape (n_profiles, n_genes), each row summing to 1.

    Returns
    -------
    (accept, alias): uint32 thresholds (scaled to 2³² − 1) and int32 gene numbers.
    """
    accept = np.empty(profiles.shape, np.uint32)
    alias = np.empty(profiles.shape, np.int32)
    for row, (a, b) in zip(profiles, zip(accept, alias, strict=True), strict=True):
        _alias_row(row, a, b)
    return accept, alias


@numba.njit(cache=True, nogil=True)
def _alias_row(p: np.ndarray, accept: np.ndarray, alias: np.ndarray) -> None:
    n = len(p)
    q = p * n
    small = np.empty(n, np.int64)
    large = np.empty(n, np.int64)
    n_small = n_large = 0
    for i in range(n):
        alias[i] = i
        accept[i] = 4294967295
        if q[i] < 1.0:
            small[n_small] = i
            n_small += 1
        else:
            large[n_large] = i
            n_large += 1
    while n_small > 0 and n_large > 0:
        n_small -= 1
        i = small[n_small]
        j = large[n_large - 1]
        accept[i] = int(q[i] * 4294967295.0)
        alias[i] = j
        q[j] -= 1.0 - q[i]
        if q[j] < 1.0:
            n_large -= 1
            small[n_small] = j
            n_small += 1
    # Rounding can leave an impossible gene here; it must stay impossible.
    best = np.argmax(p)
    for k in range(n_small):
        if p[small[k]] == 0.0:
            accept[small[k]] = 0
            alias[small[k]] = best


@numba.njit(cache=True, nogil=True)
def _add_draws(
    z: np.uint64, n: int, accept: np.ndarray, alias: np.ndarray, tally: np.ndarray
) -> np.uint64:
    size = np.uint64(len(accept))
    for _ in range(n):
        z += _STEP
        bits = _mix(z)
        gene = ((bits >> _S32) * size) >> _S32
        if (bits & _LOW) >= np.uint64(accept[gene]):
            gene = np.uint64(alias[gene])
        tally[gene] += 1
    return z


@numba.njit(cache=True, nogil=True)
def draw_counts(
    seed: np.uint64,
    first: int,
    cells: np.ndarray,
    n_types: int,
    accept: np.ndarray,
    alias: np.ndarray,
    limit: int,
    data: np.ndarray,
    indices: np.ndarray,
    indptr: np.ndarray,
) -> None:
    """Draw the molecules of each cell and write them as CSR rows with sorted genes.

    `cells` are LATENT records whose depth is in molecules; a count stops at `limit`.
    Profiles are in the order: types, mitochondrial, ribosomal, batches.
    """
    n_genes = accept.shape[1]
    tally = np.zeros(n_genes, np.uint32)
    nnz = 0
    for i in range(len(cells)):
        cell = cells[i]
        z = _start(seed, first + i, 2)
        total = int(cell.depth)
        left = total
        for which in range(4):
            z += _STEP
            if which == 0:
                row, share = n_types, cell.f_mt
            elif which == 1:
                row, share = n_types + 1, cell.f_rp
            elif which == 2:
                row, share = n_types + 2 + cell.batch, cell.f_batch
            else:
                row, share = cell.type, 1.0
            n = min(left, int(share * total + _uniform(z)))
            if which == 3:
                n = left
            left -= n
            z = _add_draws(z, n, accept[row], alias[row], tally)
        for gene in range(n_genes):
            count = tally[gene]
            if count > 0:
                tally[gene] = 0
                data[nnz] = min(count, limit)
                indices[nnz] = gene
                nnz += 1
        indptr[i + 1] = nnz
