"""Streams and scratch memory of GPU reads: pooled, bounded, reused, and freed on request.

A read borrows one :class:`Reader` from the pool of its device. There are a fixed number of
readers a device, and what each may allocate is limited, so that scratch stays bounded however
many threads read; :class:`~scgpu_tasks.io.settings.ReadSettings` states the bound.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scgpu_tasks.errors import ClusterError
from scgpu_tasks.io import nvcomp
from scgpu_tasks.io.gpu_packages import load_cupy, require_gpu, settings

SLOTS = 2
"""Batches of one read that are in flight: one is read while one is decoded."""

# A slot holds the stored bytes, nvCOMP's scratch, measured as 3.1 times the output, and the
# chunks that are not wanted whole.
_SCRATCH_PER_BYTE = 1 + 3.1 + 1

_MIB = 2**20

GIVEN_UP = "a decoder hangs on this process's GPU: restart the process (the Dask worker)"
"""Why no read runs any more, after `give_up`."""

# A sound frame that holds these eight bytes raw; it stands in for frames that are not.
SPARE_FRAME = b"\x28\xb5\x2f\xfd\x20\x08\x41\x00\x00" + b"replaced"


class DeviceBuffer:
    """Device memory that grows when more is asked for, and is kept until it is freed."""

    def __init__(self) -> None:
        self._memory: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self._memory is None else int(self._memory.nbytes)

    def reserve(self, nbytes: int, stream: Any) -> Any:
        """Return at least this many bytes as a CuPy array; earlier contents are lost."""
        if self.nbytes < nbytes:
            cp = load_cupy()
            self._memory = None
            rounded = -(-nbytes // (2 * _MIB)) * 2 * _MIB
            with stream:
                try:
                    self._memory = cp.empty(rounded, dtype=cp.uint8)
                except MemoryError:  # of CuPy, or of RMM in its place
                    release_memory()
                    self._memory = cp.empty(rounded, dtype=cp.uint8)
            # The allocator orders reuse by stream, but KvikIO writes outside of streams.
            stream.synchronize()
        return self._memory

    def free(self) -> None:
        """Give the memory back to the allocator."""
        self._memory = None


class PinnedBuffer:
    """Page-locked host memory that grows; copies from and to it need no staging."""

    def __init__(self) -> None:
        self._memory: Any = None
        self._view = np.empty(0, dtype=np.uint8)

    def reserve(self, nbytes: int) -> NDArray[np.uint8]:
        """Return at least this many bytes; earlier contents are lost."""
        if len(self._view) < nbytes:
            rounded = max(2 * len(self._view), -(-nbytes // 65536) * 65536)
            self._memory = load_cupy().cuda.alloc_pinned_memory(rounded)
            self._view = np.frombuffer(self._memory, dtype=np.uint8, count=rounded)
        return self._view


class _Waiter:
    """Waits for events on a thread of its own, so that waiting can be given up."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Any, Future[None]]] = SimpleQueue()
        # A daemon: where an event never comes, it must not keep the process from ending.
        threading.Thread(target=self._run, name="scgpu-wait", daemon=True).start()

    def _run(self) -> None:
        while True:
            event, told = self._queue.get()
            try:
                event.synchronize()
            except load_cupy().cuda.runtime.CUDARuntimeError as error:
                told.set_exception(error)
            else:
                told.set_result(None)

    def wait(self, event: Any, seconds: float) -> bool:
        """Return whether the event came in time; raises what CUDA raises."""
        told: Future[None] = Future()
        self._queue.put((event, told))
        try:
            told.result(timeout=seconds)
        except TimeoutError:
            return False
        return True


class Slot:
    """Stream and buffers of one batch in flight."""

    def __init__(self) -> None:
        cp = load_cupy()
        # Streams of their own: a decoder call takes as long for few chunks as for many, so
        # that two calls at the same time cost little more than one.
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.stored = DeviceBuffer()
        self.arrays = DeviceBuffer()
        self.temp = DeviceBuffer()
        self.decoded = DeviceBuffer()
        self.upload = PinnedBuffer()
        self.verdict = PinnedBuffer()
        self.done = cp.cuda.Event(block=True, disable_timing=True)
        self._waiter = _Waiter()

    def wait(self, seconds: float) -> bool:
        """Wait for the batch, at most so long; return whether it is done."""
        return self._waiter.wait(self.done, seconds)

    @property
    def buffers(self) -> tuple[DeviceBuffer, ...]:
        """What it holds on the device."""
        return self.stored, self.arrays, self.temp, self.decoded


@dataclass
class Kernels:
    """The functions of ``chunks.cu`` for one device."""

    check_frames: Any
    check_crcs: Any
    hash_lanes: Any
    judge: Any
    scatter: Any


def kernel_source() -> str:
    """Return the CUDA source of the kernels around the decoder."""
    return files("scgpu_tasks.io").joinpath("chunks.cu").read_text()


class Reader:
    """What one read uses on its device: two slots, kernels, the decoder.

    Parameters
    ----------
    device
        Number of the current device.
    """

    def __init__(self, device: int) -> None:
        cp = load_cupy()
        self.device = device
        self.slots = tuple(Slot() for _ in range(SLOTS))
        self.kernels = _kernels(device)
        self.nvcomp = nvcomp.load()
        self.spare = cp.array(np.frombuffer(SPARE_FRAME, dtype=np.uint8))
        cp.cuda.get_current_stream().synchronize()

    def synchronize(self) -> None:
        """Wait until its streams are idle."""
        for slot in self.slots:
            slot.stream.synchronize()

    def free(self) -> None:
        """Give all memory back; the streams must be idle."""
        for slot in self.slots:
            for buffer in slot.buffers:
                buffer.free()

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        return sum(buffer.nbytes for slot in self.slots for buffer in slot.buffers)


