import os
from pathlib import Path

import pytest

from scgpu_tasks.errors import MissingPackageError, OutputError
from scgpu_tasks.job.early import absolute, require_parent
from scgpu_tasks.stages import hvg


def test_paths_are_absolute_and_links_stay_but_behind_dots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk" / "new").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "new")
    monkeypatch.chdir(tmp_path)
    assert absolute("link/a.zarr") == str(tmp_path / "link" / "a.zarr")
    assert absolute("link/../a.zarr") == str(tmp_path / "disk" / "a.zarr")
    assert absolute("s3://bucket/../a.zarr") == "s3://bucket/../a.zarr"


def test_seurat_v3_is_refused_where_its_regression_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hvg, "find_spec", lambda _: None)
    with pytest.raises(MissingPackageError, match="pip install scikit-misc"):
        hvg.require_loess()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_store_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match=f"cannot write to {tmp_path}.*--store"):
        require_parent(tmp_path / "new" / "a.zarr")
