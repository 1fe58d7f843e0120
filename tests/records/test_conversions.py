"""The page that says what became of each source."""

from __future__ import annotations

from scgpu_tasks.records.conversions import conversions_page, counts

CONVERTED = {
    "state": "converted",
    "source": "/in/a.h5ad",
    "store": "/out/a.zarr",
    "stored_bytes": 31_000_000,
    "seconds": 2.04,
    "verified": True,
    "notes": ["unsorted"],
}
CURRENT = {"state": "current", "source": "/in/b.h5ad", "store": "/out/b.zarr"}
FAILED = CURRENT | {
    "state": "failed",
    "source": "/in/c|d.h5ad",
    "error": "StoreError: [x]\n*y*",
}


def test_every_source_has_its_line_and_every_remark_its_source() -> None:
    lines = conversions_page([CONVERTED, CURRENT, FAILED]).splitlines()
    assert lines[0] == "**1 converted, 1 current, 1 failed**"
    assert lines[4] == "| a.h5ad | converted, verified | a.zarr | 31 MB | 2.0 s |"
    assert lines[5] == "| b.h5ad | current | b.zarr | – | – |"
    assert lines[6].startswith(r"| c\|d.h5ad | failed |")
    assert lines[8:] == ["- a.h5ad: unsorted", r"- c\|d.h5ad: StoreError: \[x\] \*y\*"]


def test_a_store_that_was_not_compared_says_so() -> None:
    assert "converted, not verified" in conversions_page([CONVERTED | {"verified": False}])


def test_counts_name_every_end_of_a_conversion() -> None:
    assert counts([CURRENT, CURRENT]) == "0 converted, 2 current, 0 failed"
