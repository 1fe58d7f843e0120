"""Damaged files: right data or a named error, and the process reads on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from zarr.codecs import ZstdCodec

from scgpu_tasks.errors import CorruptChunkError
from tests.gpu.damage_run import UNCHECKED
from tests.gpu.read_helpers import PROTOTYPE, gpu_missing, open_gpu, reads_as
from tests.io.read_cases import read

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(gpu_missing()), reason=gpu_missing()),
    pytest.mark.usefixtures("all_on_the_gpu"),
]


@pytest.mark.parametrize(("seconds", "way"), [(20, ()), (5, ("--small",))])
def test_random_damage_never_gives_wrong_numbers_nor_breaks_the_process(
    tmp_path: Path, seconds: int, way: tuple[str, ...]
) -> None:
    # In a process of its own: what breaks the GPU's context must not take all tests with it.
    command = [sys.executable, "-m", "tests.gpu.damage_run", str(tmp_path)]
    command += ["--seconds", str(seconds), *way]
    # A round that does not end ends the process, after 20 seconds.
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    lines = done.stdout.splitlines()
    told = "\n".join(line for line in lines if not line.startswith("round"))
    print(told)
    assert done.returncode == 0, f"{told}\n{lines[-2:]}\n{done.stderr[-3000:]}"
    found = json.loads(lines[-1])
    rounds = sum(found.values())
    named = sum(n for outcome, n in found.items() if outcome.startswith("named error"))
    assert rounds > seconds
    assert named > rounds / 3
    assert not any("hung" in outcome for outcome in found if "named error" not in outcome)
    # The host's library finds most of this damage, so small requests leave hardly any.
    assert found.get(UNCHECKED, 0) <= rounds / 20 * (not way)


def test_damage_names_array_shard_and_chunk(tmp_path: Path) -> None:
    values = np.random.default_rng(0).poisson(1.0, (40, 40)).astype("f4")
    group = zarr.open_group(tmp_path / "g", mode="w")
    group.create_array("X/dense", data=values, chunks=(5, 10), shards=(20, 20))
    shard = tmp_path / "g/X/dense/c/1/0"
    raw = bytearray(shard.read_bytes())
    index = np.frombuffer(bytes(raw[-132:-4]), "<u8").reshape(8, 2)
    offset = int(index[5, 0])  # chunk (2, 1) of shard (1, 0): (6, 1) of the array
    raw[offset] ^= 0xFF
    shard.write_bytes(raw)
    array = open_gpu(tmp_path / "g/X/dense")
    with pytest.raises(CorruptChunkError) as caught:
        read(array, "basic", (slice(None), slice(None)), PROTOTYPE)
    assert caught.value.shard == "c/1/0"
    assert caught.value.chunk == (6, 1)
    assert caught.value.store.endswith("dense")
    assert reads_as(array, "basic", (slice(0, 20), slice(None)), values[:20])


def test_a_frame_with_a_wrong_checksum_is_found(tmp_path: Path) -> None:
    values = np.random.default_rng(1).integers(0, 2**31, 5_000).astype("i4")
    path = tmp_path / "a"
    zarr.create_array(path, data=values, chunks=(1_000,), compressors=ZstdCodec(checksum=True))
    chunk = path / "c/3"
    raw = bytearray(chunk.read_bytes())
    raw[len(raw) // 2] ^= 1  # noise is stored raw: every bit decodes to something
    chunk.write_bytes(raw)
    with pytest.raises(CorruptChunkError, match="checksum") as caught:
        read(open_gpu(path), "basic", (slice(None),), PROTOTYPE)
    assert caught.value.chunk == (3,)
