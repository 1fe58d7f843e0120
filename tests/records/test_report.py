from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import anndata as ad
import matplotlib
import numpy as np
import pandas as pd
import pytest

from scgpu_tasks.records import qc_figures, write_record
from scgpu_tasks.records.cells_view import filters_view
from scgpu_tasks.records.report import render
from scgpu_tasks.records.views import report_view
from scgpu_tasks.specs import QCSpec
from tests.records.conftest import Finished, finish

HOSTILE = (
    "<script>alert(1)</script>",
    "</svg><img src=x onerror=alert(1)>",
    "$\\frac{1}{$",
    "$x_1^2$",
    "a & b &amp; c",
    "\"double\" 'single' `back`",
    "two\nlines\tand tab",
    "{{ 7 * 7 }} {% raw %}",
    "βアクチン 🧬 \u202eright to left",
    "--ink: url(http://example.org)",
    "%s %(x)d {0}",
    " ",
)
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Elements, attributes and visible text of a page; fails on tags that do not match."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        # HTML lets a list item, a cell and a row end by themselves; this page closes them all.
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)


def view_of(done: Finished) -> dict[str, Any]:
    return report_view(done.obs, done.qc, done.pca, batch_key="batch")


@pytest.fixture(scope="module")
def html(finished: Finished) -> str:
    return render(RUN, view_of(finished))


RUN: dict[str, Any] = {
    "flow": "atlas-qc",
    "name": "brave-otter",
    "state": "completed",
    "start": "2026-03-01T08:30:00+01:00",
    "seconds": 81.0,
    "parameters": {"store": "/data/atlas.zarr", "batch_key": "batch"},
    "store": {},
    "stages": {"qc": {"state": "computed", "seconds": 75.0}},
}


def section(html: str, name: str) -> str:
    found = re.search(rf'<section[^>]* id="{name}">(.*?)</section>', html, re.DOTALL)
    assert found, name
    return found[1]


def text_of(html: str) -> str:
    return " ".join(" ".join(Page(html).texts).split())


def test_the_report_is_one_file_that_fetches_and_runs_nothing(html: str) -> None:
    page = Page(html)
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in {"src", "href", "xlink:href", "data", "srcset", "poster"}:
            assert value.startswith(("#", "data:image/png;base64,")), (tag, name, value[:60])
    assert not re.findall(r"url\((?!#)", html)
    assert "@import" not in html
    contents = [v for t, n, v in page.attributes if t == "meta" and n == "content"]
    assert any(v.startswith("default-src 'none'") for v in contents)


def test_every_question_of_a_biologist_has_its_section(html: str, finished: Finished) -> None:
    summary = finished.qc.summary
    tiles = text_of(section(html, "summary"))
    assert f"{summary['n_cells_kept']:,} cells kept of {summary['n_cells']:,}" in tiles
    assert f"{summary['n_genes_kept']:,} genes kept of {summary['n_genes']:,}" in tiles
    cells = text_of(section(html, "cells"))
    assert "Threshold: at least 60." in cells
    assert "Threshold: at most 20 %." in cells
    filters = text_of(section(html, "filters"))
    lost = summary["lost"]
    assert f"Few genes at least 60 genes {lost['cells']['min_genes']}" in filters
    damaged = lost["cells"]["max_pct_mt"]
    assert f"Mitochondrial share at most 20 % of counts {damaged}" in filters
    assert f"Seen in few cells in at least 3 kept cells {lost['genes']['min_cells']}" in filters
    assert finished.qc.genes["total_counts"].idxmax() in text_of(section(html, "genes"))
    pca = text_of(section(html, "pca"))
    assert "PC1 and PC2 by batch" in pca
    assert "PC1 and PC2 by cell_type" in pca
    assert "CD4 T cell" in pca
    assert "results.zarr" in text_of(section(html, "use"))


def test_the_largest_loadings_are_listed_at_their_end(html: str, finished: Finished) -> None:
    names = finished.qc.genes.index[finished.qc.genes["highly_variable"]]
    first = finished.pca.PCs[:, 0]
    cards = text_of(section(html, "pca")).split("Genes that make up each component")[1]
    card = cards.split("PC1")[1].split("PC2")[0]
    high, low = card.split("+")[1].split("−")
    assert high.split(",")[0].strip() == names[first.argmax()]
    assert low.split(",")[0].strip() == names[first.argmin()]


def test_figures_do_not_share_identifiers(html: str) -> None:
    ids = Counter(v for _, name, v in Page(html).attributes if name == "id")
    assert [i for i, n in ids.items() if n > 1] == []
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', html)) <= set(ids)
    assert Page(html).tags["svg"] >= 7
    assert html.count('role="img"') == Page(html).tags["svg"]


def test_figures_take_their_colours_from_the_page(html: str) -> None:
    assert "var(--ink)" in section(html, "cells")
    assert not re.findall(r"#0[1-7]0[2-8]0[3-9]", html.lower())
    assert "prefers-color-scheme: dark" in html


def test_the_same_run_makes_the_same_report(html: str, finished: Finished) -> None:
    assert render(RUN, view_of(finished)) == html


