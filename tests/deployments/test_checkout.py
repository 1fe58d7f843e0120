"""Where a deployed run finds the flows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import scgpu_tasks
from scgpu_tasks.operate.checkout import CHECKOUT, enter_checkout

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start in another folder, and come back from where the test goes."""
    monkeypatch.delenv(CHECKOUT, raising=False)
    monkeypatch.chdir(tmp_path)


def test_a_run_goes_to_the_repository_that_the_package_was_installed_from() -> None:
    assert enter_checkout() == {"directory": str(ROOT)}
    assert Path.cwd() == ROOT


def test_a_run_goes_to_the_repository_that_the_worker_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "a copy"
    shutil.copytree(ROOT / "flows", copy / "flows")
    monkeypatch.setenv(CHECKOUT, "a copy")
    assert enter_checkout() == {"directory": str(copy)}


@pytest.mark.parametrize("named", [True, False])
def test_a_worker_without_the_repository_is_told_what_to_set(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if named:
        monkeypatch.setenv(CHECKOUT, str(tmp_path))
    else:
        installed = tmp_path / "site-packages" / "scgpu_tasks" / "__init__.py"
        monkeypatch.setattr(scgpu_tasks, "__file__", str(installed))
    with pytest.raises(FileNotFoundError, match=rf"no flows/qc_pca.py in .*Set {CHECKOUT}"):
        enter_checkout()
    assert Path.cwd() == tmp_path
