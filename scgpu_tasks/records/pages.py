"""What the stages found as Markdown and rows, for the pages of a server that a run reports to.

Figures are SVG in ``data:`` URIs: such a page loads nothing from elsewhere. Names of genes and
columns come from the data and are escaped.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from scgpu_tasks.records import words

if TYPE_CHECKING:
    from scgpu_tasks.stages.pca import PCAResult
    from scgpu_tasks.stages.qc import QCResult


class Part(TypedDict):
    """A table or a text on a run's page."""

    name: str
    title: str
    content: str | list[dict[str, Any]]
    """Markdown, or rows of a table."""


_LIGHT = {
    "var(--ink)": "#1b2430",
    "var(--muted)": "#5b6675",
    "var(--grid)": "#e4e7ec",
    "var(--surface)": "#ffffff",
    "var(--kept)": "#1f78b4",
    "var(--removed)": "#e08a3c",
}
_PIXELS_PER_POINT = 1.6
_GENES_NAMED = 20
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~])")


def escape(text: object) -> str:
    """Text that Markdown shows as it is."""
    return _SPECIAL.sub(r"\\\1", html.escape(str(text), quote=False))


def picture(svg: str, alt: str) -> str:
    """Markdown image of a figure of ours, which needs nothing of the page it stands in."""
    for variable, colour in _LIGHT.items():
        svg = svg.replace(variable, colour)
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    if box is not None:
        width, height = (round(float(n) * _PIXELS_PER_POINT) for n in box.groups())
        # Pages are light or dark; figures that know neither bring their own paper.
        svg = svg.replace("<svg", f'<svg width="{width}" height="{height}"', 1)
        head, mark, rest = svg.partition(">")
        paper = '<rect width="100%" height="100%" fill="#ffffff"/>'
        svg = f'{head} font-family="system-ui, sans-serif"{mark}{paper}{rest}'
    data = base64.b64encode(svg.encode()).decode()
    return f"![{escape(alt)}](data:image/svg+xml;base64,{data})"


