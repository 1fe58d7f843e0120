"""QC and PCA on GPUs beside a bare read of the same store, and each kernel alone.

    python -m tests.benchmarks.qc_pca_gpu STORE [--gpus N] [--repeats 2] [--only SECTION ...]

STORE is made by make_gpu_atlas.py; it should lie in the page cache. All sections run on one
cluster, one after the other:

- bare read: every block read and decoded, nothing else;
- stages: QC and PCA, each reading the store, and with blocks kept on the GPUs between them:
  seconds, passes and rate of each stage, ratio to the bare read, peak device memory, a digest
  that shows whether the bytes of the result repeat;
- gram precisions: seconds and error of each way to make the Gram matrix of 100,000 rows;
- kernels: one block through each kernel alone, with the bytes and operations it must move and
  make, the floor they imply, and the ratio (roofline);
- names: QC while the table of the cells is read;
- host decoding: GPU compute with CPU decoding, on a part of the store;
- small budget: the whole store again on GPUs that may use a quarter of its decoded size, on a
  cluster of its own, against the numbers of the stages.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import logging
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

N_HVG, N_COMPS = 2_000, 50
QUARTER = 4
GRAM_ROWS = 100_000
# A store is this many times larger than the small budget.
LARGER = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--gpus", type=int, default=0, help="0: all")
    parser.add_argument("--threads", type=int, default=0, help="for each GPU; 0: the default")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--chunks", default="auto")
    parser.add_argument("--host-blocks", type=int, default=4, help="decoded by the CPU")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--skip", nargs="+", choices=SECTIONS, default=[])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("    %(message)s"))
    steps = logging.getLogger("scgpu_tasks.stages")
    steps.addHandler(handler)
    steps.setLevel(logging.DEBUG)
    result = run(args)
    show({"summary": result["summary"]})
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


def run(args: argparse.Namespace) -> dict[str, Any]:
    from scgpu_tasks.cluster import start_cluster
    from scgpu_tasks.io.rows import open_rows

    options = {k: v for k, v in (("workers", args.gpus), ("threads", args.threads)) if v}
    started = time.perf_counter()
    with start_cluster(device="gpu", **options) as client:
        up = time.perf_counter() - started
        chunks = args.chunks if args.chunks == "auto" else int(args.chunks)
        started = time.perf_counter()
        rows = open_rows(args.store, chunks=chunks, device="gpu")
        opened = time.perf_counter() - started
        result: dict[str, Any] = {
            "device": client.submit(device_name).result(),
            "workers": len(client.scheduler_info(n_workers=-1)["workers"]),
            "threads": sum(client.nthreads().values()),
            "shape": list(rows.shape),
            "nnz": rows.nnz,
            "blocks": rows.n_blocks,
            "stored GB": round(rows.stored_bytes / 1e9, 2),
            "decoded GB": round(decoded_bytes(rows) / 1e9, 2),
            "cluster up, s": round(up, 2),
            "store opened, s": round(opened, 3),
        }
        show(result)
        for name in SECTIONS:
            if name not in args.only or name in args.skip:
                continue
            started = time.perf_counter()
            # One section that fails must not cost the numbers of the others.
            try:
                result[name] = SECTIONS[name](client, rows, args)
            except Exception as error:
                logging.exception("section %s", name)
                result[name] = {"FAILED": repr(error)}
            show({name: result[name]})
            print(f"({name}: {time.perf_counter() - started:.1f} s)", flush=True)
    result["summary"] = summary(result)
    return result


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Best seconds of each stage, and their ratio to the bare read of this run."""
    bare = result.get("bare read", {}).get("best, s")
    found: dict[str, Any] = {"bare read, s": bare}
    for way, runs in result.get("stages", {}).items():
        if way == "FAILED":
            continue
        for name in ("QC, s", "PCA, s", "seconds"):
            best = min(runs[name])
            ratio = f", {best / bare:.2f} x the bare read" if bare else ""
            found[f"{way}: {name}"] = f"{best}{ratio}"
    return found


def decoded_bytes(rows: Any) -> int:
    return int(rows.nnz) * (rows.dtype.itemsize + 2)


# The stages


