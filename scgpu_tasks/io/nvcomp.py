"""Batched zstd and CRC-32C of device buffers, by nvCOMP's C library.

nvCOMP's Python API takes one Python object for every chunk. The C library takes arrays of
pointers and sizes that lie in device memory, so a call costs microseconds whatever the number
of chunks. Sources: ``nvcomp/zstd.h``, ``nvcomp/crc32.h``, ``nvcomp/shared_types.h`` of nvCOMP
5.3 and 6.0.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, byref, c_bool, c_char, c_int, c_size_t, c_uint32, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

from scgpu_tasks.errors import MissingPackageError, ScgpuError

MAJORS = (6, 5)
"""Versions of the C interface that this module speaks, best first."""

STATUS = {
    0: "success",
    10: "invalid value",
    11: "not supported",
    12: "cannot decompress",
    13: "bad checksum",
    14: "cannot verify checksums",
    15: "output buffer too small",
    16: "wrong header length",
    17: "alignment",
    18: "chunk too large",
    19: "cannot compress",
    20: "wrong input length",
    21: "batch too large",
    1000: "CUDA error",
    10000: "internal error",
}


class NvcompError(ScgpuError, RuntimeError):
    """A call of nvCOMP failed."""


class _Properties(ctypes.Structure):
    _fields_ = (("version", c_uint32), ("cudart_version", c_uint32))


class _Alignments(ctypes.Structure):
    _fields_ = (("input", c_size_t), ("output", c_size_t), ("temp", c_size_t))


class _DecompressOpts(ctypes.Structure):
    _fields_ = (("backend", c_int), ("reserved", c_char * 60))


class _CompressOpts(ctypes.Structure):
    _fields_ = (("reserved", c_char * 64),)


class _CrcSpec(ctypes.Structure):
    _fields_ = (
        ("poly", c_uint32),
        ("init", c_uint32),
        ("ref_in", c_bool),
        ("ref_out", c_bool),
        ("xorout", c_uint32),
        ("reserved", c_char * 16),
    )


class _CrcKernel(ctypes.Structure):
    _fields_ = (
        ("kernel_kind", c_int),
        ("bytes_per_read", ctypes.c_int32),
        ("blocks_per_msg", ctypes.c_int32),
        ("reserved", c_char * 20),
    )


class _CrcOpts(ctypes.Structure):
    _fields_ = (("spec", _CrcSpec), ("kernel_conf", _CrcKernel), ("reserved", c_char * 64))


class Alignments(NamedTuple):
    """Multiples in bytes at which buffers must begin."""

    input: int
    output: int
    temp: int


def find_library() -> Path | None:
    """Return the path of the newest libnvcomp that an installed wheel brings, or None."""
    for major in MAJORS:
        for folder in sys.path:
            path = Path(folder or ".") / "nvidia/libnvcomp/lib64" / f"libnvcomp.so.{major}"
            if path.is_file():
                return path
    return None


class Nvcomp:
    """nvCOMP's C library; sizes are bytes, pointers are device addresses as integers.

    Parameters
    ----------
    path
        Of ``libnvcomp.so.N``; a bare name is looked up as the dynamic loader does.

    Attributes
    ----------
    version
        Of the library: major, minor, patch.
    alignments
        What zstd decoding requires of its buffers.

    Raises
    ------
    MissingPackageError
        The library cannot be loaded, or has a version that this class does not speak.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self._lib = ctypes.CDLL(str(path))
        except OSError as error:
            msg = f"nvCOMP cannot be loaded from {path}: {error}; {_PIP}"
            raise MissingPackageError(msg) from error
        self.path = str(path)
        properties = _Properties()
        self._lib.nvcompGetProperties.argtypes = (POINTER(_Properties),)
        _check(self._lib.nvcompGetProperties(byref(properties)), "nvcompGetProperties")
        self.version = _version(properties.version)
        if self.version[0] not in MAJORS:
            msg = f"nvCOMP {'.'.join(map(str, self.version))} is not supported; {_PIP}"
            raise MissingPackageError(msg)
        self._declare()
        found = _Alignments()
        call = self._lib.nvcompBatchedZstdDecompressGetRequiredAlignments
        _check(call(_DecompressOpts(), byref(found)), "DecompressGetRequiredAlignments")
        self.alignments = Alignments(found.input, found.output, found.temp)

    def _declare(self) -> None:
        lib = self._lib
        lib.nvcompBatchedZstdDecompressGetRequiredAlignments.argtypes = (
            _DecompressOpts, POINTER(_Alignments),
        )  # fmt: skip
        lib.nvcompBatchedZstdDecompressAsync.argtypes = (
            c_void_p, c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p,
            _DecompressOpts, c_void_p, c_void_p,
        )  # fmt: skip
        lib.nvcompBatchedZstdCompressGetMaxOutputChunkSize.argtypes = (
            c_size_t, _CompressOpts, POINTER(c_size_t),
        )  # fmt: skip
        lib.nvcompBatchedZstdCompressAsync.argtypes = (
            c_void_p, c_void_p, c_size_t, c_size_t, c_void_p, c_size_t, c_void_p, c_void_p,
            _CompressOpts, c_void_p, c_void_p,
        )  # fmt: skip
        lib.nvcompBatchedCRC32Async.argtypes = (
            c_void_p, c_void_p, c_size_t, c_void_p, _CrcOpts, c_int, c_void_p, c_void_p,
        )  # fmt: skip
        lib.nvcompBatchedCRC32GetHeuristicConf.argtypes = (
            c_void_p, c_size_t, POINTER(_CrcKernel), c_size_t, c_void_p,
        )  # fmt: skip
        # Version 6 dropped a suffix and appended the stream.
        five = self.version[0] == 5
        self._temp_size = {}
        for verb, opts in (("Decompress", _DecompressOpts), ("Compress", _CompressOpts)):
            name = f"nvcompBatchedZstd{verb}GetTempSize{'Async' if five else ''}"
            call = getattr(lib, name)
            call.argtypes = (c_size_t, c_size_t, opts, POINTER(c_size_t), c_size_t) + (
                () if five else (c_void_p,)
            )
            self._temp_size[verb] = (call, opts)

    def decode_temp_nbytes(self, n: int, chunk_nbytes: int, stream: int) -> int:
        """Return the scratch that decoding ``n`` chunks of this size takes."""
        return self._temp("Decompress", n, chunk_nbytes, stream)

    def encode_temp_nbytes(self, n: int, chunk_nbytes: int, stream: int) -> int:
        """Return the scratch that encoding ``n`` chunks of this size takes."""
        return self._temp("Compress", n, chunk_nbytes, stream)

    def _temp(self, verb: str, n: int, chunk_nbytes: int, stream: int) -> int:
        call, opts = self._temp_size[verb]
        nbytes = c_size_t()
        tail = (stream,) if self.version[0] > 5 else ()
        _check(
            call(n, chunk_nbytes, opts(), byref(nbytes), n * chunk_nbytes, *tail),
            f"nvcompBatchedZstd{verb}GetTempSize",
        )
        return nbytes.value

    def decode(
        self,
        sources: int,
        sizes: int,
        capacities: int,
        actual: int,
        n: int,
        temp: int,
        temp_nbytes: int,
        targets: int,
        statuses: int,
        stream: int,
    ) -> None:
        """Enqueue the decoding of ``n`` zstd frames.

        All pointers are device addresses of arrays of ``n``: ``sources`` and ``targets`` of
        addresses, ``sizes``, ``capacities`` and ``actual`` of uint64, ``statuses`` of int32.
        """
        _check(
            self._lib.nvcompBatchedZstdDecompressAsync(
                sources, sizes, capacities, actual, n, temp, temp_nbytes, targets,
                _DecompressOpts(), statuses, stream,
            ),
            "nvcompBatchedZstdDecompressAsync",
        )  # fmt: skip

    def max_encoded_nbytes(self, chunk_nbytes: int) -> int:
        """Return the room that one encoded chunk may need."""
        nbytes = c_size_t()
        call = self._lib.nvcompBatchedZstdCompressGetMaxOutputChunkSize
        _check(call(chunk_nbytes, _CompressOpts(), byref(nbytes)), "GetMaxOutputChunkSize")
        return nbytes.value

    def encode(
        self,
        sources: int,
        sizes: int,
        chunk_nbytes: int,
        n: int,
        temp: int,
        temp_nbytes: int,
        targets: int,
        encoded_sizes: int,
        statuses: int,
        stream: int,
    ) -> None:
        """Enqueue the encoding of ``n`` chunks of at most ``chunk_nbytes`` as zstd frames."""
        _check(
            self._lib.nvcompBatchedZstdCompressAsync(
                sources, sizes, chunk_nbytes, n, temp, temp_nbytes, targets, encoded_sizes,
                _CompressOpts(), statuses, stream,
            ),
            "nvcompBatchedZstdCompressAsync",
        )  # fmt: skip

    def crc32c(
        self, sources: int, sizes: int, n: int, max_nbytes: int, crcs: int, stream: int
    ) -> None:
        """Enqueue the CRC-32C of ``n`` buffers of at most ``max_nbytes`` into uint32s."""
        spec = _CrcSpec(0x1EDC6F41, 0xFFFFFFFF, True, True, 0xFFFFFFFF)
        opts = _CrcOpts(spec=spec)
        conf = self._lib.nvcompBatchedCRC32GetHeuristicConf
        _check(conf(None, n, byref(opts.kernel_conf), max_nbytes, stream), "CRC32HeuristicConf")
        _check(
            self._lib.nvcompBatchedCRC32Async(sources, sizes, n, crcs, opts, 0, None, stream),
            "nvcompBatchedCRC32Async",
        )


