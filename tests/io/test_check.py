"""The check names what is slow, and the remedy, on a machine without a GPU too."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import anndata as ad
import numcodecs
import numpy as np
import pytest
import scipy.sparse as sp
import zarr

from scgpu_tasks.__main__ import main
from scgpu_tasks.errors import FormatError, StoreError
from scgpu_tasks.io.checks import check
from scgpu_tasks.io.convert import convert_zarr

ROWS, GENES, NNZ = 4_000, 3_000, 1_500_000


def store(path: Path, form: str = "csr", zarr_format: int = 3, **options: object) -> Path:
    """Write X of 1.5 million values with these options for its arrays."""
    rng = np.random.default_rng(0)
    data = rng.integers(1, 9, NNZ).astype(np.float32)
    major = ROWS if form == "csr" else GENES
    indices = rng.integers(0, ROWS + GENES - major, NNZ).astype(np.int32)
    indptr = np.linspace(0, NNZ, major + 1).astype(np.int32)
    kind = sp.csr_matrix if form == "csr" else sp.csc_matrix
    X = kind((data, indices, indptr), shape=(ROWS, GENES))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root = zarr.open_group(path, mode="w", zarr_format=zarr_format)
        ad.io.write_elem(root, "/", ad.AnnData(shape=(ROWS, GENES)))
        ad.io.write_elem(root, "X", X, dataset_kwargs=options)
        zarr.consolidate_metadata(path)
    return path


def findings(path: Path) -> list[str]:
    """Findings as text."""
    return [str(finding) for finding in check(path).findings]


def test_a_store_in_the_best_form_has_no_findings(small_store: Path) -> None:
    report = check(small_store)
    assert report.ok
    assert report.shape == (1_500, 800)
    assert not [finding for finding in report.findings if finding.slow]
    assert "X/data" in str(report)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"zarr_format": 2, "compressor": numcodecs.Blosc()}, r"zarr format 2.*convert"),
        ({"compressors": zarr.codecs.BloscCodec()}, r"X/data: the GPU cannot decode it.*blosc"),
        ({"compressors": zarr.codecs.GzipCodec()}, r"X/data: .*gzip"),
        ({"chunks": (1_000,), "shards": (100_000,)}, r"X/data: chunks of 3\.9 KiB are many"),
        ({"chunks": (NNZ,)}, r"X/data: chunks of 5,859\.4 KiB are large"),
        ({"chunks": (4_000,), "shards": None}, r"X/data: no shards: 375 files"),
        ({"chunks": (NNZ // 8,), "form": "csc"}, r"X: stored by columns.*--csr"),
    ],
)
def test_what_is_slow_is_named_with_its_remedy(
    tmp_path: Path, options: dict[str, object], expected: str
) -> None:
    report = check(store(tmp_path / "a.zarr", **options))
    assert not report.ok
    slow = "\n".join(str(finding) for finding in report.findings if finding.slow)
    assert re.search(expected, slow), slow


def test_what_cannot_be_read_at_all_is_told_from_what_is_slow(tmp_path: Path) -> None:
    text = str(check(store(tmp_path / "a.zarr", chunks=(NNZ,), form="csc")))
    assert re.search(r"refused +X: stored by columns", text), text
    assert re.search(r"slow +X/data: chunks of", text), text


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        (["X/data/c/3"], "X/data: lost the file c/3, so reading refuses it; .* from a copy"),
        (["X/indices/c/1", "X/indices/c/2"], "X/indices: lost 2 files from c/1 on"),
        (["X/indptr/c/0"], "X/indptr: lost the file c/0"),
        (["var/_index/values/c/0"], "var/_index/values: lost the file c/0"),
    ],
    ids=["values", "column numbers", "places of rows", "names"],
)
def test_files_that_are_not_there_are_told(
    small_store: Path, tmp_path: Path, lost: list[str], expected: str
) -> None:
    path = Path(shutil.copytree(small_store, tmp_path / "a.zarr"))
    for name in lost:
        (path / name).unlink()
    report = check(path)
    assert not report.ok
    assert re.search(f"refused +{expected}", str(report)), str(report)


def test_wide_indices_and_missing_consolidation_are_advice(tmp_path: Path) -> None:
    path = store(tmp_path / "a.zarr", chunks=(65_536,), shards=(655_360,))
    root = json.loads((path / "zarr.json").read_text())
    del root["consolidated_metadata"]
    (path / "zarr.json").write_text(json.dumps(root))
    report = check(path)
    assert report.ok
    text = "\n".join(findings(path))
    assert "X/indices: int32 where uint16 holds every index" in text
    assert "run zarr.consolidate_metadata" in text


def test_what_is_no_store_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        check(tmp_path / "none.zarr")
    zarr.open_group(tmp_path / "a.zarr", mode="w")
    with pytest.raises(FormatError, match="no AnnData"):
        check(tmp_path / "a.zarr")


@pytest.mark.parametrize("form", ["csr", "dense"])
def test_nothing_is_left_to_advise_on_a_converted_store(tmp_path: Path, form: str) -> None:
    source = store(tmp_path / "a.zarr", chunks=(4_000,))
    if form == "dense":
        source = tmp_path / "a.h5ad"
        ad.AnnData(np.ones((ROWS, 500), np.float32)).write_h5ad(source)
    assert not check(source).ok
    convert_zarr(source, tmp_path / "b.zarr")
    assert check(tmp_path / "b.zarr").findings == ()


def test_the_command_prints_text_or_json_and_exits_by_what_it_found(
    tmp_path: Path, small_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(small_store)]) == 0
    assert "this machine:" in capsys.readouterr().out
    slow = store(tmp_path / "a.zarr", chunks=(4_000,))
    assert main(["check", str(slow), "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["ok"] is False
    assert content["shape"] == [ROWS, GENES]
    assert {"path", "dtype", "codec", "chunk_bytes", "gpu"} <= content["arrays"][0].keys()
    assert {"where", "what", "remedy", "slow", "refused"} == content["findings"][0].keys()
    assert content["machine"]["versions"]["zarr"] == zarr.__version__
    assert main(["check", str(tmp_path / "none")]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_the_convert_command_converts_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = store(tmp_path / "a.zarr", form="csc", chunks=(40_000,))
    target = tmp_path / "b.zarr"
    command = ["convert", str(source), str(target), "--csr", "--data-dtype", "uint8", "--json"]
    assert main([*command, "--chunk-bytes", "65536", "--level", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["shape"] == [ROWS, GENES]
    assert result["verified"] is True
    assert zarr.open_array(target / "X/data", mode="r").dtype == np.uint8
    assert main(["convert", str(source), str(target)]) == 1
    assert "exists" in capsys.readouterr().err
    assert main(["convert", str(source), str(tmp_path / "c.zarr"), "--csr"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"converted  {source} -> {tmp_path / 'c.zarr'}  (")
    assert "verified)" in out
    with pytest.raises(SystemExit):
        main(["check", str(target), "--js"])
    assert main(["check", str(target)]) == 0


def test_the_command_line_starts_without_heavy_imports() -> None:
    code = (
        "import sys; import scgpu_tasks.__main__; "
        "print([m for m in ('numpy', 'zarr', 'anndata', 'prefect') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.strip() == "[]"


def test_check_imports_no_gpu_library(small_store: Path) -> None:
    code = (
        "import sys; from scgpu_tasks.io.checks import check; check(sys.argv[1]); "
        "print([m for m in ('cupy', 'nvidia.nvcomp', 'rmm') if m in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, str(small_store)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == "[]"