@cache
def _kernels(device: int) -> Kernels:  # noqa: ARG001  a module is loaded once a device
    module = load_cupy().RawModule(code=kernel_source(), options=("-std=c++17",))
    names = ("check_frames", "check_crcs", "hash_lanes", "judge", "scatter")
    return Kernels(*(module.get_function(name) for name in names))


class _Pool:
    """The readers of one device."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._free: list[Reader] = []
        self._lock = threading.Lock()
        self._readers = settings().readers
        self._lent: list[Reader] = []
        self._turn = threading.BoundedSemaphore(self._readers)
        self.given_up = False
        self._total = load_cupy().cuda.runtime.memGetInfo()[1]

    @property
    def batch_bytes(self) -> int:
        """Most decoded bytes of a batch, so that all scratch stays within its share."""
        share = settings().scratch_share * self._total
        most = share / (self._readers * SLOTS * _SCRATCH_PER_BYTE)
        return int(min(settings().batch_bytes, most))

    @contextmanager
    def borrow(self) -> Iterator[Reader]:
        """Wait for a turn, and lend a reader, whose streams a sound block leaves idle."""
        with self._turn:
            if self.given_up:
                raise ClusterError(GIVEN_UP)
            with self._lock:
                reader = self._free.pop() if self._free else None
            if reader is None:
                reader = Reader(self.device)
            with self._lock:
                self._lent.append(reader)
            sound = False
            try:
                yield reader
                sound = True
            finally:
                with self._lock:
                    self._lent.remove(reader)
                self._take_back(reader, sound=sound)

    @property
    def in_use(self) -> int:
        """Number of reads that are running."""
        return len(self._lent)

    @property
    def is_idle(self) -> bool:
        """Whether a reader is there, and none is lent."""
        return not self._lent and bool(self._free) and not self.given_up

    @property
    def is_decoding(self) -> bool:
        """Whether a batch of some read is being decoded."""
        with self._lock:
            lent = list(self._lent)
        return any(not slot.done.done for reader in lent for slot in reader.slots)

    def _take_back(self, reader: Reader, *, sound: bool) -> None:
        if self.given_up:
            return
        if not sound:
            # Nothing may still write into the caller's output, or into scratch that the next
            # read uses. After a CUDA error the reader is lost.
            try:
                reader.synchronize()
            except load_cupy().cuda.runtime.CUDARuntimeError:
                return
        with self._lock:
            self._free.append(reader)

    def release(self) -> int:
        """Free the memory of the readers that are not in use; return how much it was."""
        with self._lock:
            idle, self._free = self._free, []
        nbytes = sum(reader.nbytes for reader in idle)
        for reader in idle:
            reader.free()
        with self._lock:
            self._free.extend(idle)
        return nbytes

    def held(self) -> int:
        """Return the device memory of the readers that are not in use."""
        with self._lock:
            return sum(reader.nbytes for reader in self._free)


_pools: dict[int, _Pool] = {}
_pools_lock = threading.Lock()


def pool_of(device: int) -> _Pool:
    """Return the pool of the current device, whose number this is."""
    with _pools_lock:
        found = _pools.get(device)
        if found is None:
            require_gpu()
            found = _pools[device] = _Pool(device)
    return found


def give_up(device: int) -> None:
    """Let no further read of this process use a device, on which a decoder hangs.

    A running kernel cannot be stopped, and whatever waits for the device would wait for ever.
    Only the end of the process frees it.
    """
    with _pools_lock:
        _pools[device].given_up = True


def given_up() -> bool:
    """Tell whether a decoder hangs on some device of this process."""
    with _pools_lock:
        return any(pool.given_up for pool in _pools.values())


def reads_running(device: int) -> int:
    """Return how many reads of this process run on a device."""
    with _pools_lock:
        pool = _pools.get(device)
    return 0 if pool is None else pool.in_use


def is_idle(device: int) -> bool:
    """Tell whether nothing is read on a device, and all is there that a read needs."""
    with _pools_lock:
        pool = _pools.get(device)
    return pool is not None and pool.is_idle


def is_decoding(device: int) -> bool:
    """Tell whether a batch is being decoded on a device, for whichever read of this process."""
    with _pools_lock:
        pool = _pools.get(device)
    return pool is not None and pool.is_decoding


def scratch_held() -> int:
    """Return the bytes of device memory that idle readers of this process hold."""
    with _pools_lock:
        pools = list(_pools.values())
    return sum(pool.held() for pool in pools)


def release_memory() -> int:
    """Free the scratch of reads that are not running, on every device of this process.

    Returns
    -------
    Bytes of device memory that were given back.
    """
    with _pools_lock:
        pools = list(_pools.values())
    if not pools:
        return 0
    cp = load_cupy()
    nbytes = 0
    for pool in pools:
        with cp.cuda.Device(pool.device):
            nbytes += pool.release()
    # What CuPy's own pools keep is memory that nobody else can have.
    cp.get_default_memory_pool().free_all_blocks()
    cp.get_default_pinned_memory_pool().free_all_blocks()
    return nbytes
