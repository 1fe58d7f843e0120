"""Killed when the store is in place, or half-way there: the same command sees what is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zarr

from scgpu_tasks.errors import OutputError
from scgpu_tasks.io.convert import ConvertSpec, convert_zarr, verify_store, work
from scgpu_tasks.io.convert.many import convert_if_changed

from .test_convert_interrupted import StopError, contents
from .test_convert_round_trip import assert_same, atlas, read, write


def die_before_tidying_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have conversions end once their store is in place."""

    def die(folder: Any) -> None:
        raise StopError

    monkeypatch.setattr(work.WorkFolder, "discard", die)


@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_between_the_last_rename_and_tidying_up_it_says_so_and_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    write(atlas(), tmp_path / "a.zarr", "zarr v3", 0)
    source, target = tmp_path / "a.zarr", tmp_path / "b.zarr"
    if overwrite:
        write(atlas(seed=1), tmp_path / "old.zarr", "zarr v3", 0)
        convert_zarr(tmp_path / "old.zarr", target)
    die_before_tidying_up(monkeypatch)
    with pytest.raises(StopError):
        convert_zarr(source, target, overwrite=overwrite)
    monkeypatch.undo()
    finished = contents(target)
    result = convert_zarr(source, target, overwrite=overwrite)
    assert any("had finished this store" in note for note in result.notes)
    assert result.shards_reused == result.shards > 0
    assert contents(target) == finished
    assert_same(read(source), read(target))
    assert not target.with_name("b.zarr.converting").exists()
    with pytest.raises(OutputError, match="exists"):
        convert_zarr(source, target)


@pytest.mark.parametrize("what", ["options", "store"])
def test_what_such_a_run_left_is_not_taken_for_another_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    write(atlas(), tmp_path / "a.zarr", "zarr v3", 0)
    source, target = tmp_path / "a.zarr", tmp_path / "b.zarr"
    convert_zarr(source, target, spec=ConvertSpec(level=7))
    die_before_tidying_up(monkeypatch)
    with pytest.raises(StopError):
        convert_zarr(source, target, overwrite=True)
    monkeypatch.undo()
    spec = ConvertSpec(level=5) if what == "options" else ConvertSpec()
    if what == "store":
        zarr.open_array(target / "X/data", mode="r+")[0] = 77
    changed = contents(target)
    with pytest.raises(OutputError, match="exists; choose another name"):
        convert_zarr(source, target, spec=spec)
    assert contents(target) == changed
    # The old store still lies where the new one grew.
    result = convert_zarr(source, target, spec=spec, overwrite=True)
    assert result.shards_reused == 0
    assert_same(read(source), read(target))
    assert verify_store(target) == []


def test_a_current_store_loses_what_such_a_run_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(atlas(), tmp_path / "a.zarr", "zarr v3", 0)
    die_before_tidying_up(monkeypatch)
    with pytest.raises(StopError):
        convert_zarr(tmp_path / "a.zarr", tmp_path / "b.zarr")
    monkeypatch.undo()
    assert convert_if_changed(tmp_path / "a.zarr", tmp_path / "b.zarr") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zarr", "b.zarr"]


def test_the_old_store_is_put_back_where_a_swap_in_two_steps_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(atlas(), tmp_path / "a.zarr", "zarr v3", 0)
    write(atlas(seed=1), tmp_path / "old.zarr", "zarr v3", 0)
    source, target = tmp_path / "a.zarr", tmp_path / "b.zarr"
    convert_zarr(tmp_path / "old.zarr", target)
    old = contents(target)
    rename = Path.rename

    def die(path: Path, to: Path) -> Path:
        if path.name == "store":
            raise StopError
        return rename(path, to)

    monkeypatch.setattr(work, "_exchange", lambda a, b: False)
    monkeypatch.setattr(Path, "rename", die)
    with pytest.raises(StopError):
        convert_zarr(source, target, overwrite=True)
    monkeypatch.undo()
    assert not target.exists()
    with pytest.raises(OutputError, match="exists; choose another name"):
        convert_zarr(source, target)
    assert contents(target) == old
    result = convert_zarr(source, target, overwrite=True)
    assert result.shards_reused == result.shards
    assert_same(read(source), read(target))