_PIP = "pip install 'scgpu-tasks[cu13]' (or [cu12] for CUDA 12)"


def _version(number: int) -> tuple[int, int, int]:
    return number // 1000, number % 1000 // 100, number % 100


def _check(status: int, call: str) -> None:
    if status != 0:
        msg = f"{call} of nvCOMP failed: {STATUS.get(status, 'status')} ({status})"
        raise NvcompError(msg)


@cache
def load() -> Nvcomp:
    """Return nvCOMP, loaded once in a process.

    Raises
    ------
    MissingPackageError
        It is not installed.
    """
    path = find_library()
    return Nvcomp(path if path is not None else f"libnvcomp.so.{MAJORS[0]}")


def frame_content_nbytes(frame: bytes | memoryview) -> int | None:
    """Return the content size that a zstd frame states, None where it states none.

    Parameters
    ----------
    frame
        At least the first 18 bytes.

    Raises
    ------
    ValueError
        These bytes do not begin a zstd frame.
    """
    if len(frame) < 6 or bytes(frame[:4]) != b"\x28\xb5\x2f\xfd":
        msg = "no zstd frame begins here"
        raise ValueError(msg)
    head = frame[4]
    single = head >> 5 & 1
    width = (single, 2, 4, 8)[head >> 6]
    at = 5 + (1 - single) + (0, 1, 2, 4)[head & 3]
    if width == 0:
        return None
    return int.from_bytes(frame[at : at + width], "little") + (256 if width == 2 else 0)
