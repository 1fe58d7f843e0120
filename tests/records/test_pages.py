import base64
import re
import xml.etree.ElementTree as ET

from scgpu_tasks.records import pages


def test_names_are_shown_as_they_are():
    assert pages.escape("a|b*<script>_x") == "a\\|b\\*&lt;script&gt;\\_x"


def test_figures_need_nothing_of_the_page_they_stand_in(finished):
    parts = {part["name"]: part["content"] for part in pages.qc_parts(finished.qc)}
    text = parts["qc"]
    pictures = re.findall(r"!\[[^\]]*\]\(data:image/svg\+xml;base64,([^)]+)\)", text)
    assert len(pictures) >= 4
    for picture in pictures:
        svg = base64.b64decode(picture).decode()
        root = ET.fromstring(svg)
        assert int(root.attrib["width"]) > 300
        assert root[0].tag.endswith("rect")
        assert "var(" not in svg


def test_every_filter_has_its_row_and_the_losses_add_up(finished):
    rows = pages.filter_rows(finished.qc)
    lost = finished.qc.summary["lost"]
    assert len(rows) == len(lost["cells"]) + len(lost["genes"]) + 2
    n_lost = finished.qc.summary["n_cells"] - finished.qc.summary["n_cells_kept"]
    assert f"{n_lost:,} cells" in [row["lost"] for row in rows]


def test_the_summary_says_where_the_record_is_and_how_long_stages_took(run):
    text = pages.run_page(run, "/data/runs/brave-otter")
    assert "`/data/runs/brave-otter`" in text
    assert "| qc | computed | 1 min 15 s | 4.2 kB |" in text


def test_a_failed_run_says_why(failed_run):
    text = pages.run_page(failed_run, "/r")
    assert "stage qc" in text
    assert "&lt;1&gt;" in text