def test_two_reports_at_once_come_out_as_one_by_one(html: str, finished: Finished) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda _: render(RUN, view_of(finished)), range(2))
        assert list(found) == [html, html]


def test_the_users_matplotlib_settings_neither_matter_nor_change(
    html: str, finished: Finished
) -> None:
    theirs = {"text.usetex": True, "font.size": 40, "axes.facecolor": "red", "backend": "pdf"}
    with matplotlib.rc_context(theirs):
        before = dict(matplotlib.rcParams)
        assert render(RUN, view_of(finished)) == html
        assert dict(matplotlib.rcParams) == before


def test_a_record_of_a_run_that_only_began_needs_no_matplotlib(
    tmp_path: Path, run: dict
) -> None:
    code = (
        "import sys, json; from scgpu_tasks.records import write_record\n"
        "write_record(sys.argv[1], json.loads(sys.argv[2]))\n"
        "assert 'matplotlib' not in sys.modules\n"
    )
    run["state"] = "running"
    command = [sys.executable, "-c", code, str(tmp_path), json.dumps(run)]
    assert subprocess.run(command, check=False).returncode == 0
    assert "This run has not ended" in (tmp_path / "report.html").read_text("utf-8")


def hostile(finished: Finished) -> Finished:
    """Same numbers; genes, batches, cell types and columns with names that try everything."""
    genes = finished.qc.genes.copy()
    top = [
        *genes["total_counts"].nlargest(3).index,
        *genes["dispersions_norm"].where(genes["highly_variable"]).nlargest(6).index,
    ]
    chosen = genes.index[genes["highly_variable"]]
    top += [chosen[finished.pca.PCs[:, i].argmax()] for i in range(8)]
    new = dict(zip(dict.fromkeys(top), HOSTILE, strict=False))
    index = [new.get(name, name) for name in genes.index]
    obs = finished.obs.copy()
    labels = np.array(HOSTILE, dtype=object)[np.arange(len(obs)) % len(HOSTILE)]
    obs["batch"] = pd.Categorical(labels)
    obs["<b>$type$"] = obs["cell_type"]
    obs = obs.drop(columns="cell_type")
    qc = dataclasses.replace(finished.qc, genes=genes.set_axis(index))
    qc.summary = qc.summary | {"notes": [f"no gene matched {HOSTILE[0]}"]}
    return Finished(obs, finished.var.set_axis(index), qc, finished.pca)


def test_names_are_shown_as_text_whatever_they_hold(
    tmp_path: Path, html: str, finished: Finished, run: dict
) -> None:
    odd = hostile(finished)
    run["name"] = HOSTILE[1]
    run["parameters"] = {"store": HOSTILE[0], "batch_key": "batch", HOSTILE[4]: HOSTILE[5]}
    run["store"]["path"] = HOSTILE[0]
    path = write_record(tmp_path, run, obs=odd.obs, var=odd.var, qc=odd.qc, pca=odd.pca)
    text = path.read_text("utf-8")
    page = Page(text)
    assert not {"script", "img"} & set(page.tags)
    assert page.tags["svg"] == Page(html).tags["svg"]
    pca, genes = Page(section(text, "pca")).texts, Page(section(text, "genes")).texts
    for name in (*HOSTILE, "PC1 and PC2 by <b>$type$"):
        assert any(name in t for t in pca), name
    for name in HOSTILE[:3]:
        assert any(name in t for t in genes), name
    assert any(HOSTILE[0] in t for t in Page(section(text, "summary")).texts)
    assert ad.read_zarr(tmp_path / "results.zarr").obs["batch"].isin(HOSTILE).all()


def test_a_failed_run_says_where_why_and_what_to_do(tmp_path: Path, failed_run: dict) -> None:
    report = write_record(tmp_path, failed_run).read_text("utf-8")
    error = text_of(section(report, "error"))
    assert "It failed in the stage “qc”" in error
    assert "X holds -1.0 at cell 'c<1>' (row 3), gene 'G&7'" in error
    assert "--layer" in error
    assert "not run again next time: check, load." in error
    assert "Traceback (most recent call last)" in error
    stages = text_of(section(report, "stages"))
    assert "qc failed" in stages
    assert "pca pending –" in stages
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "run.json"]


def test_an_error_of_a_kind_without_advice_still_says_what_to_do(failed_run: dict) -> None:
    failed_run["error"] = {"stage": "start", "type": "OddError", "message": ""}
    for entry in failed_run["stages"].values():
        entry["state"] = "pending"
    error = text_of(section(render(failed_run), "error"))
    assert "It failed before the first stage" in error
    assert "OddError" in error
    assert "Run the same command again." in error


def test_a_stopped_run_is_no_failure(failed_run: dict) -> None:
    failed_run["state"] = "cancelled"
    page = text_of(render(failed_run))
    assert "This run was stopped" in page
    assert "Stopped in the stage “qc”" in page
    assert "failed" not in text_of(section(render(failed_run), "error"))


