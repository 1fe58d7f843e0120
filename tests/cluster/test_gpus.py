"""What is said of GPUs that cannot be used, with the driver's answers made up."""

# The made-up driver has the names of NVML.
# ruff: noqa: N802, N815

from __future__ import annotations

import importlib.machinery
import logging
import sys
import types

import pytest

from scgpu_tasks.cluster import gpus
from scgpu_tasks.cluster.plan import plan_cluster, resolve_device
from scgpu_tasks.errors import ClusterError, MissingPackageError, ParameterError

GIB = 2**30


class Driver(types.ModuleType):
    """Answers as NVML does, for two GPUs of 100 GiB."""

    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    nvmlMemory_v2 = 2

    class NVMLError(Exception):
        def __init__(self, value):
            super().__init__(f"NVML error {value}")
            self.value = value

    def __init__(self):
        super().__init__("pynvml")
        self.error = None
        self.cuda = 13000
        self.used = [0, 0]

    def nvmlInit(self):
        if self.error:
            raise self.NVMLError(self.error)

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, i):
        return i

    def nvmlDeviceGetHandleByUUID(self, name):
        return int(name[-1])

    def nvmlDeviceGetUUID(self, i):
        return f"GPU-{i}"

    def nvmlDeviceGetMemoryInfo(self, i, version=1):
        total, used = 100 * GIB, int(self.used[i] * GIB)
        return types.SimpleNamespace(total=total, used=used, free=total - used, reserved=GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, i):
        return [types.SimpleNamespace(pid=77)] if self.used[i] else []

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return self.cuda


@pytest.fixture
def driver(monkeypatch):
    fake, cuda = Driver(), types.ModuleType("dask_cuda")
    cuda.__spec__ = importlib.machinery.ModuleSpec("dask_cuda", None)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setitem(sys.modules, "dask_cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_gpus_are_used_where_a_driver_shows_them_with_what_was_chosen_in_words(driver):
    plan = plan_cluster("auto", memory_limit="1GiB")
    assert (plan.device, plan.workers, plan.threads) == ("gpu", 2, 4)
    assert plan.gpu_memory_limit == int(0.75 * 99 * GIB)
    assert "2 workers of 4 threads, 1.0 GiB each" in str(plan)
    assert "GPU-0, GPU-1 (RMM asynchronous, at most 74.2 GiB each)" in str(plan)
    assert "pip install distributed-ucxx" in str(plan)
    assert plan.to_json()["devices"] == ["GPU-0", "GPU-1"]


@pytest.mark.parametrize("code", [9, 12])
def test_a_machine_without_a_driver_has_no_gpus(driver, code):
    driver.error = code
    assert resolve_device("auto") == "cpu"
    with pytest.raises(MissingPackageError, match="shows no GPU"):
        resolve_device("gpu")


def test_a_driver_that_does_not_work_is_told_from_none(driver, caplog):
    driver.error = 18  # Driver and library do not match.
    with pytest.raises(ClusterError, match="driver does not answer: NVML error 18"):
        resolve_device("gpu")
    with caplog.at_level(logging.WARNING):
        assert resolve_device("auto") == "cpu"
    assert "the CPU is used, because the NVIDIA driver does not answer" in caplog.text


@pytest.mark.parametrize("mask", ["", "-1", "NoDevFiles"])
def test_a_mask_that_hides_every_gpu_means_the_cpu_unless_a_gpu_is_asked_for(
    driver, monkeypatch, mask
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ClusterError, match="names no GPU of this machine"):
        plan_cluster("gpu")


def test_a_mask_of_one_gpu_is_kept_to(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert plan_cluster("auto", memory_limit="1GiB").devices == ("GPU-1",)
    with pytest.raises(ClusterError, match="2 GPU workers asked for, but there are 1 GPUs"):
        plan_cluster("gpu", workers=2)


@pytest.mark.parametrize(
    ("installed", "cuda", "match"),
    [
        ({"cupy-cuda13x"}, 12040, r"made for CUDA 13, and .* knows CUDA 12\.4.*\[cu12\]"),
        ({"cupy-cuda12x"}, 11080, r"made for CUDA 12, and .* knows CUDA 11\.8"),
        ({"cupy-cuda12x"}, 13000, None),
        ({"cupy-cuda12x", "cupy-cuda13x"}, 12080, None),
        (set(), 11000, None),
    ],
)
def test_packages_and_driver_must_fit(driver, monkeypatch, installed, cuda, match):
    monkeypatch.setattr(gpus, "_installed", lambda name: name in installed)
    driver.cuda = cuda
    if match is None:
        gpus.require_driver()
        return
    with pytest.raises(ClusterError, match=match):
        gpus.require_driver()


def test_gpus_in_use_are_warned_of_and_full_ones_refused(driver, caplog):
    driver.used = [0.5, 30]
    with caplog.at_level(logging.WARNING):
        gpus.require_memory(("GPU-0", "GPU-1"))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "GPU GPU-1 is in use already: 30.0 of 100.0 GiB are taken (by process 77)"
    driver.used = [99, 0]
    with pytest.raises(ClusterError, match=r"GPU-0 has too little memory left: 99\.0 of 100"):
        gpus.require_memory(("GPU-0", "GPU-1"))


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"gpu_share": 0.8}, ParameterError, "at most 0.75, not 0.8; more needs managed"),
        ({"gpu_share": 0}, ParameterError, "above 0"),
        ({"protocol": "ucx"}, MissingPackageError, "pip install distributed-ucxx"),
        ({"protocol": "ucx", "managed_memory": True}, ParameterError, "cannot send managed"),
        ({"protocol": "smoke"}, ParameterError, "tcp, ucx or tls"),
        ({"devices": "GPU-7"}, ClusterError, "devices='GPU-7' names no GPU"),
        ({"devices": []}, ClusterError, "names no GPU"),
    ],
)
def test_gpu_options_out_of_range_are_refused(driver, options, kind, match):
    with pytest.raises(kind, match=match):
        plan_cluster("gpu", memory_limit="1GiB", **options)


def test_managed_memory_may_exceed_the_gpu_and_uses_tcp(driver):
    free = plan_cluster("gpu", managed_memory=True, memory_limit="1GiB")
    assert (free.protocol, free.gpu_memory_limit) == ("tcp", None)
    assert "RMM pool of managed memory, no limit" in str(free)
    wide = plan_cluster("gpu", managed_memory=True, gpu_share=2, memory_limit="1GiB")
    assert wide.gpu_memory_limit == 198 * GIB
