"""zstd frames of all chunks of a file, made by nvCOMP on this process's GPU.

nvCOMP takes as long for one chunk as for hundreds, so a file is compressed in one go: threads
upload its pieces to a slab of device memory, and whoever brings the last one has the file
compressed. nvCOMP gives a chunk the same frame whatever is compressed along with it, but
without a checksum; the hash is computed and added on the device.
"""

from __future__ import annotations

import threading
from functools import cache
from queue import SimpleQueue
from typing import Any

import numpy as np

from scgpu_tasks.io import nvcomp
from scgpu_tasks.io.convert.layout import Layout
from scgpu_tasks.io.gpu_memory import memory_available
from scgpu_tasks.io.gpu_packages import load_cupy
from scgpu_tasks.io.scratch import PinnedBuffer, kernel_source

SLABS = 5
"""Files at a time: some are filled, some compressed, some written."""

NVCOMP = "nvCOMP"
LEAST_CHUNKS = 64
MOST_CHUNK_BYTES = 16 * 1024 * 1024
MOST_FILE_BYTES = 512 * 1024 * 1024

_TO_DEVICE, _TO_HOST = 1, 2
_CHECKSUM_BYTES = 4

# Of each thread, through which it uploads pieces.
_local = threading.local()


def suits(layout: Layout) -> bool:
    """Whether a GPU is to compress the files of an array: large ones, of many chunks."""
    chunk, file = layout.chunk_nbytes, layout.file_nbytes
    return LEAST_CHUNKS * chunk <= file <= MOST_FILE_BYTES and chunk <= MOST_CHUNK_BYTES


def gpu_encoder_version() -> str:
    """Name of what decides the bytes of files that a GPU compresses.

    Raises
    ------
    MissingPackageError
        There is no GPU, or CuPy or nvCOMP is missing.
    """
    load_cupy()
    version = ".".join(map(str, nvcomp.load().version))
    return f"{NVCOMP} {version} for files of {LEAST_CHUNKS} chunks or more"