def check_page(report: Mapping[str, Any]) -> str:
    """How the store is stored, what that costs, and the remedy.

    Parameters
    ----------
    report
        ``CheckReport.to_json()``.
    """
    cells, genes = report["shape"]
    lines = [
        f"**{escape(report['path'])}**: {escape(report['form'])}, {cells:,} cells, "
        f"{genes:,} genes",
        "",
        "| array | type | codec | chunk | chunks | files | on a GPU |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    for a in report["arrays"]:
        chunk = words.size(a["chunk_bytes"]) if a["chunk_bytes"] else "–"
        lines.append(
            f"| {escape(a['path'])} | {escape(a['dtype'])} | {escape(a['codec'])} | {chunk} | "
            f"{a['chunks']:,} | {a['files']:,} | {'yes' if a['gpu'] else 'no'} |"
        )
    lines.append("")
    if not report["findings"]:
        lines.append("Nothing to improve: the store can be read at full speed.")
    for finding in report["findings"]:
        where = f"{escape(finding['where'])}: " if finding["where"] else ""
        kind = "**slow** " if finding["slow"] else ""
        if finding.get("refused"):
            kind = "**refused** "
        lines.append(f"- {kind}{where}{escape(finding['what'])}; {escape(finding['remedy'])}")
    return "\n".join(lines)


def filter_rows(qc: QCResult) -> list[dict[str, Any]]:
    """Return one row for each filter: what it asks for, and what was lost to it."""
    from scgpu_tasks.records.cells_view import filters_view

    rows = []
    for table in filters_view(qc.summary):
        what = table["title"].lower()
        rows += [
            {
                "filter": row["name"],
                "keeps": row["rule"],
                "lost": f"{row['lost']:,} {what}",
                "share": words.percent(row["lost"], table["total"]),
            }
            for row in table["rows"]
        ]
        rows.append(
            {
                "filter": f"all filters of {what}",
                "keeps": f"{table['kept']:,} of {table['total']:,} {what}",
                "lost": f"{table['total'] - table['kept']:,} {what}",
                "share": words.percent(table["total"] - table["kept"], table["total"]),
            }
        )
    return rows


def qc_parts(qc: QCResult, view: Mapping[str, Any] | None = None) -> list[Part]:
    """Return what the QC stage puts on the page: filters, metrics, variable genes.

    Parameters
    ----------
    qc
        What the stage returned.
    view
        `scgpu_tasks.records.cells_view.cells_view` of it, if its figures are drawn already.
    """
    if view is None:
        from scgpu_tasks.records.cells_view import metrics_view, variable_view

        figures, variable = metrics_view(qc), variable_view(qc.genes)
    else:
        figures, variable = view["histograms"] + view["grids"], view["variable"]
    parts: list[Part] = [
        {
            "name": "filters",
            "title": "Cells and genes lost to each filter",
            "content": filter_rows(qc),
        },
        {"name": "qc", "title": "Quality control", "content": _qc_page(qc.summary, figures)},
    ]
    if variable is not None:
        page = _genes_page(variable)
        parts.append({"name": "genes", "title": "Highly variable genes", "content": page})
    return parts


def pca_parts(pca: PCAResult, view: Mapping[str, Any] | None = None) -> list[Part]:
    """Return what the PCA stage puts on the page: variance explained, a map of the cells.

    Parameters
    ----------
    pca
        What the stage returned.
    view
        `scgpu_tasks.records.pca_view.pca_view` of it, if its figures are drawn already.
    """
    from scgpu_tasks.records import pca_figures

    share = pca.variance_ratio
    figures = [
        {
            "title": "Variance explained",
            "svg": pca_figures.scree(share) if view is None else view["scree"]["svg"],
            "caption": f"{len(share)} components explain {words.percent(float(share.sum()))}.",
        }
    ]
    if pca.X_pca.shape[1] >= 2:
        shown = min(len(pca.X_pca), pca_figures.POINTS)
        svg, _ = pca_figures.components(
            pca.X_pca, (0, 1), None, name="page-map", variance_ratio=share
        )
        figures.append(
            {
                "title": "PC1 and PC2",
                "svg": svg,
                "caption": f"{shown:,} of {len(pca.X_pca):,} cells drawn.",
            }
        )
    page = "\n".join(_figures(figures))
    return [{"name": "pca", "title": "Principal components", "content": page}]


def _qc_page(summary: Mapping[str, Any], figures: list[dict[str, Any]]) -> str:
    cells = words.percent(summary["n_cells_kept"], summary["n_cells"])
    genes = words.percent(summary["n_genes_kept"], summary["n_genes"])
    lines = [
        f"**{summary['n_cells_kept']:,} of {summary['n_cells']:,} cells** ({cells}) and "
        f"**{summary['n_genes_kept']:,} of {summary['n_genes']:,} genes** ({genes}) kept; "
        f"{summary['n_hvg']:,} genes highly variable.",
        *_figures(figures),
        *(f"\n> {escape(note)}" for note in summary.get("notes", [])),
    ]
    return "\n".join(lines)


def _genes_page(variable: dict[str, Any]) -> str:
    named = ", ".join(escape(name) for name in variable["names"][:_GENES_NAMED])
    return "\n".join(
        [*_figures([{"title": "", **variable}]), "", f"The most variable ones: {named}."]
    )


def run_page(run: Mapping[str, Any], record: str) -> str:
    """Return what a run found, the time of each stage, and where its record is.

    Parameters
    ----------
    run
        Content of run.json.
    record
        The record's folder.
    """
    qc, pca = run["summary"].get("qc", {}), run["summary"].get("pca", {})
    lines = [f"**{escape(run['name'])}**: {run['state']}", ""]
    if qc:
        lines.append(
            f"- {qc['n_cells_kept']:,} of {qc['n_cells']:,} cells and {qc['n_genes_kept']:,} "
            f"of {qc['n_genes']:,} genes kept, {qc['n_hvg']:,} highly variable"
        )
    if pca:
        explained = pca.get("variance_explained")
        of = "" if explained is None else f", {words.percent(explained)} of the variance"
        lines.append(f"- {pca['n_comps']} components{of}")
    error = run.get("error")
    if error:
        lines.append(f"- stage {error['stage']}: {escape(error['message'])}")
    lines += ["", "| stage | state | time | read |", "|---|---|---:|---:|"]
    for name, entry in run["stages"].items():
        ran = entry["state"] not in ("skipped", "pending")
        time = words.duration(entry["seconds"]) if ran else "–"
        read = words.size(entry["bytes_read"]) if entry.get("bytes_read") else "–"
        lines.append(f"| {name} | {entry['state']} | {time} | {read} |")
    lines += [
        "",
        f"Record: `{record}`",
        "",
        f"[Open report.html](file://{record}/report.html) works where the browser sees that "
        "folder and may open files; otherwise copy the path.",
    ]
    return "\n".join(lines)


def _figures(figures: list[dict[str, Any]]) -> list[str]:
    lines = []
    for figure in figures:
        if figure["title"]:
            lines += ["", f"#### {escape(figure['title'])}"]
        lines += ["", picture(figure["svg"], figure["title"] or "figure"), ""]
        lines.append(escape(figure["caption"]))
    return lines
