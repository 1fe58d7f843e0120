"""How fast is convert_zarr, against plain zstd on the same bytes and against anndata?

    python -m tests.benchmarks.convert --cells 200000 --genes 20000
    python -m tests.benchmarks.convert --nnz 1000000000 --folder /tmp/convert

makes a blosc zarr v2 store and a gzip h5ad of one synthetic atlas (kept in --folder for the
next time), then runs for each of them, in processes of their own:

- zstd: every chunk of the result compressed again by plain zstd, on as many threads;
- convert, verified: convert_zarr, without and with verification;
- anndata: read, then write_zarr with its default settings (not with --nnz: it takes minutes);
- where there is a GPU: convert and verified once more, with the GPU compressing; and gpu, the
  same chunks compressed by nvCOMP, from and to host memory.

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# As a script this file is no part of a package.
if __package__:
    from tests.benchmarks.convert_sources import SOURCES, prepare
else:
    from convert_sources import SOURCES, prepare

NNZ_PER_CELL = 950


def run_convert(
    source: Path, target: Path, *, workers: int, verify: bool, device: Any = "cpu"
) -> dict[str, Any]:
    """Convert; the time is that of the whole call."""
    from scgpu_tasks.io.convert import convert_zarr

    shutil.rmtree(target, ignore_errors=True)
    cpu = time.process_time()
    result = convert_zarr(source, target, workers=workers, verify=verify, device=device)
    return {
        "seconds": result.seconds,
        "cpu_seconds": time.process_time() - cpu,
        "decoded_bytes": result.decoded_bytes,
        "stored_bytes": result.stored_bytes,
    }


def run_zstd(store: Path, *, workers: int, level: int) -> dict[str, Any]:
    """Compress the chunks of a converted store again; reading them is not timed."""
    import pyarrow as pa
    import zarr

    codec = pa.Codec("zstd", compression_level=level)

    def compress(chunks: list[Any]) -> int:
        return sum(len(codec.compress(chunk, asbytes=True)) for chunk in chunks)

    found: dict[str, Any] = {"seconds": 0.0, "cpu_seconds": 0.0, "decoded_bytes": 0}
    X = zarr.open_group(store, mode="r")["X"]
    with ThreadPoolExecutor(workers) as pool:
        for name in ("data", "indices", "indptr"):
            seconds, stored = 0.0, 0
            for chunks in _chunks(X[name], 2048):
                # A few chunks at a time, so that handing them out takes no time.
                parts = [chunks[i : i + 8] for i in range(0, len(chunks), 8)]
                begun, cpu = time.perf_counter(), time.process_time()
                stored += sum(pool.map(compress, parts))
                seconds += time.perf_counter() - begun
                found["cpu_seconds"] += time.process_time() - cpu
            found["seconds"] += seconds
            found["decoded_bytes"] += X[name].nbytes
            found[name] = {"gb_per_s": X[name].nbytes / seconds / 1e9}
            found[name]["ratio"] = X[name].nbytes / stored
    return found


def _chunks(array: Any, count: int) -> Iterator[list[Any]]:
    """Decoded bytes of the chunks of an array, some at a time."""
    import numpy as np

    size = array.chunks[0] * array.dtype.itemsize
    for start in range(0, array.shape[0], count * array.chunks[0]):
        values = np.asarray(array[start : start + count * array.chunks[0]]).view(np.uint8)
        yield [values[i : i + size] for i in range(0, len(values), size)]


def run_anndata(source: Path, target: Path) -> dict[str, Any]:
    """Read everything, write everything."""
    import anndata as ad

    warnings.simplefilter("ignore")
    shutil.rmtree(target, ignore_errors=True)
    begun, cpu = time.perf_counter(), time.process_time()
    read = ad.read_h5ad if source.suffix == ".h5ad" else ad.read_zarr
    read(source).write_zarr(target)
    return {"seconds": time.perf_counter() - begun, "cpu_seconds": time.process_time() - cpu}


def run_gpu(store: Path, *, nbytes: int = 2**30) -> dict[str, Any]:
    """Compress the first chunks of a converted store by nvCOMP, and see that they decode.

    "kernel" is the compression alone; "all" copies the chunks from pinned host memory and the
    frames, packed, back into it.
    """
    import cupy as cp
    import numcodecs
    import numpy as np
    import zarr

    from scgpu_tasks.io import nvcomp

    lib, pack = nvcomp.load(), cp.RawKernel(_PACK, "pack")
    found: dict[str, Any] = {"nvcomp": ".".join(map(str, lib.version))}
    X = zarr.open_group(store, mode="r")["X"]
    for name in ("data", "indices"):
        size = X[name].chunks[0] * X[name].dtype.itemsize
        n = min(nbytes // size, X[name].nbytes // size)
        host = _pinned(n * size)
        host[:] = np.asarray(X[name][: n * X[name].chunks[0]]).view(np.uint8)
        room = lib.max_encoded_nbytes(size) + 7 & ~7
        back, device = _pinned(n * room), cp.empty(n * size, cp.uint8)
        frames, packed = cp.empty(n * room, cp.uint8), cp.empty(n * room, cp.uint8)
        sizes, lengths = cp.full(n, size, cp.uint64), cp.zeros(n, cp.uint64)
        statuses = cp.zeros(n, cp.int32)
        steps = cp.arange(n, dtype=cp.uint64)
        sources, targets = device.data.ptr + steps * size, frames.data.ptr + steps * room
        stream = cp.cuda.get_current_stream()
        scratch = cp.empty(lib.encode_temp_nbytes(n, size, stream.ptr), cp.uint8)
        best = {"kernel": np.inf, "all": np.inf}
        for _ in range(3):
            stream.synchronize()
            begun = time.perf_counter()
            device.set(host)
            stream.synchronize()
            copied = time.perf_counter()
            lib.encode(
                sources.data.ptr, sizes.data.ptr, size, n, scratch.data.ptr, scratch.nbytes,
                targets.data.ptr, lengths.data.ptr, statuses.data.ptr, stream.ptr,
            )  # fmt: skip
            stream.synchronize()
            best["kernel"] = min(best["kernel"], time.perf_counter() - copied)
            ends = cp.cumsum(lengths)
            pack((n,), (256,), (frames, cp.uint64(room), lengths, ends, packed))
            total = int(ends[-1])
            packed[:total].get(out=back[:total])
            best["all"] = min(best["all"], time.perf_counter() - begun)
        ends_host = [0, *ends.get().tolist()]
        for i in range(0, n, max(1, n // 50)):
            frame = back[ends_host[i] : ends_host[i + 1]].tobytes()
            assert numcodecs.Zstd().decode(frame) == host[i * size : (i + 1) * size].tobytes()
        assert not statuses.any()
        found[name] = {f"gb_per_s, {k}": n * size / v / 1e9 for k, v in best.items()}
        found[name] |= {"ratio": n * size / total, "scratch_gb": scratch.nbytes / 1e9}
    return found


_PACK = """extern "C" __global__ void pack(
    const unsigned char* from, unsigned long long room, const unsigned long long* lengths,
    const unsigned long long* ends, unsigned char* to)
{
    unsigned long long n = lengths[blockIdx.x], start = ends[blockIdx.x] - n;
    for (unsigned long long i = threadIdx.x; i < n; i += blockDim.x)
        to[start + i] = from[blockIdx.x * room + i];
}"""


def _pinned(nbytes: int) -> Any:
    import cupy as cp
    import numpy as np

    return np.frombuffer(cp.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)


def measure(what: str, source: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run one measurement in a process of its own; adds its peak memory in GB."""
    arguments = [sys.executable, __file__, "--one", what, "--source", str(source)]
    arguments += ["--folder", str(options.folder), "--workers", str(options.workers)]
    arguments += ["--cells", str(options.cells), "--genes", str(options.genes)]
    answer = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(answer.stdout)
    print(f"{source.name}, {what}: {json.dumps(found)}", file=sys.stderr, flush=True)
    return found


