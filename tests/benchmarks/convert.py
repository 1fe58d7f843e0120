"""How fast is convert_zarr, against plain zstd on the same bytes and against anndata?

    python tests/benchmarks/convert.py --cells 200000 --genes 20000

makes a blosc zarr v2 store and a gzip h5ad of one synthetic atlas (kept in --folder for the
next time), then runs for each of them, in processes of their own:

- zstd: every chunk of the result compressed again by plain zstd, on as many threads;
- convert: convert_zarr, with and without verification;
- anndata: read, then write_zarr with its default settings.

Peak memory is the largest resident set of the process. Results are printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SOURCES = ("blosc.zarr", "gzip.h5ad")


def prepare(folder: Path, cells: int, genes: int) -> None:
    """Write the two sources, if they are not there from an earlier run."""
    import anndata as ad
    import numcodecs
    import numpy as np
    import zarr

    from scgpu_tasks.datasets import write_synthetic

    if all((folder / name).exists() for name in SOURCES):
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_synthetic(folder / "synthetic.zarr", cells, genes, overwrite=True)
    warnings.simplefilter("ignore")
    adata = ad.read_zarr(folder / "synthetic.zarr")
    # Most stores out there hold int32.
    adata.X.indices = adata.X.indices.astype(np.int32)
    compressor = numcodecs.Blosc("lz4", 5, numcodecs.Blosc.SHUFFLE)
    root = zarr.open_group(folder / "part", mode="w", zarr_format=2)
    ad.io.write_elem(root, "/", adata, dataset_kwargs={"compressor": compressor})
    (folder / "part").rename(folder / SOURCES[0])
    adata.write_h5ad(folder / "part", compression="gzip")
    (folder / "part").rename(folder / SOURCES[1])
    shutil.rmtree(folder / "synthetic.zarr")


def run_convert(source: Path, target: Path, *, workers: int, verify: bool) -> dict[str, Any]:
    """Convert; the time is that of the whole call."""
    from scgpu_tasks.io.convert import convert_zarr

    shutil.rmtree(target, ignore_errors=True)
    cpu = time.process_time()
    result = convert_zarr(source, target, workers=workers, verify=verify)
    return {
        "seconds": result.seconds,
        "cpu_seconds": time.process_time() - cpu,
        "decoded_bytes": result.decoded_bytes,
        "stored_bytes": result.stored_bytes,
    }


def run_zstd(store: Path, *, workers: int, level: int) -> dict[str, Any]:
    """Compress the chunks of a converted store again; reading them is not timed."""
    import numpy as np
    import pyarrow as pa
    import zarr

    codec = pa.Codec("zstd", compression_level=level)
    seconds, cpu, decoded = 0.0, 0.0, 0
    X = zarr.open_group(store, mode="r")["X"]
    with ThreadPoolExecutor(workers) as pool:
        for name in ("data", "indices", "indptr"):
            array = X[name]
            step = 256 * array.chunks[0]
            for start in range(0, array.shape[0], step):
                values = np.asarray(array[start : start + step]).view(np.uint8)
                size = array.chunks[0] * array.dtype.itemsize
                chunks = [values[i : i + size] for i in range(0, len(values), size)]
                begun, cpu_begun = time.perf_counter(), time.process_time()
                list(pool.map(lambda c: len(codec.compress(c, asbytes=True)), chunks))
                seconds += time.perf_counter() - begun
                cpu += time.process_time() - cpu_begun
                decoded += len(values)
    return {"seconds": seconds, "cpu_seconds": cpu, "decoded_bytes": decoded}


def run_anndata(source: Path, target: Path) -> dict[str, Any]:
    """Read everything, write everything."""
    import anndata as ad

    warnings.simplefilter("ignore")
    shutil.rmtree(target, ignore_errors=True)
    begun, cpu = time.perf_counter(), time.process_time()
    read = ad.read_h5ad if source.suffix == ".h5ad" else ad.read_zarr
    read(source).write_zarr(target)
    return {"seconds": time.perf_counter() - begun, "cpu_seconds": time.process_time() - cpu}


def measure(what: str, source: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run one measurement in a process of its own; adds its peak memory in GB."""
    arguments = [sys.executable, __file__, "--one", what, "--source", str(source)]
    arguments += ["--folder", str(options.folder), "--workers", str(options.workers)]
    answer = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def one(options: argparse.Namespace) -> dict[str, Any]:
    """Do the measurement that this process was started for."""
    target, workers = options.folder / "target.zarr", options.workers
    source = Path(options.source)
    match options.one:
        case "convert":
            found = run_convert(source, target, workers=workers, verify=False)
        case "verified":
            found = run_convert(source, target, workers=workers, verify=True)
        case "zstd":
            found = run_zstd(target, workers=workers, level=3)
        case _:
            found = run_anndata(source, options.folder / "anndata.zarr")
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return found | {"peak_gb": usage.ru_maxrss * 1024 / 1e9}


def main() -> None:
    """Print all measurements and their ratios as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=200_000)
    parser.add_argument("--genes", type=int, default=20_000)
    parser.add_argument("--folder", type=Path, default=Path("build/benchmark-convert"))
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--source", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options)))
        return
    prepare(options.folder, options.cells, options.genes)
    report: dict[str, Any] = {"workers": options.workers}
    for name in SOURCES:
        source = options.folder / name
        found = {
            what: measure(what, source, options)
            for what in ("convert", "zstd", "verified", "anndata")
        }
        plain = found["zstd"]["decoded_bytes"] / found["zstd"]["seconds"]
        ours = found["convert"]["decoded_bytes"] / found["convert"]["seconds"]
        found["ratios"] = {
            "rate of plain zstd": ours / plain,
            # On a busy machine wall time says little.
            "processor time of plain zstd": found["zstd"]["cpu_seconds"]
            / found["convert"]["cpu_seconds"],
            "time of anndata": found["verified"]["seconds"] / found["anndata"]["seconds"],
            "memory of anndata": found["verified"]["peak_gb"] / found["anndata"]["peak_gb"],
            "verification": found["verified"]["seconds"] / found["convert"]["seconds"] - 1,
        }
        report[name] = found
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
