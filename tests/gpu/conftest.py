"""What tests on a GPU start from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from scgpu_tasks.io import gpu_packages
from scgpu_tasks.io.counters import reset_statistics


@pytest.fixture
def gpu_is_there() -> None:
    """Skip the test where CuPy finds no GPU."""
    import cupy

    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no GPU: {error}")
    if not count:
        pytest.skip("no GPU")


@pytest.fixture
def all_on_the_gpu() -> Iterator[None]:
    """Let the GPU decode small requests, too; what was read is counted from nought."""
    reset_statistics()
    before = gpu_packages.configure(replace(gpu_packages.settings(), small_request=0))
    yield
    gpu_packages.configure(before)
