"""The CUDA kernels, compiled for the host and run thread by thread."""

from __future__ import annotations

import struct
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs.zstd import Zstd

from scgpu_tasks.io.decode import VERDICTS
from scgpu_tasks.io.nvcomp import frame_content_nbytes
from scgpu_tasks.io.scratch import SPARE_FRAME
from tests.io.kernel_emulator import HostKernels, address, compiler_missing

pytestmark = pytest.mark.skipif(compiler_missing(), reason="no C++ compiler")

HAS_HASH = 1
SPARE = np.frombuffer(SPARE_FRAME, np.uint8)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(tmp_path_factory.mktemp("kernels"))


def check(
    kernels: HostKernels, frames: list[bytes], content: int, crcs: list[int] | None = None
) -> tuple[list[int], list[bool]]:
    """Verdicts of the frames, and whether each was replaced by the spare one."""
    # Frames lie back to back, so that a read past the end of one is seen as another's bytes.
    memory = np.frombuffer(b"".join(frames) + b"\xff" * 4, np.uint8).copy()
    ends = np.cumsum([len(f) for f in frames])
    sizes = np.array([len(f) for f in frames], np.uint64)
    sources = (ends.astype(np.uint64) - sizes) + address(memory)
    if crcs is not None:
        sizes -= np.uint64(4)
    verdict = np.full(len(frames), 255, np.uint8)
    found = np.zeros(1, np.uint32) if crcs is None else np.array(crcs, np.uint32)
    before = sources.copy()
    kernels.run(
        "check_frames",
        (-(-len(frames) // 32),),
        (32,),
        (
            address(sources), address(sizes), address(verdict),
            np.uint64(0) if crcs is None else address(found),
            np.uint32(len(frames)), np.uint64(content), address(SPARE), np.uint64(SPARE.size),
        ),
    )  # fmt: skip
    return verdict.tolist(), (sources != before).tolist()


def samples(n: int) -> list[bytes]:
    rng = np.random.default_rng(n)
    return [
        rng.integers(0, 256, n, "u1").tobytes(),
        bytes(n),
        rng.poisson(1.0, n // 4 + 1).astype("f4").tobytes()[:n],
        np.sort(rng.integers(0, 30_000, n // 2 + 1)).astype("u2").tobytes()[:n],
        (b"the quick brown fox " * (n // 20 + 1))[:n],
        rng.choice(np.frombuffer(b"acgt", "u1"), n).tobytes(),
    ]


@pytest.mark.parametrize("n", [1, 7, 255, 256, 257, 5_000, 70_000, 131_072, 400_000])
def test_every_frame_that_zstd_writes_passes(kernels: HostKernels, n: int) -> None:
    for level in (-7, 1, 3, 9, 19):
        for checksum in (False, True):
            encoder = Zstd(level=level, checksum=checksum)
            frames = [bytes(encoder.encode(raw)) for raw in samples(n)]
            assert {frame_content_nbytes(f) for f in frames} == {n}
            verdicts, replaced = check(kernels, frames, n)
            assert verdicts == [HAS_HASH if checksum else 0] * len(frames)
            assert not any(replaced)


def test_the_spare_frame_is_sound(kernels: HostKernels) -> None:
    assert Zstd().decode(SPARE_FRAME) == b"replaced"
    assert check(kernels, [SPARE_FRAME], 8) == ([0], [False])


def test_frames_that_are_not_one_frame_of_the_size_are_replaced(kernels: HostKernels) -> None:
    raw = samples(5_000)[2]
    good = bytes(Zstd(3).encode(raw))
    bad = [
        good[:-1],
        good + b"\0",
        good + good,
        bytes(Zstd(3).encode(raw[:-1])),
        bytes(len(good)),
        good[:8],
        b"\x50\x2a\x4d\x18\x04\0\0\0skip" + good,
        b"\x28\xb5\x2f\xfd\x00\x50" + (40_001).to_bytes(3, "little") + raw,
    ]
    verdicts, replaced = check(kernels, bad, 5_000)
    assert all(v & 12 for v in verdicts)
    assert all(replaced)
    assert set(VERDICTS) >= {v & 12 for v in verdicts}


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_damaged_frames_pass_only_where_they_are_well_formed(
    kernels: HostKernels, data: st.DataObject
) -> None:
    n = data.draw(st.sampled_from([300, 5_000, 140_000]))
    raw = samples(n)[data.draw(st.integers(0, 5))]
    frame = bytearray(Zstd(data.draw(st.sampled_from([1, 3, 12]))).encode(raw))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, min(len(frame), 200) - 1))] ^= 1 << data.draw(
            st.integers(0, 7)
        )
    (verdict,), (replaced,) = check(kernels, [bytes(frame)], n)
    assert replaced == bool(verdict & ~HAS_HASH)
    if verdict & ~HAS_HASH:
        # The host has the last word on what the kernel refuses; it must not be sound data
        # of the one plain form that every zstd writer makes.
        try:
            decoded = Zstd().decode(bytes(frame))
        except (RuntimeError, ValueError, MemoryError):
            return
        assert bytes(decoded) != raw or bytes(frame[:5]) != bytes(Zstd(3).encode(raw))[:5]


def test_crcs_of_stored_bytes_are_compared_first(kernels: HostKernels) -> None:
    raw = samples(5_000)[3]
    frame = bytes(Zstd(3).encode(raw))
    crc = google_crc32c.value(frame)
    stored = frame + struct.pack("<I", crc)
    assert check(kernels, [stored, stored], 5_000, [crc, crc ^ 1]) == ([0, 2], [False, True])


@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("n", [8, 31, 32, 33, 100, 4_096, 100_003])
def test_the_hash_of_decoded_bytes_is_zstds(kernels: HostKernels, n: int, offset: int) -> None:
    raw = np.random.default_rng(n).integers(0, 256, n, "u1")
    frame = np.frombuffer(bytes(Zstd(1, checksum=True).encode(raw)), np.uint8)
    room = np.zeros(n + 16, np.uint8)
    start = -room.ctypes.data % 8 + offset
    room[start : start + n] = raw
    assert judge(kernels, frame, room[start : start + n], n) == 0
    room[start + n // 2] ^= 4
    assert judge(kernels, frame, room[start : start + n], n) == 64


def judge(
    kernels: HostKernels,
    frame: Any,
    decoded: Any,
    actual: int,
    status: int = 0,
    verdict: int = 1,
) -> int:
    out = np.array([verdict], np.uint8)
    arrays = [
        np.array([address(frame)]),
        np.array([frame.size], np.uint64),
        np.array([address(decoded)]),
        np.array([actual], np.uint64),
        np.array([status], np.uint32),
        out,
    ]
    lanes, tail = np.zeros(4, np.uint64), (np.uint32(1), np.uint64(decoded.size))
    at = [*(address(a) for a in arrays), address(lanes)]
    kernels.run("hash_lanes", (1,), (32,), (*at[2:], *tail))
    kernels.run("judge", (1,), (32,), (*at, *tail))
    return int(out[0])


def test_frames_are_sealed_and_packed_as_zstd_writes_them(kernels: HostKernels) -> None:
    content, stride = 70_000, 70_512
    raw = [np.frombuffer(part, np.uint8) for part in samples(content)]
    bare = [bytes(Zstd(3).encode(part)) for part in raw]
    whole = b"".join(bytes(Zstd(3, checksum=True).encode(part)) for part in raw)
    n = len(raw)
    frames = np.zeros((n, stride), np.uint8)
    for row, frame in zip(frames, bare, strict=True):
        row[: len(frame)] = np.frombuffer(frame, np.uint8)
    sizes = np.array([len(frame) for frame in bare], np.uint64)
    values = np.array([address(part) for part in raw])
    lanes, actual = np.zeros(4 * n, np.uint64), np.full(n, content, np.uint64)
    status, good = np.zeros(n, np.uint32), np.full(n, HAS_HASH, np.uint8)
    tail = (np.uint32(n), np.uint64(content))
    kernels.run(
        "hash_lanes", (1,), (32,),
        (*(address(a) for a in (values, actual, status, good, lanes)), *tail),
    )  # fmt: skip
    at = (address(frames), np.uint64(stride))
    kernels.run(
        "seal", (1,), (32,), (*at, *(address(a) for a in (sizes, values, lanes)), *tail)
    )
    assert sizes.tolist() == [len(frame) + 4 for frame in bare]
    ends, packed = np.cumsum(sizes), np.full(len(whole) + 8, 0xA5, np.uint8)
    kernels.run("pack", (n,), (256,), (*at, *(address(a) for a in (sizes, ends, packed))))
    assert packed.tobytes() == whole + b"\xa5" * 8


def test_what_the_decoder_reports_becomes_part_of_the_verdict(kernels: HostKernels) -> None:
    decoded = np.arange(100, dtype=np.uint8)
    frame = np.frombuffer(bytes(Zstd(1).encode(decoded)), np.uint8)
    assert judge(kernels, frame, decoded, 100, verdict=0) == 0
    assert judge(kernels, frame, decoded, 100, status=12, verdict=0) == 16
    assert judge(kernels, frame, decoded, 99, verdict=0) == 32
    # A replaced frame keeps its verdict, whatever the spare one decoded to.
    assert judge(kernels, frame, decoded, 8, verdict=4) == 4


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_elements_move_as_their_jobs_say(kernels: HostKernels, data: st.DataObject) -> None:
    itemsize = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    axes = data.draw(st.integers(1, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    shape = [data.draw(st.integers(1, 5)) for _ in range(axes)]
    shift = data.draw(st.integers(0, 3))
    source = rng.integers(0, 256, (*(2 * n for n in shape), itemsize), "u1")
    padded = np.zeros(source.size + shift, np.uint8)
    padded[shift:] = source.reshape(-1)
    target = np.zeros((*(3 * n for n in shape), itemsize), np.uint8)
    want = target.copy()
    index = [np.sort(rng.choice(2 * n, n, replace=False)) for n in shape]
    tabled = [data.draw(st.booleans()) for _ in range(axes)]
    walk, source_table, target_table = [], [], []
    take, put = [], []
    for a, n in enumerate(shape):
        if tabled[a]:
            walk += [n, 0, 0, len(source_table)]
            source_table += (index[a] * source.strides[a]).tolist()
            target_table += (np.arange(n) * 3 * target.strides[a]).tolist()
            take.append(index[a])
        else:
            walk += [n, 2 * source.strides[a], 3 * target.strides[a], -1]
            take.append(np.arange(0, 2 * n, 2))
        put.append(np.arange(0, 3 * n, 3))
    want[np.ix_(*put)] = source[np.ix_(*take)]
    total = int(np.prod(shape))
    jobs = np.array([[address(padded) + np.uint64(shift), address(target), total, *walk]], "i8")
    tables = np.array([source_table or [0], target_table or [0]], "i8")
    kernels.run(
        "scatter",
        (2, 1),
        (4,),
        (
            address(jobs), np.uint32(1), np.uint32(axes), address(tables[0]),
            address(tables[1]), np.uint32(itemsize), np.uint64(0), np.uint64(0),
        ),
    )  # fmt: skip
    assert (target == want).all()


def test_jobs_without_a_source_write_the_fill_value(kernels: HostKernels) -> None:
    target = np.zeros(6, "c16")
    jobs = np.array([[0, address(target) + np.uint64(16), 2, 2, 0, 32, -1]], "i8")
    low, high = np.frombuffer(np.complex128(1.5 - 2j).tobytes(), "<u8")
    kernels.run(
        "scatter",
        (1, 1),
        (32,),
        (
            address(jobs), np.uint32(1), np.uint32(1), np.uint64(0), np.uint64(0),
            np.uint32(16), np.uint64(low), np.uint64(high),
        ),
    )  # fmt: skip
    assert target.tolist() == [0, 1.5 - 2j, 0, 1.5 - 2j, 0, 0]