def one(options: argparse.Namespace) -> dict[str, Any]:
    """Do the measurement that this process was started for."""
    target, workers = options.folder / "target.zarr", options.workers
    source = Path(options.source)
    match options.one:
        case "prepare":
            begun = time.perf_counter()
            prepare(options.folder, options.cells, options.genes)
            found: dict[str, Any] = {"seconds": time.perf_counter() - begun}
        case "convert":
            found = run_convert(source, target, workers=workers, verify=False)
        case "verified":
            found = run_convert(source, target, workers=workers, verify=True)
        case "convert, GPU" | "verified, GPU":
            verify = options.one.startswith("verified")
            target = options.folder / "gpu.zarr"
            found = run_convert(source, target, workers=workers, verify=verify, device="gpu")
        case "zstd":
            found = run_zstd(target, workers=workers, level=3)
        case "gpu":
            found = run_gpu(target)
        case _:
            found = run_anndata(source, options.folder / "anndata.zarr")
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return found | {"peak_gb": usage.ru_maxrss * 1024 / 1e9}


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """What the measurements of one source say of each other."""
    rates = {
        what: found[what]["decoded_bytes"] / found[what]["seconds"]
        for what in ("convert", "zstd")
    }
    result = {
        "rate of plain zstd": rates["convert"] / rates["zstd"],
        # On a busy machine wall time says little.
        "processor time of plain zstd": found["zstd"]["cpu_seconds"]
        / found["convert"]["cpu_seconds"],
        "verification": found["verified"]["seconds"] / found["convert"]["seconds"] - 1,
    }
    if "anndata" in found:
        ours, theirs = found["verified"], found["anndata"]
        result["time of anndata"] = ours["seconds"] / theirs["seconds"]
        result["memory of anndata"] = ours["peak_gb"] / theirs["peak_gb"]
    return result


def main() -> None:
    """Print all measurements and their ratios as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=200_000)
    parser.add_argument("--genes", type=int, default=20_000)
    parser.add_argument("--nnz", type=int, help="about so many values, in place of --cells")
    parser.add_argument("--folder", type=Path, default=Path("build/benchmark-convert"))
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--source", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options)))
        return
    whats = ["convert", "zstd", "verified", "anndata"]
    if options.nnz:
        options.cells, whats = options.nnz // NNZ_PER_CELL, whats[:3]
    has_gpu = shutil.which("nvidia-smi") is not None
    if has_gpu:
        whats += ["convert, GPU", "verified, GPU"]
    report: dict[str, Any] = {
        "workers": options.workers,
        "cells": options.cells,
        "genes": options.genes,
        # A child's peak is never below what its parent held when it was started.
        "prepare": measure("prepare", options.folder, options),
    }
    for name in SOURCES:
        source = options.folder / name
        found = {what: measure(what, source, options) for what in whats}
        report[name] = found | {"ratios": ratios(found)}
    print(json.dumps(report, indent=1), flush=True)
    if has_gpu:
        found = measure("gpu", options.folder / SOURCES[0], options)
        print(json.dumps({"gpu": found}, indent=1))


if __name__ == "__main__":
    main()
