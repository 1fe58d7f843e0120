"""QC to PCA on a CPU: this library, scanpy with Dask, and crest-sc, side by side.

    python tests/benchmarks/qc_pca_cpu.py --cells 200000 --genes 20000 --repeats 2

makes a synthetic store (kept in --folder for the next time), and a Parquet copy of it for
crest-sc, then runs each contender in a process of its own, in turns. Measured is the wall time
from QC metrics to PCA, everything imported and compiled, clusters up, files in the page cache;
and the peak memory of the process and all its children, as the sum of their proportional set
sizes, sampled ten times a second. Files that a process maps count only where they are its own.

Contenders: `threads` (this library in one process), `cluster` (on the Dask cluster that suits
the machine), `scanpy` (Dask threads, zarrs, blocks of 20,000 cells), `crest` (out of core).
`profile` is `threads` with the time of each part. Ratios hold within one run of this script; a
busy machine changes all times, so compare nothing across runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

CONTENDERS = ("threads", "cluster", "scanpy", "crest")
BLOCK = 20_000


def store_of(folder: Path, cells: int, genes: int) -> Path:
    """The synthetic store; written if it is not there from an earlier run."""
    from scgpu_tasks.datasets import write_synthetic

    path = folder / f"cells{cells}x{genes}.zarr"
    return path if path.exists() else write_synthetic(path, cells, genes)


def parquet_of(store: Path) -> Path:
    """The same counts in the format that crest-sc reads out of core."""
    path = store.with_suffix(".parquet")
    if not path.exists():
        import anndata as ad
        import crest

        part = path.with_suffix(".part")
        crest.BioFrame.from_anndata(ad.read_zarr(store)).write_parquet(part)
        part.rename(path)
    return path


class PeakMemory:
    """Peak of the proportional set size of this process and its children, bytes."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        me = psutil.Process()
        while not self._stop.wait(0.1):
            total = 0
            for process in [me, *me.children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self.peak = max(self.peak, total)


def timed(run: Callable[[], Any], warm: Callable[[], Any]) -> dict[str, Any]:
    """Seconds and peak memory of `run`, after `warm` has compiled what it needs."""
    warm()
    with PeakMemory() as memory:
        start, cpu = time.perf_counter(), time.process_time()
        found = run()
        seconds = time.perf_counter() - start
        cpu = time.process_time() - cpu
    return {"seconds": seconds, "cpu_seconds": cpu, "peak_bytes": memory.peak, **found}


def pipeline(store: Path) -> dict[str, Any]:
    """QC to PCA with this library."""
    from scgpu_tasks.io.lazy import read_tables
    from scgpu_tasks.io.rows import open_rows
    from scgpu_tasks.specs import HVGSpec, PCASpec, QCSpec
    from scgpu_tasks.stages.pca import run_pca
    from scgpu_tasks.stages.qc import run_qc

    obs, var = read_tables(store)
    source = open_rows(store)
    start = time.perf_counter()
    qc = run_qc(source, obs, var, QCSpec(), HVGSpec())
    middle = time.perf_counter()
    few = PCASpec(n_comps=min(50, qc.summary["n_hvg"]))
    with tempfile.TemporaryDirectory(dir=store.parent) as folder:
        pca = run_pca(
            source,
            qc.cells,
            qc.genes,
            qc.summary["target_sum"],
            few,
            scores=Path(folder) / "scores.npy",
        )
        end = time.perf_counter()
    return {
        "qc_seconds": middle - start,
        "pca_seconds": end - middle,
        "passes": [qc.summary["passes"], pca.summary["passes"]],
        "n_cells": qc.summary["n_cells_kept"],
        "n_hvg": qc.summary["n_hvg"],
        "first_variances": pca.variance[:3].tolist(),
    }


def run_threads(store: Path, small: Path) -> dict[str, Any]:
    """This library in one process."""
    return timed(lambda: pipeline(store), lambda: pipeline(small))


def run_cluster(store: Path, small: Path) -> dict[str, Any]:
    """This library on a local Dask cluster that is already up."""
    from scgpu_tasks.cluster import start_cluster

    client = start_cluster(device="cpu")
    try:
        return timed(lambda: pipeline(store), lambda: pipeline(small))
    finally:
        client.close()
        client.cluster.close()


def run_scanpy(store: Path, small: Path) -> dict[str, Any]:
    """scanpy on a Dask array, computed by threads."""
    import anndata as ad
    import scanpy as sc
    import zarr

    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})

    def run(path: Path) -> dict[str, Any]:
        group = zarr.open_group(path, mode="r")
        obs, var = (ad.io.read_elem(group[name]) for name in ("obs", "var"))
        n_genes = len(var)
        x = ad.experimental.read_elem_lazy(group["X"], chunks=(BLOCK, n_genes))
        adata = ad.AnnData(x, obs, var)
        adata.var["mt"] = adata.var_names.str.startswith("MT-")
        sc.pp.calculate_qc_metrics(adata, qc_vars=["mt"], percent_top=None, inplace=True)
        keep = (adata.obs["n_genes_by_counts"] >= 200) & ~(adata.obs["pct_counts_mt"] > 20)
        adata = adata[keep.to_numpy()].copy()
        sc.pp.filter_genes(adata, min_cells=3)
        sc.pp.normalize_total(adata, target_sum=1e4)
        sc.pp.log1p(adata)
        sc.pp.highly_variable_genes(adata, n_top_genes=2000)
        sc.pp.pca(adata, n_comps=50)
        scores = adata.obsm["X_pca"]
        adata.obsm["X_pca"] = scores.compute() if hasattr(scores, "compute") else scores
        return {
            "n_cells": adata.n_obs,
            "n_hvg": int(adata.var["highly_variable"].sum()),
            "first_variances": adata.uns["pca"]["variance"][:3].tolist(),
        }

    return timed(lambda: run(store), lambda: run(small))


