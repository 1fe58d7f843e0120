"""Switching GPU reads on and off; without a GPU, as far as that goes."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest
import zarr
from distributed import Client, LocalCluster

from scgpu_tasks.errors import MissingPackageError
from scgpu_tasks.io import gpu_packages, switch
from scgpu_tasks.io.pipeline import FALLBACK_KEY, PATH, STRICT_KEY
from scgpu_tasks.io.settings import SWITCH_SECONDS
from scgpu_tasks.io.switch import enable, is_enabled, release_memory

ZARRS = "zarrs.ZarrsCodecPipeline"


def gpu_here() -> bool:
    try:
        gpu_packages.require_gpu()
    except MissingPackageError:
        return False
    return True


@pytest.fixture
def _as_if_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing here plays no part in how zarr's configuration is switched."""
    monkeypatch.setattr(gpu_packages, "require_gpu", lambda: None)


def setting(key: str) -> Any:
    return zarr.config.get(key, None)


@pytest.mark.skipif(gpu_here(), reason="nothing is missing")
def test_without_a_gpu_the_error_names_what_is_missing_and_the_pip_line() -> None:
    before = setting("codec_pipeline.path")
    with pytest.raises(MissingPackageError, match=r"CuPy: pip install 'scgpu-tasks\[cu13\]'"):
        enable()
    assert setting("codec_pipeline.path") == before
    assert not is_enabled()


@pytest.mark.usefixtures("_as_if_complete")
def test_a_block_is_undone_also_after_an_exception() -> None:
    before = setting("codec_pipeline.path")
    with enable(strict=True):
        assert is_enabled()
        assert setting(STRICT_KEY) is True
    assert not is_enabled()
    with pytest.raises(KeyError), enable(strict=True):
        raise KeyError
    assert setting("codec_pipeline.path") == before
    assert setting(STRICT_KEY) is None


@pytest.mark.usefixtures("_as_if_complete")
def test_blocks_nest_and_zarrs_is_remembered() -> None:
    with zarr.config.set({"codec_pipeline.path": ZARRS}):
        with enable():
            assert setting(FALLBACK_KEY) == ZARRS
            with enable(strict=True):
                assert setting(FALLBACK_KEY) == ZARRS
                assert setting(STRICT_KEY) is True
            assert is_enabled()
            assert setting(STRICT_KEY) is False
        assert setting("codec_pipeline.path") == ZARRS
        assert setting(FALLBACK_KEY) is None


@pytest.mark.usefixtures("_as_if_complete")
def test_a_plain_call_lasts_until_it_is_disabled() -> None:
    before = setting("codec_pipeline.path")
    enabled = enable()
    assert setting("codec_pipeline.path") == PATH
    enabled.disable()
    enabled.disable()
    assert setting("codec_pipeline.path") == before


@pytest.mark.usefixtures("_as_if_complete")
def test_levels_may_be_closed_in_any_order() -> None:
    before = setting("codec_pipeline.path")
    first, second = enable(), enable(strict=True)
    first.disable()
    assert is_enabled()
    assert setting(STRICT_KEY) is True
    second.disable()
    assert setting("codec_pipeline.path") == before


@pytest.mark.usefixtures("_as_if_complete")
def test_threads_take_turns_more_often_only_while_gpu_reads_are_on() -> None:
    before = sys.getswitchinterval()
    first, second = enable(), enable()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    first.disable()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    second.disable()
    assert sys.getswitchinterval() == pytest.approx(before)


@pytest.mark.usefixtures("_as_if_complete")
def test_workers_and_those_that_join_later_are_switched_on_and_off() -> None:
    cluster = LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0")
    with cluster, Client(cluster) as client:
        with enable(client, strict=True):
            assert set(client.run(is_enabled).values()) == {True}
            cluster.scale(2)
            client.wait_for_workers(2, timeout=30)
            states = client.run(lambda dask_worker: sorted(dask_worker.plugins))
            assert len(states) == 2
            assert all(any("gpu-reads" in name for name in s) for s in states.values())
        assert not is_enabled()


@pytest.mark.skipif(gpu_here(), reason="nothing is missing")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_worker_without_a_gpu_reports_it_and_no_plugin_stays_behind() -> None:
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        with pytest.raises(MissingPackageError, match="pip install"):
            enable(client)
        assert not any("gpu-reads" in n for n in cluster.scheduler.worker_plugins)
        assert release_memory(client) == 0


def test_the_plugin_pickles_without_what_it_holds() -> None:
    plugin = switch._GpuReads(True)
    plugin._enabled["tcp://a"] = object()  # type: ignore[assignment]
    again = pickle.loads(pickle.dumps(plugin))
    assert again.strict is True
    assert again._enabled == {}


def test_there_is_nothing_to_release_before_the_first_read() -> None:
    assert release_memory() == 0
