"""Every CUDA source compiles for every supported architecture, without a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from scgpu_tasks.kernels._gpu.module import OPTIONS, define, source
from scgpu_tasks.kernels.rows import sum_type

ARCHITECTURES = ("sm_70", "sm_80", "sm_90", "sm_100")
INVALID_OPTION = 5  # nvrtcResult
VALUES = ("uint8", "uint16", "int32", "int64", "float32", "float64")
INDICES = ("uint16", "int32", "int64")
FUNCTIONS = {
    "rows": ("row_order", "row_keys", "sum_runs", "dense_count", "dense_fill"),
    "qc": ("cell_metrics", "top_totals"),
    "moments": ("gene_counts", "gene_sums", "combine_parts"),
    "select": ("select_count", "select_fill", "whole_numbers"),
    "gram": ("fill_tile", "add_products", "add_gram"),
    "project": ("project",),
}


def variants(name: str, value: str, index: str) -> list[tuple[tuple[str, str], ...]]:
    """Defines of a source that the package can ask for."""
    if name == "rows":
        return [define(value, index, WIDE=sum_type(np.dtype(value)))]
    if name == "select":
        return [define(value, index, OUT_INDEX=kind) for kind in ("uint16", "int32")]
    if name == "gram":
        return [
            define(value, index, FORM=form, PRODUCT="float64" if form == 3 else "float32")
            for form in range(4)
        ]
    return [define(value, index)]


class Compiler:
    """NVRTC, called as CuPy calls it."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))

    def compile(self, text: str, architecture: str) -> tuple[int, str, bytes]:
        """Result code, log and machine code."""
        program = ctypes.c_void_p()
        code = text.encode()
        made = self.library.nvrtcCreateProgram(
            ctypes.byref(program), code, b"kernels.cu", 0, None, None
        )
        assert made == 0
        options = [option.encode() for option in OPTIONS]
        options.append(f"--gpu-architecture={architecture}".encode())
        result = self.library.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*options)
        )
        log = self._read(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")
        cubin = b""
        if result == 0:
            cubin = self._read(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")
        self.library.nvrtcDestroyProgram(ctypes.byref(program))
        return result, log.decode(errors="replace"), cubin

    def _read(self, program: ctypes.c_void_p, size_of: str, get: str) -> bytes:
        size = ctypes.c_size_t()
        assert getattr(self.library, size_of)(program, ctypes.byref(size)) == 0
        buffer = ctypes.create_string_buffer(size.value)
        assert getattr(self.library, get)(program, buffer) == 0
        return buffer.raw


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [
        path
        for folder in folders
        for path in Path(folder).rglob("libnvrtc.so.*")
        if "alt" not in path.name
    ]
    if not found:
        pytest.skip("NVRTC is not installed: pip install nvidia-cuda-nvrtc-cu12")
    # CUDA 12's knows the oldest architecture too.
    return Compiler(min(found, key=lambda path: path.name))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_source_compiles_for_architecture(
    compiler: Compiler, name: str, architecture: str
) -> None:
    for defines in variants(name, "float32", "uint16"):
        result, log, cubin = compiler.compile(source(name, defines), architecture)
        if result == INVALID_OPTION and architecture in log:
            pytest.skip(f"this NVRTC does not know {architecture}")
        assert result == 0, log
        for function in FUNCTIONS[name]:
            assert f".text.{function}".encode() in cubin


@pytest.mark.parametrize("name", FUNCTIONS)
def test_source_compiles_for_every_type(compiler: Compiler, name: str) -> None:
    for value, index in product(VALUES, INDICES):
        for defines in variants(name, value, index)[:1]:
            result, log, _ = compiler.compile(source(name, defines), "sm_80")
            assert result == 0, f"{value} {index}: {log}"


def test_an_error_in_a_source_is_found(compiler: Compiler) -> None:
    text = source("qc", define("float32", "uint16")).replace("warp_sum(summed)", "no_sum()")
    result, log, _ = compiler.compile(text, "sm_80")
    assert result != 0
    assert "no_sum" in log
