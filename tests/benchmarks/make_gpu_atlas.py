"""Write a synthetic atlas of up to hundreds of millions of values a second, on GPUs.

    python -m tests.benchmarks.make_gpu_atlas OUT [--n-obs 11400000] [--n-vars 24552]

The store is an ordinary AnnData zarr v3 store in the layout that GPUs read best: CSR, chunks of
65,536 values (256 KiB of float32 data, 128 KiB of uint16 indices) as zstd frames in shards.
Beside X, ``OUT/truth.json`` says what all its values and indices add up to.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import queue
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pandas as pd
import zarr
from zarr.codecs import ZstdCodec

from scgpu_tasks.io.csr_writer import consolidate, create_store

CHUNK = 65_536
TYPES = 8
ABSENT = np.uint64(2**64 - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--n-obs", type=int, default=11_400_000)
    parser.add_argument("--n-vars", type=int, default=24_552)
    parser.add_argument("--genes-per-cell", type=float, default=1_600)
    parser.add_argument("--chunks-per-shard", type=int, default=512)
    parser.add_argument("--processes", type=int, default=3, help="for each GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checksum", action="store_true", help="end every frame with XXH64")
    args = parser.parse_args()
    if args.n_vars > 65_536:
        parser.error("at most 65,536 genes: indices are uint16")
    started = time.perf_counter()
    truth = write_atlas(args)
    truth["seconds"] = round(time.perf_counter() - started, 2)
    truth["stored_bytes"] = sum(f.stat().st_size for f in args.out.rglob("*") if f.is_file())
    (args.out / "truth.json").write_text(json.dumps(truth))
    print(json.dumps(truth), flush=True)


def write_atlas(args: argparse.Namespace) -> dict[str, Any]:
    shutil.rmtree(args.out, ignore_errors=True)
    context = mp.get_context("spawn")
    tables = context.Process(target=write_tables, args=(args.out, args))
    tables.start()
    rates, depths = make_rates(args)
    indptr = count_values(args, rates, depths)
    print(f"counted {indptr[-1]:,} values", flush=True)
    scratch = args.out.with_name(args.out.name + ".making")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    np.save(scratch / "indptr.npy", indptr)
    np.savez(scratch / "rates.npz", rates=rates, depths=depths)
    tables.join()
    if tables.exitcode:
        raise SystemExit("obs and var could not be written")
    make_arrays(args, indptr)
    n_shards = -(-int(indptr[-1]) // (CHUNK * args.chunks_per_shard))
    n_workers = min(args.processes * count_gpus(), n_shards)
    sums = context.Queue()
    workers = [
        context.Process(target=write_shards, args=(args, scratch, w, n_workers, n_shards, sums))
        for w in range(n_workers)
    ]
    for worker in workers:
        worker.start()
    found = [sums.get(timeout=400) for _ in workers]
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers) or any("error" in f for f in found):
        raise SystemExit(f"a process failed: {found}")
    shutil.rmtree(scratch)
    consolidate(args.out)
    return {
        "n_obs": args.n_obs,
        "n_vars": args.n_vars,
        "nnz": int(indptr[-1]),
        "data_sum": sum(f["data"] for f in found),
        "indices_sum": sum(f["indices"] for f in found),
    }


def count_gpus() -> int:
    import cupy as cp

    return int(cp.cuda.runtime.getDeviceCount())


def hash32(x: np.ndarray) -> np.ndarray:
    """``hash32`` of atlas.cu."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def cell_types(n_obs: int, seed: int) -> np.ndarray:
    """Type of every cell, as ``cell_of`` of atlas.cu."""
    key = hash32(np.arange(n_obs, dtype=np.uint32) ^ np.uint32(seed))
    share = hash32(key + np.uint32(1)) >> np.uint32(16)
    limits, limit = [], 19660
    for _ in range(TYPES - 1):
        limits.append(limit)
        limit = limit * 7 // 10
    return np.searchsorted(np.cumsum(limits), share, side="right").astype(np.int8)