def fits(nbytes: int, chunk_nbytes: int) -> bool:
    """Whether the device has room for compressing files of so many decoded bytes."""
    load_cupy()
    lib, n = nvcomp.load(), -(-nbytes // chunk_nbytes)
    slab = 2 * n * _room(lib, chunk_nbytes) + lib.encode_temp_nbytes(n, chunk_nbytes, 0)
    return SLABS * slab < memory_available() // 2


class Slabs:
    """A conversion's slabs in this process, made as they are needed; threads wait for one."""

    def __init__(self) -> None:
        self._free: SimpleQueue[Slab | None] = SimpleQueue()
        for _ in range(SLABS):
            self._free.put(None)

    def take(self) -> Slab:
        """Return a slab; it must come back by `give_back`."""
        slab = self._free.get()
        if slab is not None:
            return slab
        try:
            return Slab()
        except BaseException:
            self._free.put(None)
            raise

    def give_back(self, slab: Slab) -> None:
        """Let another thread have it."""
        self._free.put(slab)

    def free(self) -> None:
        """Give the memory of slabs that nobody has back to the system."""
        made = 0
        for _ in range(self._free.qsize()):
            made += self._free.get() is not None
            self._free.put(None)
        if made:
            cp = load_cupy()
            cp.get_default_memory_pool().free_all_blocks()
            cp.get_default_pinned_memory_pool().free_all_blocks()


class Slab:
    """Memory and a stream for compressing one file at a time."""

    def __init__(self) -> None:
        cp = load_cupy()
        self._cp, self._lib, self._kernels = cp, nvcomp.load(), _kernels()
        self._device = cp.cuda.Device()
        self._stream = cp.cuda.Stream(non_blocking=True)
        self._host = PinnedBuffer()
        self._values = self._frames = self._temp = cp.empty(0, cp.uint8)
        self._chunk_nbytes = 0

    def begin(self, n: int, chunk_nbytes: int) -> None:
        """Make room for a file of at most ``n`` chunks."""
        room = _room(self._lib, chunk_nbytes)
        self._chunk_nbytes, self._stride = chunk_nbytes, room
        temp = self._lib.encode_temp_nbytes(n, chunk_nbytes, self._stream.ptr)
        with self._device, self._stream:
            # Of the frames, packed, too; the last few may be larger than their chunks.
            self._values = self._grown(self._values, n * room)
            self._frames = self._grown(self._frames, n * room)
            self._temp = self._grown(self._temp, temp)

    def _grown(self, memory: Any, nbytes: int) -> Any:
        return memory if memory.nbytes >= nbytes else self._cp.empty(nbytes, self._cp.uint8)

    def put(self, first: int, values: np.ndarray) -> None:
        """Take the bytes of whole chunks from this one on; threads may do so at once."""
        n, target = values.nbytes, int(self._values.data.ptr) + first * self._chunk_nbytes
        if "staging" not in _local.__dict__:
            _local.staging = PinnedBuffer()
        host = _local.staging.reserve(n)[:n]
        host[:] = values
        with self._device:
            self._cp.cuda.runtime.memcpyAsync(
                target, host.ctypes.data, n, _TO_DEVICE, self._stream.ptr
            )
            self._stream.synchronize()

    def compress(self, n: int) -> tuple[memoryview, list[int]]:
        """Compress the first ``n`` chunks.

        Returns
        -------
        The frames one after another, in memory of the slab, and the size of each.
        """
        cp, nbytes, stride = self._cp, self._chunk_nbytes, self._stride
        with self._device, self._stream as stream:
            rows = cp.arange(n, dtype=cp.uint64)
            values = rows * np.uint64(nbytes) + np.uint64(self._values.data.ptr)
            frames = rows * np.uint64(stride) + np.uint64(self._frames.data.ptr)
            lengths, sizes = cp.full(n, nbytes, dtype=cp.uint64), cp.zeros(n, dtype=cp.uint64)
            statuses, lanes = cp.zeros(n, dtype=cp.int32), cp.zeros(4 * n, dtype=cp.uint64)
            to_hash = cp.ones(n, dtype=cp.uint8)
            self._lib.encode(
                values.data.ptr, lengths.data.ptr, nbytes, n, self._temp.data.ptr,
                self._temp.nbytes, frames.data.ptr, sizes.data.ptr, statuses.data.ptr,
                stream.ptr,
            )  # fmt: skip
            count, content = np.uint32(n), np.uint64(nbytes)
            self._run("hash_lanes", -(-n // 8), 32, values, lengths, statuses, to_hash, lanes,
                      count, content)  # fmt: skip
            at = np.uint64(self._frames.data.ptr), np.uint64(stride)
            self._run("seal", -(-n // 32), 32, *at, sizes, values, lanes, count, content)
            ends = cp.cumsum(sizes)
            # The values are not needed any more.
            self._run("pack", n, 256, *at, sizes, ends, np.uint64(self._values.data.ptr))
            found, failed = sizes.get(), statuses.get().any()
            if failed:
                msg = f"nvCOMP could not compress {n} chunks of {nbytes} bytes"
                raise nvcomp.NvcompError(msg)
            total = int(found.sum())
            host = self._host.reserve(total)
            cp.cuda.runtime.memcpyAsync(
                host.ctypes.data, self._values.data.ptr, total, _TO_HOST, stream.ptr
            )
            stream.synchronize()
        return memoryview(host)[:total], found.tolist()

    def _run(self, name: str, blocks: int, threads: int, *arguments: Any) -> None:
        plain = (np.uint64(a.data.ptr) if hasattr(a, "data") and hasattr(a.data, "ptr") else a
                 for a in arguments)  # fmt: skip
        self._kernels.get_function(name)((blocks,), (threads,), tuple(plain))


def _room(lib: nvcomp.Nvcomp, chunk_nbytes: int) -> int:
    """Bytes from one frame to the next: the most one may take, and its checksum."""
    return -(-(lib.max_encoded_nbytes(chunk_nbytes) + _CHECKSUM_BYTES) // 16) * 16


@cache
def _kernels() -> Any:
    return load_cupy().RawModule(code=kernel_source(), options=("-std=c++17",))