def bare_read(client: Any, rows: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Read and decode every block, as the stages' first step does."""
    from scgpu_tasks.stages.engine import spans_of
    from tests.benchmarks import qc_pca_gpu as module

    times = []
    for _ in range(args.repeats + 1):
        values: list[int] = []
        started = time.perf_counter()
        futures = [
            client.submit(module.read_span, rows, span.bounds, pure=False)
            for span in spans_of(rows)
        ]
        values = client.gather(futures)
        times.append(time.perf_counter() - started)
        del futures
    if sum(values) != rows.nnz:
        msg = f"{sum(values)} values were read, not {rows.nnz}"
        raise RuntimeError(msg)
    best = min(times[1:])
    return {
        "first, s": round(times[0], 3),
        "seconds": [round(t, 3) for t in times[1:]],
        "best, s": round(best, 3),
        "decoded GB/s": round(decoded_bytes(rows) / best / 1e9, 1),
        "stored GB/s": round(rows.stored_bytes / best / 1e9, 1),
    }


def read_span(rows: Any, bounds: tuple[int, ...]) -> int:
    from scgpu_tasks.kernels._gpu.streams import own_stream

    total = 0
    with own_stream():
        for start, stop in itertools.pairwise(bounds):
            total += len(rows.read(start, stop).data)
    return total


def stages(client: Any, rows: Any, args: argparse.Namespace) -> dict[str, Any]:
    """QC and PCA with each way of keeping blocks."""
    found: dict[str, Any] = {}
    for keep in (False, True):
        # Only numbers are kept: one run's scores are gone before the next makes its own.
        # Watching the memory takes time: only the first run is watched.
        runs = [one_run(client, rows, keep=keep, watch=i == 0)[0] for i in range(args.repeats)]
        whole = decoded_bytes(rows) / 1e9
        passes = runs[-1]["passes"]
        found["blocks kept" if keep else "each stage reads"] = {
            "seconds": [r["seconds"] for r in runs],
            "QC, s": [r["qc"] for r in runs],
            "PCA, s": [r["pca"] for r in runs],
            "passes of QC, of PCA": passes,
            "decoded GB/s of QC": round(passes[0] * whole / min(r["qc"] for r in runs), 1),
            "decoded GB/s of PCA": round(passes[1] * whole / min(r["pca"] for r in runs), 1),
            "stored GB read by QC, by PCA": runs[-1]["stored"],
            "same bytes every time": len({r["digest"] for r in runs}) == 1,
            "digest": runs[-1]["digest"],
            "peak device memory of each worker, GB": runs[0]["peak"],
            "of it new, GB": runs[0]["grown"],
            "of it kept blocks, GB": runs[-1]["kept"],
            "cells kept": runs[-1]["cells"],
        }
    return found


def one_run(
    client: Any, rows: Any, *, keep: bool, watch: bool = True
) -> tuple[dict[str, Any], Any, Any]:
    """QC and PCA once: what was measured, and both results; says where the time goes."""
    from scgpu_tasks.specs import HVGSpec, PCASpec, QCSpec
    from scgpu_tasks.stages.pca import run_pca
    from scgpu_tasks.stages.qc import run_qc
    from scgpu_tasks.stages.resident import kept_bytes
    from tests.benchmarks import qc_pca_gpu as module

    # Names are not what is measured here: see `names`.
    obs = pd.DataFrame(index=pd.RangeIndex(rows.shape[0]))
    var = gene_names(rows)
    if watch:
        client.run(module.watch_memory)
    print(f"  QC{', blocks kept' if keep else ''}", flush=True)
    started = time.perf_counter()
    qc = run_qc(rows, obs, var, QCSpec(), HVGSpec(n_top_genes=N_HVG), keep_blocks=keep)
    middle = time.perf_counter()
    kept = client.run(kept_bytes)
    print("  PCA", flush=True)
    again = time.perf_counter()
    pca = run_pca(rows, qc.cells, qc.genes, qc.summary["target_sum"], PCASpec(n_comps=N_COMPS))
    ended = time.perf_counter()
    peaks = client.run(module.peak_memory) if watch else {}
    digest = hashlib.sha256()
    for array in (pca.X_pca, pca.PCs, qc.genes["means"].to_numpy()):
        digest.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
    numbers = {
        "seconds": round(ended - again + middle - started, 3),
        "qc": round(middle - started, 3),
        "pca": round(ended - again, 3),
        "passes": [qc.summary["passes"], pca.summary["passes"]],
        "stored": [round(part.summary["stored_bytes_read"] / 1e9, 2) for part in (qc, pca)],
        "digest": digest.hexdigest()[:16],
        "peak": [round(peak / 1e9, 1) for peak, _ in peaks.values()],
        "grown": [round(grown / 1e9, 1) for _, grown in peaks.values()],
        "kept": [round(size / 1e9, 1) for size in kept.values()],
        "cells": qc.summary["n_cells_kept"],
    }
    return numbers, qc, pca


def gene_names(rows: Any) -> pd.DataFrame:
    import zarr
    from anndata.io import read_elem

    var = read_elem(zarr.open_group(rows.store, mode="r")["var"])
    return pd.DataFrame(index=var.index)


def names(client: Any, rows: Any, args: argparse.Namespace) -> dict[str, Any]:
    """QC while the table of the cells is read: both share the client's process."""
    from scgpu_tasks.specs import HVGSpec, QCSpec
    from scgpu_tasks.stages.qc import run_qc

    found: dict[str, Any] = {}

    def table() -> pd.DataFrame:
        import zarr
        from anndata.io import read_elem

        started = time.perf_counter()
        obs = read_elem(zarr.open_group(rows.store, mode="r")["obs"])
        found["cells"] = len(obs)
        found["table of the cells, s"] = round(time.perf_counter() - started, 2)
        return obs

    started = time.perf_counter()
    run_qc(rows, table, gene_names(rows), QCSpec(), HVGSpec(n_top_genes=N_HVG))
    found["QC and the table, s"] = round(time.perf_counter() - started, 2)
    return found


def small_budget(client: Any, rows: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Run on GPUs that may use a quarter of the store's decoded size, all together."""
    from scgpu_tasks.cluster import start_cluster
    from scgpu_tasks.io.rows import open_rows

    _, qc, pca = one_run(client, rows, keep=False)
    n_workers = len(client.scheduler_info(n_workers=-1)["workers"])
    memory = client.submit(device_memory, pure=False).result()
    budget = decoded_bytes(rows) / LARGER / n_workers
    # What the workers of the first cluster hold is none of the small one's business.
    client.run(drop_memory)
    options = {"workers": args.gpus} if args.gpus else {}
    share = min(budget / memory, 0.75)
    with start_cluster(device="gpu", threads=2, gpu_share=share, **options) as tight:
        small = open_rows(rows.store, device="gpu", max_bytes=int(budget / 32))
        numbers, qc_small, pca_small = one_run(tight, small, keep=True)
    same = qc.genes["highly_variable"].equals(qc_small.genes["highly_variable"])
    numbers |= {
        "budget of each GPU, GB": round(share * memory / 1e9, 2),
        "decoded size of the store, GB": round(decoded_bytes(rows) / 1e9, 1),
        "blocks": small.n_blocks,
        "same cells": bool(qc.cells["passed_qc"].equals(qc_small.cells["passed_qc"])),
        "same genes": bool(same),
    }
    if same:
        cosines = np.abs((pca.PCs * pca_small.PCs).sum(axis=0))
        numbers |= {
            "largest relative difference of variances": float(
                np.abs(pca_small.variance / pca.variance - 1).max()
            ),
            "smallest cosine of loadings": float(cosines.min()),
        }
    return numbers


def device_memory() -> int:
    import cupy

    return int(cupy.cuda.runtime.memGetInfo()[1])


def drop_memory() -> None:
    """Free what this worker keeps, decoder's scratch included."""
    from scgpu_tasks.io.scratch import release_memory
    from scgpu_tasks.stages import resident

    resident.drop()
    release_memory()


_watch: dict[str, Any] = {}


def watch_memory() -> None:
    """Sample this worker's free device memory until `peak_memory`."""
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    least, done = [free], threading.Event()

    def sample() -> None:
        while not done.wait(0.01):
            least[0] = min(least[0], cupy.cuda.runtime.memGetInfo()[0])

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    _watch.update(total=total, before=free, least=least, done=done, thread=thread)


def peak_memory() -> tuple[int, int]:
    """Most bytes of the device in use since `watch_memory`; and by how much that was more."""
    _watch["done"].set()
    _watch["thread"].join()
    least = _watch["least"][0]
    return _watch["total"] - least, _watch["before"] - least


def device_name() -> str:
    import cupy

    return str(cupy.cuda.runtime.getDeviceProperties(0)["name"].decode())


# Kernels alone


@dataclass
class Case:
    """One block on the device, and what the kernels need beside it."""

    rows: Any
    keep: np.ndarray
    factor: np.ndarray
    position: np.ndarray
    sets: np.ndarray
    components: np.ndarray


def kernels(client: Any, rows: Any, _: argparse.Namespace) -> list[dict[str, Any]]:
    from tests.benchmarks import qc_pca_gpu as module

    found: list[dict[str, Any]] = client.submit(module.time_kernels, rows, pure=False).result()
    return found


def make_case(rows: Any) -> Case:
    from scgpu_tasks.kernels.arrays import to_host
    from scgpu_tasks.kernels.moments import N_CELLS, gene_moments
    from scgpu_tasks.kernels.qc import cell_metrics
    from scgpu_tasks.kernels.transform import Transform
    from scgpu_tasks.stages.sources import block_rows

    start, stop = int(rows.bounds[0]), int(rows.bounds[1])
    block = block_rows(rows.read(start, stop), rows.shape[1])[0]
    rng = np.random.default_rng(0)
    sets = np.zeros(block.n_cols, np.uint64)
    sets[rng.choice(block.n_cols, 13, replace=False)] = 1
    metrics = cell_metrics(block, sets, 1, ())
    keep = to_host(metrics.n_genes) >= 200
    factor = 1e4 / np.maximum(to_host(metrics.total), 1)
    code = np.where(keep, 0, -1).astype(np.int32)
    kept, _ = gene_moments(block, code, factor, Transform.SCALE, 1)
    table = to_host(kept)[0]
    mean = table[:, 2] / keep.sum()
    spread = (table[:, 3] / keep.sum() - mean**2) / np.maximum(mean, 1e-12)
    spread[table[:, N_CELLS] < 3] = 0
    chosen = np.argsort(-spread, kind="stable")[:N_HVG]
    position = np.full(block.n_cols, -1, np.int32)
    position[chosen] = np.arange(N_HVG)
    return Case(block, keep, factor, position, sets, rng.normal(size=(N_HVG, N_COMPS)))


def timed(call: Callable[[], Any], repeats: int = 5) -> float:
    """Median seconds on the device, after one call to warm up."""
    import cupy

    call()
    times = []
    for _ in range(repeats):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes a second of a copy on the device, read and written."""
    import cupy

    source = cupy.zeros(1 << 31, np.uint8)
    target = cupy.empty_like(source)
    return 2 * source.nbytes / timed(lambda: cupy.copyto(target, source))


def product_rate() -> float:
    """Operations a second of float64 products."""
    import cupy

    a = cupy.random.default_rng(0).standard_normal((8192, 8192))
    return 2 * 8192**3 / timed(lambda: cupy.matmul(a, a), 3)


def time_kernels(rows: Any) -> list[dict[str, Any]]:
    """Run in a worker: every kernel on one block, beside its floor."""
    import cupy

    from scgpu_tasks.kernels._gpu.gram import PANEL
    from scgpu_tasks.kernels._gpu.streams import own_stream
    from scgpu_tasks.kernels.gram import gram_add
    from scgpu_tasks.kernels.moments import gene_moments
    from scgpu_tasks.kernels.project import project
    from scgpu_tasks.kernels.qc import cell_metrics
    from scgpu_tasks.kernels.rows import row_order
    from scgpu_tasks.kernels.select import pack, select
    from scgpu_tasks.kernels.transform import Transform

    with own_stream():
        bandwidth, rate = copy_rate(), product_rate()
        case = make_case(rows)
        block = case.rows
        code = np.where(case.keep, 0, -1).astype(np.int32)
        chosen = select(block, case.keep, case.position, N_HVG)
        packed = pack(chosen)
        factor = cupy.asarray(case.factor[case.keep])
        gram, sums = cupy.zeros((N_HVG, N_HVG)), cupy.zeros(N_HVG)
        scores = cupy.empty((chosen.n_rows, N_COMPS), np.float32)
        zero = np.zeros(N_COMPS)
        indices, data = block.indices.nbytes, block.data.nbytes
        genes, n, m = block.n_cols, chosen.n_rows, len(chosen.data)
        small = chosen.indices.nbytes + chosen.data.nbytes
        log1p, scale = Transform.LOG1P, Transform.SCALE
        calls: list[tuple[str, Callable[[], Any], float, float]] = [
            ("row_order", lambda: row_order(block), indices, 0),
            ("cell_metrics", lambda: cell_metrics(block, case.sets, 1, ()), indices + data, 0),
            ("cell_metrics, top 20", lambda: cell_metrics(block, case.sets, 1, (20,)),
             indices + 2 * data, 0),
            ("gene_moments", lambda: gene_moments(block, code, case.factor, scale, 1),
             2 * (indices + data) + 64 * genes, 0),
            ("select", lambda: select(block, case.keep, case.position, N_HVG),
             2 * (indices + data) + small, 0),
            ("pack", lambda: pack(chosen), 2 * chosen.data.nbytes + m, 0),
            ("gram_add", lambda: gram_add(chosen, factor, log1p, N_HVG, gram, sums),
             small + 2 * 8.0 * n * N_HVG, n * N_HVG * (N_HVG + PANEL)),
            ("project", lambda: project(packed, factor, log1p, case.components, zero, scores),
             packed.indices.nbytes + packed.data.nbytes + scores.nbytes, 2.0 * m * N_COMPS),
        ]  # fmt: skip
        table = []
        for name, call, n_bytes, n_operations in calls:
            seconds = timed(call)
            floor = max(n_bytes / bandwidth, n_operations / rate)
            table.append(
                {
                    "kernel": name,
                    "GB": round(n_bytes / 1e9, 3),
                    "TFLOP": round(n_operations / 1e12, 4),
                    "floor, ms": round(floor * 1e3, 3),
                    "measured, ms": round(seconds * 1e3, 3),
                    "ratio": round(seconds / floor, 2),
                    "whole store, s": round(seconds * rows.nnz / len(block.data), 3),
                }
            )
        ceilings = {
            "kernel": "ceilings",
            "copy, TB/s": round(bandwidth / 1e12, 2),
            "float64 products, TFLOP/s": round(rate / 1e12, 1),
            "block": f"{block.n_rows} x {genes}, {len(block.data)} values",
            "chosen": f"{n} x {N_HVG}, {m} values",
        }
    return [ceilings, *table]


def gram_precisions(client: Any, rows: Any, _: argparse.Namespace) -> list[dict[str, Any]]:
    from tests.benchmarks import qc_pca_gpu as module

    found: list[dict[str, Any]] = client.submit(
        module.compare_precisions, rows, pure=False
    ).result()
    return found


def compare_precisions(rows: Any) -> list[dict[str, Any]]:
    """Run in a worker: each way to multiply on one block, against float64."""
    import cupy

    from scgpu_tasks.kernels._gpu import gram as gpu
    from scgpu_tasks.kernels._gpu.streams import own_stream
    from scgpu_tasks.kernels.select import select
    from scgpu_tasks.kernels.transform import Transform

    ways: list[dict[str, Any]] = [{"precision": name} for name in gpu.PRECISIONS]
    ways += [{"precision": "float64", "panel": n} for n in (256, 1024, N_HVG)]
    ways += [{"precision": "float64", "stretch": n} for n in (1024, 16_384)]
    ways += [{"precision": "float16x2", "stretch": n} for n in (256, 512)]
    with own_stream():
        case = make_case(rows)
        case.keep[np.cumsum(case.keep) > GRAM_ROWS] = False
        chosen = select(case.rows, case.keep, case.position, N_HVG)
        factor = cupy.asarray(case.factor[case.keep])
        n = chosen.n_rows

        def make(**how: Any) -> tuple[Any, Any]:
            gram, sums = cupy.zeros((N_HVG, N_HVG)), cupy.zeros(N_HVG)
            gpu.gram_add(chosen, factor, Transform.LOG1P, N_HVG, gram, sums, **how)
            return gram, sums

        # Plain products of dense rows in float64, as a check that shares nothing with the rest.
        values = cupy.zeros((n, N_HVG))
        of = cupy.asarray(np.repeat(np.arange(n), np.diff(chosen.indptr.get())))
        values[of, chosen.indices.astype(np.int64)] = cupy.log1p(chosen.data * factor[of])
        expected = values.T @ values
        values -= values.mean(axis=0)
        covariance = values.T @ values
        del values, of
        spread = cupy.sqrt(cupy.maximum(cupy.diagonal(covariance), 1e-300))
        variances = cupy.linalg.eigvalsh(covariance)[::-1][:N_COMPS]
        table = []
        for how in ways:
            gram, sums = make(**how)
            error = cupy.abs(gram - expected) / cupy.outer(spread, spread)
            found = cupy.linalg.eigvalsh(gram - cupy.outer(sums, sums) / n)[::-1][:N_COMPS]
            off = found / variances - 1
            seconds = timed(lambda how=how: make(**how), 3)
            per_row = seconds / n * rows.shape[0]
            table.append(
                {
                    "way": " ".join(str(v) for v in how.values())
                    if len(how) == 1
                    else ", ".join(f"{k} {v}" for k, v in how.items()),
                    "ms": round(seconds * 1e3, 2),
                    "whole store on one GPU, s": round(per_row, 3),
                    "TFLOP/s of one full product": round(2 * n * N_HVG**2 / seconds / 1e12, 1),
                    "largest error": f"{float(error.max()):.1e}",
                    "largest error of variances": f"{float(cupy.abs(off).max()):.1e}",
                    "their mean error": f"{float(off.mean()):+.1e}",
                }
            )
    return table


# CPU decoding, GPU compute


@dataclass(frozen=True)
class Part:
    """The first blocks of a store; the GPU works on what the GPU or the host decodes."""

    rows: Any
    n_blocks: int
    on_host: bool

    device = "gpu"

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.rows.bounds[self.n_blocks]), self.rows.shape[1]

    @property
    def bounds(self) -> Any:
        return self.rows.bounds[: self.n_blocks + 1]

    def read(self, start: int, stop: int) -> Any:
        block = self.rows.read(start, stop)
        if self.on_host:
            import cupy

            block.data, block.indices = cupy.asarray(block.data), cupy.asarray(block.indices)
        return block


def host_decoding(client: Any, rows: Any, args: argparse.Namespace) -> dict[str, Any]:
    """QC of a part of the store, decoded by the CPU and by the GPU."""
    from dataclasses import replace

    from scgpu_tasks.specs import HVGSpec, QCSpec
    from scgpu_tasks.stages.qc import run_qc
    from tests.benchmarks import qc_pca_gpu as module

    # The same cells for both, in the blocks that suit each: the host's threads need many.
    whole = int(rows.bounds[1])
    n_cells = min(args.host_blocks * whole, rows.shape[0])
    found: dict[str, Any] = {}
    seconds = {}
    for name, on_host, step in (
        ("CPU decodes", True, max(1, whole // QUARTER)),
        ("GPU decodes", False, whole),
    ):
        bounds = np.append(np.arange(0, n_cells, step), n_cells).astype(np.int64)
        n = len(bounds) - 1
        cut = replace(rows, bounds=bounds, device="cpu" if on_host else "gpu")
        part = module.Part(cut, n, on_host)
        obs = pd.DataFrame(index=pd.RangeIndex(part.shape[0]))
        times = []
        for _ in range(2):
            started = time.perf_counter()
            run_qc(part, obs, gene_names(rows), QCSpec(), HVGSpec(n_top_genes=N_HVG))
            times.append(time.perf_counter() - started)
        seconds[name] = min(times)
        found[f"{name}, s"] = round(min(times), 3)
    found["cells"] = int(bounds[-1])
    found["GPU decoding is faster by"] = round(
        seconds["CPU decodes"] / seconds["GPU decodes"], 1
    )
    return found


SECTIONS: dict[str, Callable[[Any, Any, argparse.Namespace], Any]] = {
    "bare read": bare_read,
    "stages": stages,
    "gram precisions": gram_precisions,
    "kernels": kernels,
    "names": names,
    "host decoding": host_decoding,
    "small budget": small_budget,
}


def show(result: dict[str, Any], indent: str = "") -> None:
    """Print nested results as lines, and lists of records as tables."""
    for name, value in result.items():
        if isinstance(value, dict):
            print(f"{indent}{name}:")
            show(value, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            print(f"{indent}{name}:")
            for record in value:
                line = ", ".join(f"{k} {v}" for k, v in record.items())
                print(f"{indent}  {line}")
        else:
            print(f"{indent}{name:<44} {value}")


if __name__ == "__main__":
    main()