def gene_names(n_vars: int) -> list[str]:
    names = [f"GENE{i:05d}" for i in range(n_vars)]
    for i in range(min(13, n_vars)):
        names[i * max(1, n_vars // 13)] = f"MT-{i + 1}"
    return names


def write_tables(out: Path, args: argparse.Namespace) -> None:
    types = cell_types(args.n_obs, args.seed)
    names = np.char.add("cell_", np.char.zfill(np.arange(args.n_obs).astype("U8"), 8))
    kinds = [f"type {i}" for i in range(TYPES)]
    obs = pd.DataFrame(
        {"cell_type": pd.Categorical.from_codes(types, kinds)}, index=pd.Index(names)
    )
    symbols = gene_names(args.n_vars)
    var = pd.DataFrame({"gene_symbol": symbols}, index=pd.Index(symbols))
    create_store(out, obs=obs, var=var)


def make_rates(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Mean counts of every gene, for each type and its bad cells; and depths to draw from."""
    rng = np.random.default_rng(args.seed)
    n = args.n_vars
    base = 1.0 / (rng.permutation(n) + 20.0) ** 0.9
    base[rng.choice(n, n // 100, replace=False)] = 0
    types = np.ones((TYPES, n))
    for row in types:
        own = rng.choice(n, n // 8, replace=False)
        row[own] = np.exp(rng.normal(0, 1.2, len(own)))
    mt = [i for i, name in enumerate(gene_names(n)) if name.startswith("MT-")]
    base[mt] = np.quantile(base, 0.998)
    low, high = 0.0, 1e6
    for _ in range(60):
        scale = (low + high) / 2
        genes = (1 - np.exp(-np.minimum(scale * base * types, 60))).sum(axis=1).mean()
        low, high = (scale, high) if genes < args.genes_per_cell else (low, scale)
    good = np.minimum(scale * base * types, 60)
    bad = good.copy()
    bad[:, mt] = np.minimum(bad[:, mt] * 20, 60)
    depths = np.exp(rng.normal(-0.06, 0.35, 4096))
    return np.concatenate([good, bad]).astype(np.float32), depths.astype(np.float32)


def kernels() -> Any:
    import cupy as cp

    source = Path(__file__).with_name("atlas.cu").read_text()
    return cp.RawModule(code=source, options=("-std=c++17",))


def sealing_kernels() -> Any:
    import cupy as cp

    from scgpu_tasks.io.scratch import kernel_source

    return cp.RawModule(code=kernel_source(), options=("-std=c++17",))


def count_values(args: argparse.Namespace, rates: np.ndarray, depths: np.ndarray) -> np.ndarray:
    """Return indptr of the whole matrix."""
    import cupy as cp

    count = kernels().get_function("count_genes")
    device_rates, device_depths = cp.asarray(rates), cp.asarray(depths)
    counts = cp.empty(args.n_obs, dtype=cp.int32)
    count(
        (-(-args.n_obs // 8),),
        (256,),
        (
            np.uint64(device_rates.data.ptr),
            np.uint64(device_depths.data.ptr),
            np.uint32(args.n_vars),
            np.uint32(args.seed),
            np.int64(0),
            np.int64(args.n_obs),
            np.uint64(counts.data.ptr),
        ),
    )
    indptr = np.zeros(args.n_obs + 1, dtype=np.int64)
    np.cumsum(cp.asnumpy(counts), out=indptr[1:])
    return indptr


def make_arrays(args: argparse.Namespace, indptr: np.ndarray) -> None:
    """Write the metadata of X, and its indptr."""
    root = zarr.open_group(args.out, mode="r+", use_consolidated=False)
    group = root.require_group("X")
    group.attrs.update(
        {
            "encoding-type": "csr_matrix",
            "encoding-version": "0.1.0",
            "shape": [args.n_obs, args.n_vars],
        }
    )
    nnz = int(indptr[-1])
    for name, dtype in (("data", "float32"), ("indices", "uint16")):
        group.create_array(
            name,
            shape=(nnz,),
            dtype=dtype,
            chunks=(CHUNK,),
            shards=(CHUNK * args.chunks_per_shard,),
            compressors=ZstdCodec(level=3, checksum=args.checksum),
            fill_value=0,
        )
    shard = -(-len(indptr) // 32_768) * 32_768
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        array = group.create_array(
            "indptr",
            shape=indptr.shape,
            dtype="int64",
            chunks=(32_768,),
            shards=(min(shard, 32_768 * 128),),
            compressors=ZstdCodec(level=3),
            fill_value=0,
            config={"write_empty_chunks": True},
        )
        array[:] = indptr


def write_shards(
    args: argparse.Namespace, scratch: Path, worker: int, step: int, n_shards: int, sums: Any
) -> None:
    """Write every ``step``-th shard of data and indices, from number ``worker`` on."""
    try:
        import cupy as cp

        with cp.cuda.Device(worker % count_gpus()):
            maker = ShardMaker(args, scratch)
            total = {"data": 0, "indices": 0}
            for shard in range(worker, n_shards, step):
                for name, value in maker.write(shard).items():
                    total[name] += value
            maker.close()
        sums.put(total)
    except BaseException as error:
        sums.put({"error": repr(error)})
        raise


class ShardMaker:
    """Generates, compresses and writes shards on the current device."""

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        import cupy as cp

        from scgpu_tasks.io import nvcomp

        self.args, self.cp, self.nvcomp = args, cp, nvcomp.load()
        self.indptr = np.load(scratch / "indptr.npy", mmap_mode="r")
        tables = np.load(scratch / "rates.npz")
        self.rates, self.depths = cp.asarray(tables["rates"]), cp.asarray(tables["depths"])
        module = kernels()
        self.fill, self.pack = module.get_function("fill_values"), module.get_function("pack")
        if args.checksum:
            sealing = sealing_kernels()
            self.hash, self.seal = (
                sealing.get_function("hash_lanes"),
                sealing.get_function("seal"),
            )
        n = args.chunks_per_shard
        self.values = {
            "data": cp.empty(n * CHUNK, dtype=cp.float32),
            "indices": cp.empty(n * CHUNK, dtype=cp.uint16),
        }
        room = self.nvcomp.max_encoded_nbytes(4 * CHUNK)
        self.stride = -(-(room + 4) // 16) * 16
        self.encoded = cp.empty(n * self.stride, dtype=cp.uint8)
        self.packed = cp.empty(n * self.stride, dtype=cp.uint8)
        stream = cp.cuda.get_current_stream().ptr
        self.temp = cp.empty(self.nvcomp.encode_temp_nbytes(n, 4 * CHUNK, stream), cp.uint8)
        # While one file is written, the next shard is made.
        self.writer = ThreadPoolExecutor(2)
        self.free: queue.Queue[np.ndarray] = queue.Queue()
        for _ in range(3):
            memory = cp.cuda.alloc_pinned_memory(self.packed.nbytes)
            self.free.put(np.frombuffer(memory, np.uint8, self.packed.nbytes))
        self.written: list[Any] = []

    def write(self, shard: int) -> dict[str, int]:
        cp, size = self.cp, self.args.chunks_per_shard * CHUNK
        first = shard * size
        stop = min(first + size, int(self.indptr[-1]))
        row0 = int(np.searchsorted(self.indptr, first, side="right")) - 1
        row1 = int(np.searchsorted(self.indptr, stop, side="left"))
        starts = cp.asarray(np.asarray(self.indptr[row0:row1]))
        for values in self.values.values():
            values.fill(0)
        self.fill(
            (-(-(row1 - row0) // 8),),
            (256,),
            (
                np.uint64(self.rates.data.ptr),
                np.uint64(self.depths.data.ptr),
                np.uint32(self.args.n_vars),
                np.uint32(self.args.seed),
                np.int64(row0),
                np.int64(row1 - row0),
                np.uint64(starts.data.ptr),
                np.int64(first),
                np.int64(stop - first),
                np.uint64(self.values["data"].data.ptr),
                np.uint64(self.values["indices"].data.ptr),
            ),
        )
        sums = {}
        for name, values in self.values.items():
            # Whole numbers far below 2**53: the sum in float64 is exact.
            wide = cp.float64 if name == "data" else cp.int64
            sums[name] = int(values[: stop - first].sum(dtype=wide))
            self._compress(values, -(-(stop - first) // CHUNK))
            self._store(name, shard, -(-(stop - first) // CHUNK))
        return sums

    def _compress(self, values: Any, n: int) -> None:
        cp, nbytes = self.cp, values.itemsize * CHUNK
        stream = cp.cuda.get_current_stream().ptr
        rows = cp.arange(n, dtype=cp.uint64)
        sources = rows * np.uint64(nbytes) + np.uint64(values.data.ptr)
        targets = rows * np.uint64(self.stride) + np.uint64(self.encoded.data.ptr)
        sizes = cp.full(n, nbytes, dtype=cp.uint64)
        encoded, statuses = cp.zeros(n, dtype=cp.uint64), cp.zeros(n, dtype=cp.int32)
        need = self.nvcomp.encode_temp_nbytes(n, nbytes, stream)
        if need > self.temp.nbytes:
            self.temp = cp.empty(need, cp.uint8)
        self.nvcomp.encode(
            sources.data.ptr, sizes.data.ptr, nbytes, n, self.temp.data.ptr, self.temp.nbytes,
            targets.data.ptr, encoded.data.ptr, statuses.data.ptr, stream,
        )  # fmt: skip
        if int(cp.abs(statuses).max()) != 0:
            raise RuntimeError(f"nvCOMP could not compress: {cp.unique(statuses)}")
        if self.args.checksum:
            self._seal(sources, encoded, n, nbytes)
        self.sizes = cp.asnumpy(encoded)
        padded = (self.sizes + np.uint64(15)) // np.uint64(16) * np.uint64(16)
        self.offsets = np.cumsum(padded, dtype=np.uint64) - padded
        self.total = int(padded.sum())
        offsets = cp.asarray(self.offsets)
        self.pack(
            (16, n),
            (256,),
            tuple(
                np.uint64(x)
                for x in (
                    self.encoded.data.ptr,
                    self.stride,
                    encoded.data.ptr,
                    offsets.data.ptr,
                    self.packed.data.ptr,
                )
            ),
        )
        cp.cuda.get_current_stream().synchronize()

    def _seal(self, sources: Any, encoded: Any, n: int, nbytes: int) -> None:
        cp = self.cp
        lanes, good = cp.zeros(4 * n, dtype=cp.uint64), cp.ones(n, dtype=cp.uint8)
        actual, status = cp.full(n, nbytes, dtype=cp.uint64), cp.zeros(n, dtype=cp.int32)
        tail = (np.uint32(n), np.uint64(nbytes))
        found = (np.uint64(a.data.ptr) for a in (sources, actual, status, good, lanes))
        self.hash((-(-n // 8),), (32,), (*found, *tail))
        frames = (np.uint64(self.encoded.data.ptr), np.uint64(self.stride))
        found = (np.uint64(a.data.ptr) for a in (encoded, sources, lanes))
        self.seal((-(-n // 32),), (32,), (*frames, *found, *tail))

    def _store(self, name: str, shard: int, n: int) -> None:
        index = np.full((self.args.chunks_per_shard, 2), ABSENT, dtype="<u8")
        index[:n, 0], index[:n, 1] = self.offsets, self.sizes
        raw = index.tobytes()
        tail = raw + int(google_crc32c.value(raw)).to_bytes(4, "little")
        pinned = self.free.get()
        self.packed[: self.total].get(out=pinned[: self.total])
        path = self.args.out / "X" / name / "c" / str(shard)
        self.written.append(
            self.writer.submit(self._write_file, path, pinned, self.total, tail)
        )

    def _write_file(self, path: Path, pinned: np.ndarray, total: int, tail: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb", buffering=0) as file:  # noqa: PTH123
                view = memoryview(pinned)[:total]
                while view:
                    view = view[os.write(file.fileno(), view) :]
                file.write(tail)
        finally:
            self.free.put(pinned)

    def close(self) -> None:
        for future in self.written:
            future.result()
        self.writer.shutdown()


if __name__ == "__main__":
    main()
