"""The CUDA sources compile for every GPU we name, by NVIDIA's own compiler, without a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path

import pytest

from scgpu_tasks.io.scratch import kernel_source

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
SOURCES = {
    "chunks.cu": kernel_source(),
    "atlas.cu": (Path(__file__).parents[1] / "benchmarks/atlas.cu").read_text(),
}


def nvrtc() -> ctypes.CDLL:
    spec = importlib.util.find_spec("nvidia")
    for root in [] if spec is None else spec.submodule_search_locations or []:
        for pattern in ("cu*/lib/libnvrtc.so.*", "cuda_nvrtc/lib/libnvrtc.so.*"):
            for path in sorted(Path(root).glob(pattern)):
                if "builtins" not in path.name and "alt" not in path.name:
                    return ctypes.CDLL(str(path))
    pytest.skip("NVRTC is not installed: pip install nvidia-cuda-nvrtc")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", SOURCES)
def test_the_kernels_compile(name: str, architecture: str) -> None:
    lib = nvrtc()
    program = c_void_p()
    source = SOURCES[name].encode()
    assert lib.nvrtcCreateProgram(byref(program), source, name.encode(), 0, None, None) == 0
    options = (c_char_p * 2)(b"-std=c++17", f"-arch={architecture}".encode())
    status: int = lib.nvrtcCompileProgram(program, 2, options)
    size = c_size_t()
    lib.nvrtcGetProgramLogSize(program, byref(size))
    log = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()
    assert lib.nvrtcGetCUBINSize(program, byref(size)) == 0
    assert c_int(size.value).value > 1000
