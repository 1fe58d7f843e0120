"""Damage arrays at random and read them by GPU, in a process of its own.

    python -m tests.gpu.damage_run FOLDER [--rounds 1500] [--seed 0]

Every damaged read must end in the right values, in the same values as on the host, or in a
named error; after each, a sound array must still read right. Prints what happened as JSON.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from scgpu_tasks.errors import CorruptChunkError, StoreError
from tests.gpu.read_helpers import PROTOTYPE, open_gpu, to_host
from tests.io.damage import damage
from tests.io.read_cases import CHAINS, read, same_bytes, seeded

HOST_ERRORS = (ValueError, RuntimeError, OSError, MemoryError, IndexError)


def main() -> None:
    faulthandler.enable()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found: Counter[str] = Counter()
    originals = {name: make(args.folder / f"sound-{i}", name) for i, name in enumerate(CHAINS)}
    sound_path, sound_values = originals["zstd"]
    for i in range(args.rounds):
        draw = seeded(args.seed + i)
        name = list(CHAINS)[draw(0, len(CHAINS) - 1)]
        path, values = originals[name]
        copy = args.folder / "damaged"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(path, copy)
        what = damage(draw, sorted((copy / "c").iterdir()), 8)
        # Printed first: where the process dies, this is the damage that did it.
        print(f"round {i}: {name}: {what}", flush=True)
        outcome = compare(copy, values)
        found[outcome] += 1
        got = to_host(read(open_gpu(sound_path), "basic", (slice(None),), PROTOTYPE))
        if not same_bytes(got, sound_values):
            raise SystemExit(f"round {i}: a sound array reads wrong after {what}")
        if outcome.startswith("WRONG"):
            raise SystemExit(f"round {i}: {name}: {what}: {outcome}")
    print(json.dumps(found))


def make(path: Path, name: str) -> tuple[Path, np.ndarray]:
    rng = np.random.default_rng(len(name))
    values = rng.poisson(1.5, 24 * 6_000).astype("f4")
    zarr.create_array(
        path, data=values, chunks=(6_000,), shards=(48_000,), compressors=CHAINS[name]
    )
    return path, values


def compare(path: Path, values: np.ndarray) -> str:
    """Read damaged data by GPU and on the host; say how that ended."""
    try:
        got: Any = to_host(read(open_gpu(path), "basic", (slice(None),), PROTOTYPE))
    except CorruptChunkError as error:
        return "named error" if error.shard else "WRONG: an error without a place"
    except StoreError:
        return "store error"
    if same_bytes(got, values):
        return "right values"
    try:
        host = zarr.open_array(path, mode="r")[:]
    except HOST_ERRORS as error:
        return f"WRONG: values where the host says {error!r}"
    if not same_bytes(got, host):
        return "WRONG: other values than the host"
    if (path / "c").is_dir() and len(list((path / "c").iterdir())) < 3:
        return "fill value of a deleted file"
    # Nothing but a checksum could tell; the host is deceived in the same way.
    return "same undetectable values as the host"


if __name__ == "__main__":
    main()
