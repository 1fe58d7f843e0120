"""Conversions whose large arrays a GPU compresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from numcodecs.zstd import Zstd

from scgpu_tasks.errors import ParameterError
from scgpu_tasks.io.checks import check
from scgpu_tasks.io.convert import ConvertSpec, convert_zarr, verify_store
from scgpu_tasks.io.convert import device as choice
from scgpu_tasks.io.layout import analyse_array, parse_shard_index
from scgpu_tasks.io.lazy import read_lazy
from tests.gpu.read_helpers import gpu_missing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(gpu_missing()), reason=gpu_missing()),
]

# Shards of some 256 chunks; rows of the dense layer take two chunks each.
SPEC = ConvertSpec(chunk_bytes=1024, shard_bytes=2**18)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    X = sp.random(6_000, 900, 0.2, "csr", dtype=np.float32, rng=rng)
    X.data = rng.poisson(2.0, X.nnz).astype(np.float32) + 1
    adata = ad.AnnData(X)
    adata.obs["group"] = rng.choice(["a", "b"], adata.n_obs)
    adata.obsm["noise"] = rng.normal(size=(6_000, 50))
    adata.layers["wide"] = rng.poisson(1.0, (6_000, 900)).astype(np.uint16)
    path = tmp_path_factory.mktemp("gpu") / "a.h5ad"
    adata.write_h5ad(path, compression="gzip")
    return path


class StopError(Exception):
    """Raised by a progress callback."""


def stop_after(n: int) -> Any:
    def report(state: Any) -> None:
        if state.done_shards >= n:
            raise StopError

    return report


def contents(store: Path) -> dict[str, bytes]:
    files = (path for path in store.rglob("*") if path.is_file())
    return {str(path.relative_to(store)): path.read_bytes() for path in files}


def frames_of(store: Path, name: str) -> list[bytes]:
    """Stored chunks of the first shard of an array."""
    array = zarr.open_array(store / name, mode="r")
    layout: Any = analyse_array(array.metadata)
    file = store / name / array.metadata.encode_chunk_key((0,) * array.ndim)
    raw = file.read_bytes()
    index = raw[-layout.index_nbytes :]
    table = parse_shard_index(index, len(raw), layout, store="", array="", shard="")
    return [raw[a : a + n] for a, n in zip(table.offset, table.size, strict=True) if n > 0]


def test_the_values_are_the_sources_and_every_frame_has_a_checksum(
    tmp_path: Path, source: Path
) -> None:
    result = convert_zarr(source, tmp_path / "gpu.zarr", spec=SPEC, device="gpu")
    host = convert_zarr(source, tmp_path / "cpu.zarr", spec=SPEC, device="cpu")
    assert result.verified
    assert any("GPU compressed" in note for note in result.notes)
    assert not any("GPU compressed" in note for note in host.notes)
    assert not verify_store(tmp_path / "gpu.zarr")
    arrays = {array.path: array for array in check(tmp_path / "gpu.zarr").arrays}
    assert arrays["X/data"].gpu
    assert arrays["X/indices"].gpu
    want, found = ad.read_h5ad(source), ad.read_zarr(tmp_path / "gpu.zarr")
    assert (want.X != found.X).nnz == 0
    assert want.obs.equals(found.obs)
    np.testing.assert_array_equal(want.obsm["noise"], found.obsm["noise"])
    np.testing.assert_array_equal(want.layers["wide"], found.layers["wide"])
    # nvCOMP compresses nearly as well.
    assert result.stored_bytes < 1.2 * host.stored_bytes
    for name in ("X/data", "X/indices", "obsm/noise", "layers/wide"):
        frames = frames_of(tmp_path / "gpu.zarr", name)
        assert len(frames) > 100
        assert all(frame[4] & 4 for frame in frames)
        # By nvCOMP: libzstd writes other frames.
        assert frames[0] != bytes(Zstd(3, checksum=True).encode(Zstd().decode(frames[0])))
        damaged = bytearray(frames[7])
        damaged[-1] ^= 1
        with pytest.raises(RuntimeError):
            Zstd().decode(bytes(damaged))
    block = read_lazy(tmp_path / "gpu.zarr", device="gpu").X.blocks[0].compute()
    assert (block.get() != want.X[: block.shape[0]]).nnz == 0


def test_the_bytes_depend_neither_on_the_threads_nor_on_an_interruption(
    tmp_path: Path, source: Path
) -> None:
    options: dict[str, Any] = {"spec": SPEC, "device": "gpu"}
    convert_zarr(source, tmp_path / "a.zarr", workers=16, **options)
    whole = contents(tmp_path / "a.zarr")
    convert_zarr(source, tmp_path / "b.zarr", workers=1, verify=False, **options)
    shards = {key for key in whole if key.endswith(tuple("0123456789"))}
    other = contents(tmp_path / "b.zarr")
    assert len(shards) > 30
    assert all(other[key] == whole[key] for key in shards)
    for n in (1, 9, 25):
        with pytest.raises(StopError):
            convert_zarr(
                source, tmp_path / "c.zarr", progress=stop_after(n), workers=4, **options
            )
    # Left to choose, it goes on with what was begun.
    options["device"] = "auto"
    result = convert_zarr(source, tmp_path / "c.zarr", workers=4, **options)
    assert result.shards_reused >= 25
    assert contents(tmp_path / "c.zarr") == whole


def test_a_gpu_is_chosen_where_it_pays(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = convert_zarr(source, tmp_path / "a.zarr", spec=SPEC, verify=False)
    monkeypatch.setattr(choice, "_LEAST_BYTES", 1000)
    large = convert_zarr(source, tmp_path / "b.zarr", spec=SPEC, verify=False, workers=4)
    many = convert_zarr(source, tmp_path / "c.zarr", spec=SPEC, verify=False, workers=64)
    chosen = [any("GPU" in note for note in r.notes) for r in (small, large, many)]
    assert chosen == [False, True, False]
    with pytest.raises(ParameterError, match="nvCOMP has no levels"):
        convert_zarr(source, tmp_path / "d.zarr", spec=ConvertSpec(level=9), device="gpu")


def test_device_memory_is_given_back(tmp_path: Path, source: Path) -> None:
    import cupy

    convert_zarr(source, tmp_path / "a.zarr", spec=SPEC, device="gpu", verify=False)
    cupy.get_default_memory_pool().free_all_blocks()
    before = cupy.cuda.runtime.memGetInfo()[0]
    convert_zarr(source, tmp_path / "b.zarr", spec=SPEC, device="gpu", verify=False)
    assert cupy.cuda.runtime.memGetInfo()[0] >= before - 2**26
