"""The site builds without a warning, and its links lead somewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.pages import ROOT

PAGES_AT_LEAST = 40


class Page(HTMLParser):
    """Anchors and links of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value)
            elif (tag, name) in {("a", "href"), ("img", "src"), ("link", "href")}:
                self.links.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, from a copy: nothing is left in the checkout."""
    root = tmp_path_factory.mktemp("site") / "check out"
    for name in ("docs", "flows", "deployments"):
        ignore = shutil.ignore_patterns("_build", "generated", "__pycache__")
        shutil.copytree(ROOT / name, root / name, ignore=ignore)
    for path in ROOT.glob("*.md"):
        shutil.copy(path, root)
    html = root / "html"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", root / "docs", html]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return html


def test_every_link_inside_the_site_leads_to_a_page_and_a_place_on_it(site: Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) >= PAGES_AT_LEAST
    broken = []
    for path, page in pages.items():
        for link in page.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                assert url.scheme in ("https", "http", "data"), f"{path.name}: {link}"
                continue
            target = path if not url.path else (path.parent / unquote(url.path)).resolve()
            place = unquote(url.fragment)
            anchors = pages[target].anchors if target in pages else set()
            if not target.exists() or (place and place not in anchors):
                broken.append(f"{path.name}: {link}")
    assert broken == []


def test_pages_show_tables_figures_and_the_help_of_commands(site: Path) -> None:
    how = (site / "how-it-works.html").read_text("utf-8")
    assert "one_block.png" in how
    assert "--n-top-genes" in (site / "commands.html").read_text("utf-8")
    function = (site / "generated" / "scgpu_tasks.qc.quality_control.html").read_text("utf-8")
    assert "Returns" in function
    assert "ParameterError" in function


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_a_page_outside_the_site_lead_to_files(page: str, site: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text("utf-8")):
        url = urlsplit(target)
        if url.scheme:
            continue
        path = ROOT / url.path if url.path else ROOT / page
        assert path.exists(), f"{page}: {target}"
        if url.fragment:
            built = site / f"{Path(url.path).stem.lower()}.html"
            assert url.fragment in Page(built).anchors, f"{page}: {target}"
