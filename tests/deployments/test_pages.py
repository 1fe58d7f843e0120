"""Prefect's pages in a browser: form, timeline, progress, figures. Takes pictures for the docs.

Needs Chromium and Playwright (``pip install playwright``), so it runs where it is asked for:
``SCGPU_TEST_PAGES=FOLDER pytest tests/deployments/test_pages.py``, which leaves its pictures in
FOLDER. ``SCGPU_TEST_DATA=/srv/atlases`` makes the atlases there: their paths stand in pictures.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scgpu_tasks.demo import write_demo
from tests.deployments.conftest import PATIENCE, Operator

PICTURES = os.environ.get("SCGPU_TEST_PAGES")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PICTURES, reason="SCGPU_TEST_PAGES is not set"),
]
WAIT_MS = 90_000


@pytest.fixture(scope="module")
def data() -> Iterator[Path]:
    """Folder of two atlases and a damaged one, with a name that may stand in pictures."""
    with contextlib.ExitStack() as stack:
        named = os.environ.get("SCGPU_TEST_DATA")
        name = named or stack.enter_context(tempfile.TemporaryDirectory(prefix="atlases-"))
        folder = Path(name) / "incoming"
        shutil.copy(write_demo(folder / "liver.h5ad"), folder / "lung.h5ad")
        (folder / "kidney.h5ad").write_bytes(b"\x89HDF\r\n\x1a\n cut short")
        yield Path(name)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium; whatever it asks of another machine fails the test that asked."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, operator: Operator) -> Iterator[Any]:
    """A page of the size of the pictures in the documentation."""
    found = browser.new_page(viewport={"width": 1120, "height": 760})
    asked: list[str] = []
    found.on("request", lambda request: asked.append(request.url))
    found.set_default_timeout(WAIT_MS)
    yield found
    found.close()
    elsewhere = [u for u in asked if not re.match(rf"{operator.ui}/|data:|blob:", u)]
    assert not [url for url in elsewhere if f":{operator.port}/" not in url]


@pytest.fixture
def look(page: Any, operator: Operator) -> Callable[..., None]:
    """Open a page of the server, wait for texts on it, and take a picture."""

    def open_and_wait(path: str, *texts: str, picture: str | None = None) -> None:
        page.goto(f"{operator.ui}/{path}")
        for text in texts:
            page.get_by_text(text).first.wait_for()
        if picture:
            page.wait_for_timeout(1500)  # what moves comes to rest
            page.screenshot(path=Path(str(PICTURES)) / f"{picture}.png")

    return open_and_wait


def artifact(operator: Operator, key: str) -> str:
    """Path of the page of the latest artifact of a key."""
    (found,) = operator.api("artifacts/latest/filter", {"artifacts": {"key": {"any_": [key]}}})
    return f"artifacts/artifact/{found['latest_id']}"


def test_a_conversion_shows_what_became_of_each_source(
    operator: Operator, data: Path, look: Callable[..., None]
) -> None:
    given = ("-p", f"src={data}/incoming", "-p", f"dst={data}/stores", "--watch")
    operator.prefect("deployment", "run", "atlas-convert", *given)
    (run,) = operator.runs("atlas-convert")
    look("deployments", "atlas-qc", "atlas-convert", "scgpu")
    look(f"runs/flow-run/{run['id']}", "Failed", "3 Task runs")
    texts = ("2 converted, 0 current, 1 failed", "liver.h5ad", "cannot be opened as HDF5")
    look(artifact(operator, "atlas-conversions"), *texts, picture="conversions")


def test_the_form_describes_the_parameters_and_starts_a_run(
    operator: Operator, data: Path, page: Any, look: Callable[..., None]
) -> None:
    store = data / "stores" / "liver.zarr"
    deployment = operator.deployment("atlas-qc/atlas-qc")["id"]
    texts = ("AnnData zarr store to work on.", "Number of principal components.")
    look(f"deployments/deployment/{deployment}/run", *texts, picture="run-form")
    fields = page.locator("textarea")
    fields.nth(0).fill(str(store))
    fields.nth(1).fill(str(data / "runs"))
    page.get_by_role("button", name="Submit").click()
    run = operator.wait_for(
        lambda: operator.runs("atlas-qc"), PATIENCE, "the run that was asked for"
    )
    assert run[0]["parameters"]["store"] == str(store)


def test_a_run_shows_stages_progress_and_figures(
    operator: Operator, page: Any, look: Callable[..., None]
) -> None:
    (run,) = operator.wait_for(
        lambda: operator.runs("atlas-qc"), PATIENCE, "the run of the form"
    )
    of_run = {"flow_run_id": {"any_": [run["id"]]}}
    progress = {"artifacts": {**of_run, "type": {"any_": ["progress"]}}}
    where = f"runs/flow-run/{run['id']}"

    operator.wait_for(lambda: operator.api("artifacts/count", progress), PATIENCE, "progress")
    look(where, "Running", picture="run-live")

    def ended() -> bool:
        return bool(operator.run(run["id"])["state_type"] == "COMPLETED")

    operator.wait_for(ended, PATIENCE, "end of the run")
    look(where, "Finished in state Completed()", "4 Task runs")
    page.get_by_text("Task Runs", exact=True).click()
    for stage in ("check liver", "load liver", "qc liver", "pca liver"):
        page.get_by_text(stage).first.wait_for()
    look(artifact(operator, "liver-qc"), "18,516 of 20,000 cells", picture="run-qc")
    assert page.locator("img").count() >= 3
    look(artifact(operator, "liver-pca"), "Variance explained")
    look(artifact(operator, "liver-filters"), "Mitochondrial share")
    look(artifact(operator, "liver-summary"), "50 components")
    look(artifact(operator, "liver-filters"), "Mitochondrial share", picture="run-filters")