def test_the_axis_of_variable_genes_says_what_the_flavour_measured(
    html: str, finished: Finished
) -> None:
    assert "mean expression (log)" in section(html, "genes")
    names = {"dispersions_norm": "variances_norm", "dispersions": "variances"}
    genes = finished.qc.genes.rename(columns=names)
    qc = dataclasses.replace(finished.qc, genes=genes)
    shown = section(
        render(RUN, report_view(finished.obs, qc, finished.pca, batch_key="batch")), "genes"
    )
    assert "mean counts" in shown
    assert "variance, standardised" in shown


def test_mad_limits_are_shown_as_the_counts_they_mean(atlas: ad.AnnData) -> None:
    done = finish(atlas, QCSpec(mad=True, min_cells=3))
    limits = done.qc.summary["thresholds"]["mad"]["log1p_total_counts"]
    report = render(RUN, view_of(done))
    low, high = f"{np.expm1(limits[0]):.3g}", f"{np.expm1(limits[1]):,.0f}"
    assert f"Counts far from the median {low} to {high}" in text_of(section(report, "filters"))
    shown = (
        re.escape(f"Threshold: {low}")
        + r"( \(which is outside the plot\))? to "
        + re.escape(high)
    )
    assert re.search(shown, text_of(section(report, "cells")))


@pytest.mark.filterwarnings("ignore:Zero-center being used")
@pytest.mark.parametrize("case", ["no mt genes", "few cells", "one component", "no filter"])
def test_unusual_runs_have_a_report_too(atlas: ad.AnnData, case: str) -> None:
    spec, options = QCSpec(min_genes=60), {}
    if case == "no mt genes":
        atlas = atlas[:, ~atlas.var_names.str.startswith("MT-")].copy()
    elif case == "few cells":
        atlas = atlas[:5].copy()
        spec, options = QCSpec(min_genes=0, max_pct_mt=100, min_cells=1), {"n_comps": 2}
    elif case == "one component":
        options = {"n_comps": 1}
    else:
        spec = QCSpec(min_genes=None, max_pct_mt=None, min_cells=None)
    done = finish(atlas, spec, **options)
    report = render(RUN, view_of(done))
    Page(report)
    assert "Variance explained" in report
    if case == "no mt genes":
        assert "Where damaged cells lie" not in report
    if case == "no filter":
        assert text_of(section(report, "filters")).count("No filter was set.") == 1


def test_thresholds_outside_the_data_are_said_to_be_and_leave_the_axis_alone(
    finished: Finished,
) -> None:
    values = finished.qc.cells["n_genes_by_counts"].to_numpy()
    kept = np.ones(len(values), bool)
    near, far = int(np.median(values)), int(values.max()) * 2
    draws = [
        qc_figures.histogram(
            values, kept, name="h", label="genes", bounds=(near, high), log=True
        )
        for high in (None, far)
    ]
    assert draws[0] == draws[1]
    qc = dataclasses.replace(
        finished.qc,
        summary=finished.qc.summary | {"thresholds": {"min_genes": near, "max_genes": far}},
    )
    text = text_of(section(render(RUN, report_view(finished.obs, qc)), "cells"))
    assert f"Threshold: {near:,} to {far:,} (which is outside the plot)." in text


def test_thresholds_of_genes_are_whole_numbers_also_from_deviations(finished: Finished) -> None:
    mad = {"log1p_n_genes_by_counts": [np.log1p(70.4), np.log1p(310.6)]}
    qc = dataclasses.replace(
        finished.qc, summary=finished.qc.summary | {"thresholds": {"mad": mad}}
    )
    text = text_of(section(render(RUN, report_view(finished.obs, qc)), "cells"))
    assert re.search(r"Threshold: 71( \(which is outside the plot\))? to 310", text)


@pytest.mark.parametrize(
    ("verified", "words"), [(True, "no difference"), (False, "NOT compared")]
)
def test_the_report_says_whether_a_conversion_was_verified(verified: bool, words: str) -> None:
    run = {**RUN, "summary": {"convert": {"verified": verified}}}
    assert words in text_of(section(render(run), "stages"))


def test_kept_cells_do_not_stand_in_the_column_of_removed_ones(finished: Finished) -> None:
    report = section(render(RUN, report_view(finished.obs, finished.qc)), "filters")
    summary = finished.qc.summary
    kept, total = summary["n_cells_kept"], summary["n_cells"]
    assert f"Kept by all filters: {kept:,} of {total:,} (" in text_of(report)


def test_a_filter_without_genes_to_filter_by_is_not_said_to_have_passed_everybody() -> None:
    summary = {"n_cells": 9, "n_cells_kept": 9, "n_genes": 5, "n_genes_kept": 5}
    summary |= {"lost": {"cells": {"max_pct_mt": 0}}, "thresholds": {"max_pct_mt": 20.0}}
    rules = {
        n: filters_view(summary | {"gene_sets": {"mt": n}})[0]["rows"][0]["rule"]
        for n in (0, 3)
    }
    assert rules == {
        0: "not applied: no mitochondrial gene was found",
        3: "at most 20 % of counts",
    }
