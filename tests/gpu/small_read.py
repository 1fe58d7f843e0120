"""A few small reads of every kind, for compute-sanitizer.

compute-sanitizer --tool memcheck python -m tests.gpu.small_read FOLDER [--kinds read damage]

The sanitizer runs every kernel a hundred times slower: the arrays hold a few kilobytes.
Damage is done where our kernels must find it, before the decoder: to frames' headers, to shard
indices, to anything under a crc32c. Bits of entropy-coded streams that no checksum of stored
bytes covers go through to nvCOMP, whose kernels do not end under the sanitizer once it has
stopped one of their threads: --kinds streams does that, and ends the process where it hangs.
"""

from __future__ import annotations

import argparse
import faulthandler
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import zarr

from scgpu_tasks.errors import CorruptChunkError
from scgpu_tasks.io import gpu_packages, scratch
from tests.gpu.read_helpers import PROTOTYPE, open_gpu, reads_as
from tests.io.damage import damage
from tests.io.read_cases import CHAINS, read, seeded

STARTED = time.perf_counter()
LONGEST_STEP = 25  # seconds; 0.1 are usual under the sanitizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", nargs="+", default=["read", "damage"])
    args = parser.parse_args()
    say("imported")
    gpu_packages.configure(
        replace(gpu_packages.settings(), small_request=0, io_task_bytes=2**20)
    )
    gpu_packages.require_gpu()
    say("libraries loaded")
    with scratch.pool_of(0).borrow():
        say("kernels compiled")
    if "read" in args.kinds:
        reads(args.folder)
    if "damage" in args.kinds:
        damages(args.folder)
    if "streams" in args.kinds:
        streams(args.folder)
    faulthandler.cancel_dump_traceback_later()
    say("done")


def say(what: str) -> None:
    print(f"{time.perf_counter() - STARTED:6.1f} s  {what}", flush=True)
    faulthandler.dump_traceback_later(LONGEST_STEP, exit=True)


def reads(folder: Path) -> None:
    """Whole and partial chunks, steps, index arrays, absent chunks, odd addresses."""
    values = np.random.default_rng(0).integers(0, 9, (12, 10)).astype("u2")
    values[:4, :5] = 0
    rows = np.array([1, 5, 11])
    for name, chain in CHAINS.items():
        path = folder / f"read-{name}"
        zarr.create_array(path, data=values, chunks=(4, 5), shards=(8, 10), compressors=chain)
        array = open_gpu(path)
        cases = (
            ("basic", (slice(None), slice(None)), values),
            ("basic", (slice(1, 11, 3), 2), values[1:11:3, 2]),
            ("orthogonal", (rows, slice(1, 7)), values[rows, 1:7]),
        )
        for kind, selection, want in cases:
            if not reads_as(array, kind, selection, want):
                raise SystemExit(f"wrong values: {name}, {kind}, {selection}")
        say(f"read {name}")


def damages(folder: Path) -> None:
    """Headers, block headers and sizes of frames; any byte under a crc32c; shard indices."""
    for name in CHAINS:
        found = 0
        for case in ("magic", "content size", "block header", "index", "any byte"):
            if case == "any byte" and "crc32c" not in name:
                continue
            say(f"next: {name}, {case}")
            found += finds(folder / f"{case}-{name}", name, case)
        say(f"damage {name}: {found} found")


def finds(path: Path, name: str, case: str) -> bool:
    """Write an array of two shards, damage one, and read it."""
    make(path, name)
    shard = path / "c/1"
    raw = bytearray(shard.read_bytes())
    if case == "index":
        raw[-10] ^= 1
    elif case == "any byte":
        raw[300] ^= 4
    else:
        # Magic number, frame header descriptor and two bytes of content size, block header.
        raw[{"magic": 1, "content size": 5, "block header": 8}[case]] ^= 0x80
    shard.write_bytes(raw)
    try:
        read(open_gpu(path), "basic", (slice(None),), PROTOTYPE)
    except CorruptChunkError:
        return True
    if "zstd" in name or "crc32c" in name:
        raise SystemExit(f"not found: {name}, {case}")
    return False


def make(path: Path, name: str) -> None:
    values = np.random.default_rng(1).poisson(1.5, 8 * 600).astype("f4")
    zarr.create_array(
        path, data=values, chunks=(600,), shards=(2_400,), compressors=CHAINS[name]
    )


def streams(folder: Path) -> None:
    """Bits anywhere, so that damaged streams reach the decoder."""
    for name in ("zstd", "zstd with checksum"):
        for seed in range(3):
            say(f"next: {name}, seed {seed}")
            path = folder / f"streams-{seed}-{name}"
            make(path, name)
            what = damage(seeded(seed), [path / "c/0"], 4)
            try:
                read(open_gpu(path), "basic", (slice(None),), PROTOTYPE)
            except CorruptChunkError:
                what += ", found"
            say(what)


if __name__ == "__main__":
    main()
