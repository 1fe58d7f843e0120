"""Damage arrays at random and read them by GPU, in a process of its own.

    python -m tests.gpu.damage_run FOLDER [--rounds 1500] [--seconds 40] [--seed 0] [--small]

Every damaged read must end in the right values, in the same values as on the host, or in a
named error; after each, a sound array must still read right. Where nvCOMP hangs, the error must
name the chunk all the same; the rounds then go on in a fresh process. Chunks without any
checksum may also decode to values of their own, where only their own stored bytes were changed.
All rounds are run that fit the time; prints what happened by codecs, and as JSON at the end.
Exit code 1 after a wrong round, and after one that does not end.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shutil
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from scgpu_tasks.errors import CorruptChunkError, StoreError
from scgpu_tasks.io import gpu_packages, scratch
from tests.gpu.read_helpers import PROTOTYPE, open_gpu, to_host
from tests.io.damage import damage
from tests.io.read_cases import CHAINS, read, same_bytes, seeded

CHUNK, PER_SHARD = 6_000, 8
LONGEST_ROUND = 20  # seconds
UNCHECKED = "undetected in the stored bytes of a chunk without checksum"
HOST_ERRORS = (ValueError, RuntimeError, OSError, MemoryError, IndexError)


def main() -> None:
    faulthandler.enable()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--seconds", type=float, default=40, help="begin no round later")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="round to go on from")
    parser.add_argument("--small", action="store_true", help="as small requests, on the host")
    args = parser.parse_args()
    most = 10_000 if args.small else 0
    gpu_packages.configure(
        replace(gpu_packages.settings(), small_request=most, decode_seconds=2.0)
    )
    found: dict[str, Counter[str]] = {name: Counter() for name in CHAINS}
    earlier = args.folder / "found.json"
    if args.first:
        for name, outcomes in json.loads(earlier.read_text()).items():
            found[name].update(outcomes)
    originals = {name: make(args.folder / f"sound-{i}", name) for i, name in enumerate(CHAINS)}
    sound_path, sound_values = originals["zstd"]
    started = time.perf_counter()
    for i in range(args.first, args.rounds):
        if time.perf_counter() - started > args.seconds:
            break
        # A decoder that never ends on a damaged stream would leave nothing to read but this.
        faulthandler.dump_traceback_later(LONGEST_ROUND, exit=True)
        draw = seeded(args.seed + i)
        name = list(CHAINS)[draw(0, len(CHAINS) - 1)]
        path, values = originals[name]
        copy = args.folder / "damaged"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(path, copy)
        what = damage(draw, sorted((copy / "c").iterdir()), 8)
        # Printed first: where the process dies, this is the damage that did it.
        print(f"round {i}: {name}: {what}", flush=True)
        outcome = compare(copy, path, values, checked="checksum" in name or "crc32c" in name)
        if scratch.given_up():
            found[name][f"{outcome}: the decoder hung"] += 1
            print(f"  {outcome}: the decoder hung", flush=True)
            earlier.write_text(json.dumps(found))
            left = args.seconds - (time.perf_counter() - started)
            go_on(args, i + 1, left)
        got = to_host(read(open_gpu(sound_path), "basic", (slice(None),), PROTOTYPE))
        if not same_bytes(got, sound_values):
            outcome = f"WRONG: afterwards a sound array reads wrong; {outcome}"
        if outcome.startswith("WRONG"):
            print(f"  {outcome}", flush=True)
        found[name][outcome] += 1
    faulthandler.cancel_dump_traceback_later()
    for name, outcomes in found.items():
        for outcome, n in outcomes.most_common():
            print(f"{name:20} {n:6} {outcome}")
    total: Counter[str] = sum(found.values(), Counter())
    print(json.dumps(total))
    if any(outcome.startswith("WRONG") for outcome in total):
        raise SystemExit(1)


def go_on(args: argparse.Namespace, first: int, seconds: float) -> None:
    """Run the rounds that are left in place of this process, whose GPU hangs."""
    options = ["--rounds", args.rounds, "--seconds", seconds, "--seed", args.seed]
    options += ["--first", first, *(["--small"] if args.small else [])]
    command = [sys.executable, "-m", "tests.gpu.damage_run", args.folder, *options]
    os.execv(sys.executable, [str(part) for part in command])


def make(path: Path, name: str) -> tuple[Path, np.ndarray]:
    rng = np.random.default_rng(len(name))
    values = rng.poisson(1.5, 3 * PER_SHARD * CHUNK).astype("f4")
    shards = (PER_SHARD * CHUNK,)
    zarr.create_array(
        path,
        data=values,
        chunks=(CHUNK,),
        shards=shards,
        compressors=CHAINS[name],
        overwrite=True,
    )
    return path, values


def compare(path: Path, original: Path, values: np.ndarray, *, checked: bool) -> str:
    """Read damaged data by GPU and on the host; say how that ended."""
    try:
        got: Any = to_host(read(open_gpu(path), "basic", (slice(None),), PROTOTYPE))
    except CorruptChunkError as error:
        return "named error" if error.shard else "WRONG: an error without a place"
    except StoreError:
        return "store error"
    if same_bytes(got, values):
        return "right values"
    elsewhere = changed_values(got, values) - changed_chunks(path, original)
    if elsewhere:
        return f"WRONG: other values in sound chunks {sorted(elsewhere)}"
    try:
        host = zarr.open_array(path, mode="r")[:]
    except HOST_ERRORS:
        return "WRONG: values where the host finds damage" if checked else UNCHECKED
    if same_bytes(got, host):
        # Files that are gone, or whole chunks in another's place, or raw bytes.
        return "the host's values"
    return "WRONG: other values than the host" if checked else UNCHECKED


def changed_values(got: np.ndarray, values: np.ndarray) -> set[int]:
    """Chunks in which a value differs."""
    differs = got.view("u4") != values.view("u4")
    return set((np.flatnonzero(differs) // CHUNK).tolist())


def changed_chunks(path: Path, original: Path) -> set[int]:
    """Chunks whose stored bytes, place or size differ from the original's."""
    changed = set()
    for file in sorted((original / "c").iterdir()):
        other = path / "c" / file.name
        before = stored_chunks(file.read_bytes())
        after = stored_chunks(other.read_bytes()) if other.exists() else [b""] * PER_SHARD
        first = int(file.name) * PER_SHARD
        pairs = zip(before, after, strict=True)
        changed |= {first + i for i, (a, b) in enumerate(pairs) if a != b}
    return changed


def stored_chunks(raw: bytes) -> list[bytes]:
    tail = 16 * PER_SHARD + 4
    if len(raw) < tail:
        return [b""] * PER_SHARD
    index = np.frombuffer(raw[-tail:-4], "<u8").reshape(PER_SHARD, 2).tolist()
    return [raw[offset : offset + size] for offset, size in index]


if __name__ == "__main__":
    main()
