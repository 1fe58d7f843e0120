"""``chunks.cu`` compiled for the host: the shipped kernels, run thread by thread.

The source includes nothing and takes pointers as integers, so a C++ compiler makes a library of
it once the words that only CUDA knows are defined.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np

from scgpu_tasks.io.scratch import kernel_source

_BEFORE = """
struct Dim { unsigned x, y, z; };
static thread_local Dim threadIdx, blockIdx, blockDim, gridDim;
#define __device__
#define __global__
"""

_DRIVER = """
#define RUN(gx, gy, bx, call)                                              \\
  gridDim = {{gx, gy, 1}}; blockDim = {{bx, 1, 1}};                        \\
  for (unsigned y = 0; y < gy; ++y) for (unsigned x = 0; x < gx; ++x)      \\
    for (unsigned t = 0; t < bx; ++t) {{                                   \\
      blockIdx = {{x, y, 0}}; threadIdx = {{t, 0, 0}}; call; }}
"""

_ARGUMENTS = {
    "check_frames": "QQQQIQQQ",
    "check_crcs": "QQQQI",
    "hash_lanes": "QQQQQIQ",
    "judge": "QQQQQQQIQ",
    "scatter": "QIIQQIQQ",
    "seal": "QQQQQIQ",
    "pack": "QQQQQ",
}
_C = {"Q": ("u64", ctypes.c_uint64), "I": ("u32", ctypes.c_uint32)}


class HostKernels:
    """The kernels as functions of (grid, block, arguments), like ``cupy.RawKernel``."""

    def __init__(self, folder: Path) -> None:
        source = _BEFORE + kernel_source() + _DRIVER.replace("{{", "{").replace("}}", "}")
        for name, kinds in _ARGUMENTS.items():
            params = ", ".join(f"{_C[k][0]} a{i}" for i, k in enumerate(kinds))
            names = ", ".join(f"a{i}" for i in range(len(kinds)))
            source += (
                f'extern "C" void run_{name}(u32 gx, u32 gy, u32 bx, {params})'
                f" {{ RUN(gx, gy, bx, {name}({names})) }}\n"
            )
        code, library = folder / "chunks.cpp", folder / "chunks.so"
        code.write_text(source)
        compiler = shutil.which("g++") or shutil.which("c++") or ""
        subprocess.run(
            [compiler, "-O1", "-g", "-std=c++17", "-w", "-shared", "-fPIC",
             "-fsanitize=undefined", "-fno-sanitize-recover=undefined", "-static-libubsan",
             str(code), "-o", str(library)],
            check=True,
        )  # fmt: skip
        self._library = ctypes.CDLL(str(library))

    def run(
        self, name: str, grid: tuple[int, ...], block: tuple[int, ...], args: tuple
    ) -> None:
        kinds = _ARGUMENTS[name]
        assert len(args) == len(kinds)
        for kind, arg in zip(kinds, args, strict=True):
            # What CuPy would pass by its own rules must have the size the kernel expects.
            assert isinstance(arg, np.uint64 if kind == "Q" else np.uint32), (name, arg)
        call = getattr(self._library, f"run_{name}")
        call.argtypes = [ctypes.c_uint32] * 3 + [_C[k][1] for k in kinds]
        call(grid[0], grid[1] if len(grid) > 1 else 1, block[0], *(int(a) for a in args))


def compiler_missing() -> bool:
    return shutil.which("g++") is None and shutil.which("c++") is None


def address(array: np.ndarray) -> np.uint64:
    return np.uint64(array.ctypes.data)
