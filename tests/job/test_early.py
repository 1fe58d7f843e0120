from pathlib import Path

import pytest

from scgpu_tasks.job.early import absolute


def test_paths_are_absolute_and_links_stay_but_behind_dots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk" / "new").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "new")
    monkeypatch.chdir(tmp_path)
    assert absolute("link/a.zarr") == str(tmp_path / "link" / "a.zarr")
    assert absolute("link/../a.zarr") == str(tmp_path / "disk" / "a.zarr")
    assert absolute("s3://bucket/../a.zarr") == "s3://bucket/../a.zarr"