def run_crest(store: Path, small: Path) -> dict[str, Any]:
    """crest-sc, out of core."""
    import crest

    def run(path: Path) -> dict[str, Any]:
        cells = crest.read_parquet(path)
        crest.pp.calculate_qc_metrics(cells)
        cells = crest.pp.filter_cells(cells, min_genes=200, max_pct_mt=20)
        cells = crest.pp.filter_genes(cells, min_cells=3)
        crest.pp.normalize_total(cells)
        crest.pp.log1p(cells)
        crest.pp.highly_variable_genes(cells, n_top_genes=2000)
        crest.tl.pca(cells, n_comps=50)
        return {
            "n_cells": cells.n_obs,
            "n_hvg": int(cells.var["highly_variable"].sum()),
            "first_variances": [float(v) for v in cells.uns["pca"]["variance"][:3]],
        }

    return timed(
        lambda: run(store.with_suffix(".parquet")), lambda: run(small.with_suffix(".parquet"))
    )


def run_profile(store: Path, small: Path) -> dict[str, Any]:
    """`threads`, with processor seconds of each kernel; the rest of them is decoding."""
    import scgpu_tasks.stages.pca as pca_stage
    from scgpu_tasks.io.rows import RowBlocks
    from scgpu_tasks.stages import pca_visits, qc_visits, sources

    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    lock = threading.Lock()

    def watch(home: Any, name: str) -> None:
        inner = getattr(home, name)

        def outer(*arguments: Any, **options: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return inner(*arguments, **options)
            finally:
                with lock:
                    spent[name][0] += time.perf_counter() - wall
                    spent[name][1] += time.thread_time() - cpu

        setattr(home, name, outer)

    pipeline(small)
    for home, name in (
        (RowBlocks, "read"),
        (sources, "row_order"),
        (qc_visits, "cell_metrics"),
        (qc_visits, "gene_moments"),
        (pca_visits, "select"),
        (pca_visits, "gram_add"),
        (pca_visits, "pack"),
        (pca_visits, "project"),
        (pca_stage, "components"),
    ):
        watch(home, name)
    found = timed(lambda: pipeline(store), lambda: None)
    kernels = sum(cpu for name, (_, cpu) in spent.items() if name != "read")
    # What the calling threads spend in `read` is little: zarrs decodes on threads of its own.
    found["parts"] = {
        name: {"wall": round(wall, 3), "cpu": round(cpu, 3)}
        for name, (wall, cpu) in spent.items()
    }
    found["kernel_share"] = kernels / found["cpu_seconds"]
    found["decode_and_overhead_share"] = 1 - found["kernel_share"]
    found["decode_only"] = decode_only(store)
    return found


def decode_only(store: Path) -> dict[str, float]:
    """Read every block once, on as many threads, and do nothing with it."""
    from concurrent.futures import ThreadPoolExecutor

    from scgpu_tasks.io.rows import open_rows

    source = open_rows(store, chunks=10_000)
    wall, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(lambda i: source.read_block(i).shape, range(source.n_blocks)):
            pass
    return {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}


RUNS = {
    "threads": run_threads,
    "cluster": run_cluster,
    "scanpy": run_scanpy,
    "crest": run_crest,
    "profile": run_profile,
}


def in_a_process(name: str, store: Path, small: Path) -> dict[str, Any]:
    """Run one contender in a fresh interpreter."""
    command = [sys.executable, __file__, "--one", name, str(store), str(small)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        msg = f"{name} failed:\n{done.stderr[-3000:]}"
        raise RuntimeError(msg)
    return json.loads(done.stdout.splitlines()[-1])


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Best times and peaks, and how they compare with `threads`."""
    ours = min(run["seconds"] for run in results["threads"]) if "threads" in results else None
    lines = [f"{'':10}{'best s':>9}{'median s':>10}{'cpu s':>8}{'peak GB':>9}{'x threads':>11}"]
    for name, runs in results.items():
        seconds = sorted(run["seconds"] for run in runs)
        best = min(runs, key=lambda run: run["seconds"])
        peak = max(run["peak_bytes"] for run in runs) / 1e9
        ratio = f"{seconds[0] / ours:.1f}" if ours else ""
        lines.append(
            f"{name:10}{seconds[0]:9.2f}{seconds[len(seconds) // 2]:10.2f}"
            f"{best['cpu_seconds']:8.2f}{peak:9.2f}{ratio:>11}"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=200_000)
    parser.add_argument("--genes", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks"))
    parser.add_argument(
        "--only", nargs="+", choices=tuple(RUNS), default=[*CONTENDERS, "profile"]
    )
    parser.add_argument(
        "--one", nargs=3, metavar=("NAME", "STORE", "SMALL"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.one:
        name, store, small = options.one
        warnings.simplefilter("ignore")
        print(json.dumps(RUNS[name](Path(store), Path(small))))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    store = store_of(options.folder, options.cells, options.genes)
    small = store_of(options.folder, 3_000, options.genes)
    if "crest" in options.only:
        for path in (store, small):
            parquet_of(path)
    results: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for _ in range(options.repeats):
        for name in options.only:
            if name != "profile" or not results[name]:
                results[name].append(in_a_process(name, store, small))
                print(name, json.dumps(results[name][-1]), flush=True)
    machine = {"cpus": len(os.sched_getaffinity(0)), "processor": platform.processor()}
    print(json.dumps({"machine": machine, "load": os.getloadavg(), "results": results}))
    print(table(results))


if __name__ == "__main__":
    main()
